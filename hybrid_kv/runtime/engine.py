"""The engine: requests in, tokens out, through the functional cache on a sharded mesh.

One step is: queue arrivals, plan, run the plan on the devices, sample, commit. All decisions are the
scheduler's; the engine only carries tokens between the host, the plan and the devices. Every replica of the mesh
plans for itself, and all of them run in one step of the devices.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hybrid_kv import hashing
from hybrid_kv.cache.lookup import SALTED, SKIP_READ
from hybrid_kv.errors import UserError
from hybrid_kv.models.checkpoint_io import load, load_config
from hybrid_kv.models.config import KimiLinearConfig, experts_over, kda_over
from hybrid_kv.models.execution import Execution
from hybrid_kv.models.parameters import check_mesh
from hybrid_kv.plan import StepPlan
from hybrid_kv.planning import CacheOptions, CachePlan, plan_cache
from hybrid_kv.planning.forms import KERNELS
from hybrid_kv.runtime import metadata
from hybrid_kv.runtime.compilations import compilations
from hybrid_kv.runtime.describe import cache_shape, describe
from hybrid_kv.runtime.device import DeviceStep
from hybrid_kv.runtime.replica import Replica, ReplicaStats
from hybrid_kv.runtime.requests import Prompt, Request, RequestResult, SamplingParams, Scores, StepOutput
from hybrid_kv.runtime.routing import Router
from hybrid_kv.sharding import AXES, MeshSpec

# Rows of the context expanded at a time on an accelerator; fewer cost a pass over the state of the queries each.
_WORKSPACE = 8192

__all__ = ["CacheOptions", "Engine", "EngineStats", "ReplicaStats", "RequestResult", "SamplingParams", "StepOutput"]


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was made, of all replicas together.

    steps: of the devices, which all replicas share. tokens_prefilled: prompt (or resumed) tokens computed.
    tokens_saved: served from the cache at first admission. checkpoints: states saved. skipped_checkpoints:
    wanted, but no slot was free. pools: per pool (in use, cached, free, total). replicas: the same of each.
    """

    steps: int
    tokens_prefilled: int
    tokens_saved: int
    checkpoints: int
    skipped_checkpoints: int
    evictions: int
    preemptions: int
    compilations_after_warm_up: int
    pools: dict[str, tuple[int, int, int, int]]
    replicas: tuple[ReplicaStats, ...]


def _execution(residual: str) -> Execution:
    """On an accelerator prompts are attended to in expanded form; on CPU bits do not depend on the cut into steps."""
    return Execution(workspace=_WORKSPACE if jax.default_backend() in KERNELS else None, residual=residual)


class Engine:
    """Serves one model, on as many replicas as the mesh has. Not thread safe: one caller steps it."""

    def __init__(
        self,
        model: KimiLinearConfig,
        params: Mapping[str, jax.Array],
        plan: CachePlan,
        mesh: Mesh,
        dtype: str,
        secret: bytes = b"",
        residual: str = "replicated",
    ) -> None:
        config = plan.config
        self._secret = secret
        self.model, self.plan, self.config, self.dtype = model, plan, config, dtype
        self.vocab_size = model.vocab_size
        self._stops = frozenset(model.eos_token_ids)
        dtypes = {"mla": dtype, "kda": "float32", "conv": dtype}
        self._replicas = [Replica(config) for _ in range(plan.mesh.data)]
        self._router = Router(config, plan.mesh.data)
        interleave = config.geometry.groups[config.geometry.attention[0]].interleave if config.geometry.attention else 1
        self._device = DeviceStep(model, params, mesh, plan.sharding, dtypes, interleave, _execution(residual))
        self._queue: collections.deque[Request] = collections.deque()
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self._steps = self._compiled_late = 0
        self._warm = False
        self._in_flight: tuple[Any, Any] | None = None
        self._gained: list[StepOutput] = []

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        mesh: str | MeshSpec | Mesh = "",
        cache: CacheOptions | None = None,
        dtype: str = "float32",
        secret: bytes = b"",
        experts: str = "tensor",
        weights_cache: str | os.PathLike[str] | None = None,
        kda: str = "tensor",
        residual: str = "replicated",
    ) -> Engine:
        """Load a Kimi Linear or K3 checkpoint folder (config.json and safetensors) onto a mesh.

        mesh: `model=2,dcp=4`, a `MeshSpec`, or a jax Mesh with axes data, model, dcp. data is the number of replicas;
        sizes in `cache` are of each.
        dtype: of weights, activations and MLA rows; recurrent states stay float32.
        secret: goes into every cache key, see `hashing.seed`; `hashing.new_secret()` draws one for this process. By
        default keys depend on content alone.
        experts: routed experts are spread over the "tensor" group, each replica with its own, or over the whole "mesh".
        weights_cache: folder that keeps weights in their device form as they are loaded. A load that is cut short goes
        on from there, and a later one of the same checkpoint, mesh and dtype converts nothing.
        kda: heads of KDA, with their weights and states, are split over the "tensor" group or over "model" alone, or
        all are "replicated" on every device of the group: more memory, and nothing to sum after the mixer.
        residual: the residual stream is "replicated" over the tensor group, or split over it by tokens ("sequence"), so
        that norms and attention residual take a part of the work and memory. Step sizes are rounded up to what the
        group divides, but `token_buckets` that it does not are refused; decode steps that it does not divide run with
        the stream replicated.
        Raises UserError for anything a user can put right.
        """
        sizes = MeshSpec.of(mesh) if isinstance(mesh, Mesh) else MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
        folder = Path(path)
        model = dataclasses.replace(load_config(folder), expert_axes=experts_over(experts), kda_axes=kda_over(kda))
        if dtype not in ("float32", "bfloat16"):
            raise UserError("dtype", dtype, "use float32 or bfloat16")
        # Refuse what cannot be one, before weights are loaded.
        hashing.seed(secret=secret)
        multiple = _execution(residual).token_multiple(sizes.tensor)
        check_mesh(model, {axis: getattr(sizes, axis) for axis in AXES})
        kernels = jax.default_backend() if jax.default_backend() in KERNELS else None
        plan = plan_cache(cache_shape(model, dtype), cache or CacheOptions(), sizes, kernels, multiple)
        built = mesh if isinstance(mesh, Mesh) else sizes.build()
        params = load(folder, model, built, jnp.dtype(dtype), cache=weights_cache)
        return cls(model, params, plan, built, dtype, secret, residual)

    # Requests

    def add_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        skip_cache_read: bool = False,
        salt: str = "",
        extra_keys: hashing.ExtraKeys = hashing.NO_EXTRA_KEYS,
    ) -> int:
        """Queue a prompt; returns its id. A bad one raises UserError and disturbs nobody.

        skip_cache_read: compute the whole prompt; what it computes is still cached. salt: requests share prefixes only
        with those of the same salt. extra_keys: what the answer depends on besides the tokens, for a model that is
        given it elsewhere; prefixes are shared only where it is equal.
        """
        flags = (SKIP_READ if skip_cache_read else 0) | (SALTED if salt else 0)
        return self._enqueue(prompt, sampling or SamplingParams(), flags, salt=salt, extra_keys=extra_keys)

    def abort(self, request_id: int) -> None:
        """End a request at any moment; its blocks are free at once."""
        request = self._known(request_id)
        if request.finish_reason:
            return
        request.finish_reason = "aborted"
        if request in self._queue:
            self._queue.remove(request)
        else:
            self._replicas[request.replica].abort(request)

    @property
    def reserved_tokens(self) -> int:
        """Low token ids up to the last special one, which made-up prompts should avoid (0: specials lie high)."""
        low = max(self._stops, default=-1) + 1
        return low if low <= self.vocab_size // 2 else 0

    @property
    def has_work(self) -> bool:
        """Whether a request is queued or live."""
        return bool(self._queue) or any(replica.live for replica in self._replicas)

    def result(self, request_id: int) -> RequestResult:
        """A request as it stands."""
        return self._known(request_id).result()

    def forget(self, request_id: int) -> None:
        """Drop the record of an ended request."""
        if self._known(request_id).finish_reason:
            del self._requests[request_id]

    # Steps

    def warm_up(self, score: bool = False) -> None:
        """Compile every step size, and the scoring steps too if asked; afterwards nothing compiles."""
        compilations()
        null = [metadata.null_plan(self._replicas[0].controller.warm_up())] * len(self._replicas)
        self._launch(null, self.config.max_requests, decode_only=True, all_logits=False)
        for tokens in self.plan.buckets:
            self._launch(null, tokens, decode_only=False, all_logits=False)
        for tokens in {self.config.max_requests, *self.plan.buckets} if score else ():
            self._launch(null, tokens, decode_only=False, all_logits=True)
        self._warm = True

    def step(self) -> list[StepOutput]:
        """Run one step of whatever is live; returns what requests gained.

        If it is interrupted nothing is lost: a step that was not handed to the devices is planned again,
        one that was is settled by the next call.
        """
        before = compilations()
        if self._in_flight is None:
            self._admit()
            self._in_flight = self._dispatch()
            if self._in_flight is None:
                return []
        self._settle(*self._in_flight)
        self._in_flight = None
        self._steps += 1
        self._compiled_late += (compilations() - before) if self._warm else 0
        outputs, self._gained = self._gained, []
        return outputs

    def _admit(self) -> None:
        """Move queued requests into free slots, in the order of the queue."""
        while self._queue and any(replica.has_room for replica in self._replicas):
            request = self._queue.popleft()
            keys = request.prompt_keys(self.config.units)
            request.replica, request.guessed_hit = self._choose(request, keys)
            self._replicas[request.replica].arrive(request, keys)

    def _choose(self, request: Request, keys: np.ndarray) -> tuple[int, int]:
        """The replica for a request, of those with a free slot, and the tokens that it is likely to find there."""
        if len(self._replicas) == 1:
            return 0, 0  # with nothing to choose, nothing is remembered
        loads = {index: replica.load for index, replica in enumerate(self._replicas) if replica.has_room}
        reads = self.config.prefix_caching and not request.flags & SKIP_READ
        return self._router.route(keys, request.prompt_length, loads, reads)

    def _dispatch(self) -> tuple[Any, Any] | None:
        """Plan a step of every replica and hand it to the devices: (sampled tokens, scores or None), both still being
        computed; None without work."""
        try:
            own = [replica.plan() for replica in self._replicas]
            some = next((plan for plan in own if plan is not None), None)
            if some is None:
                return None
            plans = [metadata.null_plan(some) if plan is None else plan for plan in own]
            tokens, decode_only = metadata.bucket_of(plans, self.plan.buckets)
            scoring = any(replica.scores for replica in self._replicas)
            sampled, *scores = self._launch(plans, tokens, decode_only and not scoring, scoring)
        except BaseException:
            self._withdraw()
            raise
        return sampled, scores if scoring else None

    def _withdraw(self) -> None:
        for replica in self._replicas:
            replica.withdraw()

    def _launch(self, plans: Sequence[StepPlan], tokens: int, decode_only: bool, all_logits: bool):
        parts = [
            metadata.build(self.config, plan, replica.slots, tokens, all_logits)
            for replica, plan in zip(self._replicas, plans, strict=True)
        ]
        return self._device.run(parts, decode_only=decode_only, all_logits=all_logits)

    def _settle(self, sampled: Any, scores: Any) -> None:
        """Wait for a step and settle it for each replica that has not done so; results lie one behind the other."""
        count = len(self._replicas)
        tokens = np.split(np.asarray(sampled), count)
        scored: list[Scores | None] = [None] * count
        if scores is not None:
            scored = [Scores(*parts) for parts in zip(*(np.split(np.asarray(p), count) for p in scores), strict=True)]
        for replica, own, own_scores in zip(self._replicas, tokens, scored, strict=True):
            if replica.flying is not None:
                self._gained += replica.settle(own, own_scores)

    # Conveniences: they step whatever is live; what other requests gain meanwhile is in their results.

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams | None = None) -> list[RequestResult]:
        """Answer a batch of prompts; results in their order. All are checked before any is queued."""
        params = sampling or SamplingParams()
        for prompt in prompts:
            self._checked(prompt, params.max_tokens)
        ids = [self.add_request(prompt, params) for prompt in prompts]
        while not all(self._requests[i].finish_reason for i in ids):
            self.step()
        results = [self.result(i) for i in ids]
        for request_id in ids:
            self.forget(request_id)
        return results

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[int]:
        """Tokens of one answer as they come; closing the iterator early aborts the request."""
        request_id = self.add_request(prompt, sampling)
        request, sent = self._requests[request_id], len(prompt)
        try:
            while sent < request.length or not request.finish_reason:
                # Others may step the engine too; what they made of this request is sent all the same.
                while sent < request.length:
                    yield int(request.tokens[sent])
                    sent += 1
                if not request.finish_reason:
                    self.step()
        finally:
            self.abort(request_id)
            self.forget(request_id)

    def score(self, tokens: Prompt) -> np.ndarray:
        """Logits of every token, float32[T, vocabulary], through the cached path.

        The whole text is computed (a cached prefix has no logits); what it computes is cached.
        """
        return self.score_with_margins(tokens).logits

    def score_with_margins(self, tokens: Prompt) -> Scores:
        """`score`, with how close each token was to choosing other experts."""
        request_id = self._enqueue(tokens, SamplingParams(ignore_stop=True, max_tokens=1), SKIP_READ, wants_logits=True)
        request = self._requests[request_id]
        try:
            while not request.finish_reason:
                self.step()
        finally:
            self.abort(request_id)
            self.forget(request_id)
        return Scores(*(np.concatenate(parts) for parts in zip(*request.scores, strict=True)))

    def stats(self) -> EngineStats:
        """Totals so far."""
        each = tuple(replica.stats() for replica in self._replicas)
        summed = ("tokens_prefilled", "tokens_saved", "checkpoints", "skipped_checkpoints", "evictions", "preemptions")
        return EngineStats(
            steps=self._steps,
            compilations_after_warm_up=self._compiled_late,
            pools={
                name: cast(Any, tuple(map(sum, zip(*(one.pools[name] for one in each), strict=True))))
                for name in each[0].pools
            },
            replicas=each,
            **{field: sum(getattr(one, field) for one in each) for field in summed},
        )

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget all cached content; False, and nothing forgotten, while requests run.

        preempt_running: requests that run are computed anew, and keep their answers so far.
        """
        if not preempt_running and any(replica.controller.running for replica in self._replicas):
            return False
        self._router.forget()
        done = [replica.controller.reset(preempt_running) for replica in self._replicas]
        return all(done)

    def check(self) -> list[str]:
        """Broken invariants of the cache state of every replica, in words."""
        found = [replica.controller.check() for replica in self._replicas]
        if len(found) == 1:
            return found[0]
        return [f"replica {index}: {broken}" for index, one in enumerate(found) for broken in one]

    def describe(self) -> str:
        """Geometry, sharding maps and memory."""
        return describe(self.model, self.plan, self.dtype)

    # Checks

    def _known(self, request_id: int) -> Request:
        if request_id not in self._requests:
            raise UserError("request_id", request_id, "use an id that add_request returned")
        return self._requests[request_id]

    def _enqueue(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        flags: int,
        *,
        wants_logits: bool = False,
        salt: str = "",
        extra_keys: hashing.ExtraKeys = hashing.NO_EXTRA_KEYS,
    ) -> int:
        tokens = self._checked(prompt, 0 if wants_logits else sampling.max_tokens)
        stops = frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_stop else self._stops)
        chain = hashing.KeyChain(self.config.unit, hashing.seed(salt, self._secret), extra_keys)
        request = Request(self._next_id, tokens, sampling, chain, stops)
        request.flags, request.wants_logits = flags, wants_logits
        self._requests[request.id] = request
        self._queue.append(request)
        self._next_id += 1
        return request.id

    def _checked(self, prompt: Prompt, answer: int) -> np.ndarray:
        try:
            values = np.asarray(prompt)
        except ValueError:  # ragged
            values = np.zeros((0, 0))
        if values.ndim != 1 or not len(values):
            raise UserError("prompt", repr(prompt)[:40], "give a flat list of at least one token id")
        if values.dtype.kind == "O":
            raise UserError("prompt", repr(prompt)[:40], f"token ids lie in 0..{self.vocab_size - 1}")
        if values.dtype.kind not in "iu":
            raise UserError("prompt", values.dtype.name, "give integer token ids")
        outside = values[(values < 0) | (values >= self.vocab_size)]
        if len(outside):
            raise UserError("prompt", int(outside[0]), f"token ids lie in 0..{self.vocab_size - 1}")
        for field, token in self.model.media_tokens:
            if token in values:
                raise UserError("prompt", token, f"this is {field}, and the model serves text only; leave it out")
        total = len(values) + answer
        if total > self.config.max_context:
            fix = f"prompt and answer may have {self.config.max_context} tokens; shorten them or raise max_context"
            raise UserError("prompt", f"{len(values)} + {answer} tokens", fix)
        for index, need in enumerate(self.config.blocks_of(total)):
            there = self.config.pool_blocks[index] - 1
            if need > there:
                fix = f"one request of {total} tokens needs {need} blocks of it; enlarge the pool"
                raise UserError(f"pool {self.config.pool_name(index)}", there, fix)
        return values
