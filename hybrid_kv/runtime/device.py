"""The device side of an engine: caches on the mesh and the compiled model step.

A step is one `jit` around one `shard_map`; the caches are donated and keep their sharding. All inputs
travel as one int32 vector, since a transfer costs per array and device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hybrid_kv.models.axes import DATA, TENSOR
from hybrid_kv.models.batch import Caches
from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.execution import PLAIN, Execution
from hybrid_kv.models.kimi_linear import KimiLinear
from hybrid_kv.runtime.metadata import StepInputs
from hybrid_kv.runtime.sampler import of_tokens, sample, standing
from hybrid_kv.sharding import ShardingMap
from pallas_kernels.paged.api import copy_blocks

# Arrays come to a program in tiles of 8 rows. For products XLA prefers 16 rows of 16 bits on tpu7x, and would write
# every stack of weights anew in each step.
_TPU_OPTIONS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"}


class Packing(NamedTuple):
    """How a pytree of int32 and float32 arrays lies in one int32 vector."""

    tree: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


def pack(inputs: StepInputs) -> tuple[np.ndarray, Packing]:
    """One int32 vector and how to read it."""
    leaves, tree = jax.tree.flatten(inputs)
    leaves = [np.asarray(leaf) for leaf in leaves]
    flat = np.concatenate([np.ascontiguousarray(leaf).reshape(-1).view(np.int32) for leaf in leaves])
    return flat, Packing(tree, tuple(leaf.shape for leaf in leaves), tuple(str(leaf.dtype) for leaf in leaves))


def unpack(flat: jax.Array, packing: Packing) -> StepInputs:
    """The arrays of a packed vector, inside a compiled step."""
    leaves, at = [], 0
    for shape, dtype in zip(packing.shapes, packing.dtypes, strict=True):
        size = int(np.prod(shape))
        part = flat[at : at + size].reshape(shape)
        leaves.append(jax.lax.bitcast_convert_type(part, jnp.float32) if dtype == "float32" else part)
        at += size
    return jax.tree.unflatten(packing.tree, leaves)


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """What a compiled step depends on besides the shapes of its arguments; hashable.

    param_specs: (name, split) of every parameter. cache_specs: in the order of `Caches`. how: the model
    runs.
    """

    model: KimiLinearConfig
    mesh: Mesh
    param_specs: tuple[tuple[str, P], ...]
    cache_specs: tuple[P, ...]
    interleave: int
    how: Execution = PLAIN


@functools.lru_cache(maxsize=256)
def compiled_step(layout: StepLayout, packing: Packing, decode_only: bool, all_logits: bool) -> Any:
    """The jitted step (params, caches, flat) -> (tokens, logits, margins, caches); caches are donated.

    Engines of one model on one mesh share it. Replicas (mesh axis "data") step together, each on its own part of the
    vector, of the pools and of the results, which lie one behind the other.
    """
    rows = packing.shapes[-1][0]

    def local(params, caches: Caches, flat):
        inputs, caches = _begun(layout, caches, flat[:-rows], packing)
        model = _model(layout, params, len(inputs.batch.tokens))
        logits, margins, caches = model.with_margins(
            inputs.batch, caches, decode_only=decode_only, interleave=layout.interleave
        )
        wanted = logits[flat[-rows:]] if all_logits else logits
        with jax.named_scope("sample"):
            chosen = sample(wanted, inputs.sampling)
        return chosen, logits, margins, caches

    return _jitted(layout, local, (P(DATA), P(DATA, TENSOR), P(DATA)))


@functools.lru_cache(maxsize=256)
def compiled_verify(layout: StepLayout, packing: Packing, most: int) -> Any:
    """The jitted step (params, caches, flat) -> (tokens, accepted, caches) of rows that carry drafts.

    A row has its last token and up to `most` - 1 drafts. tokens: what follows each packed token. accepted: [R] how
    many tokens of each row stand, its first one and the drafts that plain decoding would have drawn as well; the state
    of the row is the one after them, and what follows the last of them is the row's next token.
    """

    def local(params, caches: Caches, flat):
        inputs, caches = _begun(layout, caches, flat, packing)
        batch = inputs.batch
        model = _model(layout, params, len(batch.tokens))
        logits, caches, pending = model.verify(batch, caches, most=most, interleave=layout.interleave)
        with jax.named_scope("sample"):
            drawn = sample(logits, of_tokens(inputs.sampling, batch.rows, len(batch.tokens)))
        accepted = standing(batch.tokens, drawn, batch.rows, most)
        return drawn, accepted, model.commit(batch, caches, pending, accepted)

    return _jitted(layout, local, (P(DATA), P(DATA)))


def _model(layout: StepLayout, params: Mapping[str, jax.Array], tokens: int) -> KimiLinear:
    """The model as it runs a step of so many tokens."""
    ranks = math.prod(layout.mesh.shape[axis] for axis in TENSOR)
    return KimiLinear(layout.model, params, layout.how.suited(tokens, ranks))


def _begun(layout: StepLayout, caches: Caches, flat: jax.Array, packing: Packing) -> tuple[StepInputs, Caches]:
    """Inputs of a step, and the caches after the block copies that come first."""
    inputs = unpack(flat, packing)
    moving = layout.how.kernels if layout.how.kernels == "tpu" else None
    pool = copy_blocks(caches.mla, inputs.copies[:, 0], inputs.copies[:, 1], implementation=moving)
    return inputs, caches._replace(mla=pool)


def _jitted(layout: StepLayout, local: Any, results: tuple[P, ...]) -> Any:
    """One `jit` around one `shard_map` of (params, caches, flat) -> (*results, caches)."""

    def on(spec: P) -> NamedSharding:
        return NamedSharding(layout.mesh, spec)

    weights, caches = dict(layout.param_specs), Caches(*cast(Any, layout.cache_specs))
    spread = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(weights, caches, P(DATA)),
        out_specs=(*results, caches),
        check_vma=False,
    )
    pools = pool_formats(layout)
    return jax.jit(
        spread,
        donate_argnums=1,
        compiler_options=_TPU_OPTIONS if layout.how.on_tpu else None,
        in_shardings=({name: on(spec) for name, spec in weights.items()}, pools, on(P(DATA))),
        out_shardings=(*map(on, results), pools),
    )


def pool_formats(layout: StepLayout) -> Caches:
    """Sharding and memory order of the pools. Row-major by name, or the compiler would choose another order for some
    shapes, and copy the whole pool before and after every kernel that takes it."""
    formats: Any = (
        Format(Layout(tuple(range(len(spec)))), NamedSharding(layout.mesh, spec)) for spec in layout.cache_specs
    )
    return Caches(*formats)


class DeviceStep:
    """Caches of all replicas of one engine and the steps that run on them. `run` consumes and replaces the caches.

    params: placed on the mesh.
    """

    def __init__(
        self,
        model: KimiLinearConfig,
        params: Mapping[str, jax.Array],
        mesh: Mesh,
        sharding: ShardingMap,
        dtypes: Mapping[str, Any],
        interleave: int,
        how: Execution = PLAIN,
    ) -> None:
        self.params = dict(params)
        self.layout = StepLayout(
            model=model,
            mesh=mesh,
            param_specs=tuple((name, getattr(array.sharding, "spec", P())) for name, array in self.params.items()),
            cache_specs=tuple(sharding[name].spec for name in Caches._fields),
            interleave=interleave,
            how=how,
        )
        self.caches = Caches(
            *(
                jax.jit(functools.partial(jnp.zeros, sharding[name].shape, dtypes[name]), out_shardings=form)()
                for name, form in zip(Caches._fields, pool_formats(self.layout), strict=True)
            )
        )
        self._spread = NamedSharding(mesh, P(DATA))

    def run(
        self, parts: Sequence[tuple[StepInputs, np.ndarray]], *, decode_only: bool, all_logits: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Run one step: (tokens i32[R], logits, expert selection margins of the tokens with logits).

        parts: of each replica its inputs, of the same shapes for all, and the packed index of every row's last token,
        where its next token is sampled. Logits are [T, vocabulary] with all_logits, else [R, vocabulary] of the last
        tokens. What the replicas give lies one behind the other on the first axis of each result.
        """
        vectors, packings = [], set()
        for inputs, last in parts:
            flat, packing = pack(inputs)
            vectors += [flat, last.astype(np.int32)]
            packings.add(packing)
        (packing,) = packings
        step = compiled_step(self.layout, packing, decode_only, all_logits)
        flat = jax.device_put(np.concatenate(vectors), self._spread)
        tokens, logits, margins, self.caches = step(self.params, self.caches, flat)
        return tokens, logits, margins
