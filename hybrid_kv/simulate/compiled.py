"""The compiled core behind the reference model's methods, so that scenarios run through either.

Requests beyond the request slots wait outside, in the order they came.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hybrid_kv import hashing
from hybrid_kv.cache import flights, lookup, transitions
from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference.lookup import Hit
from hybrid_kv.cache.reference.rules import Rules
from hybrid_kv.cache.state import EVICTED, FREE_BLOCKS, PLANNED, RUNNING, CacheState, initial_state, layout
from hybrid_kv.cache.statistics import Statistics, statistics
from hybrid_kv.errors import UserError
from hybrid_kv.schedule.programs import compiled
from hybrid_kv.schedule.stepper import Stepper

# Rules that this adapter does not pass on, with the value that asks for nothing.
_MODEL_ONLY: dict[str, Any] = {"events": False, "utility": None}


def config_of(rules: Rules, slots: int, max_context: int, drafts: int) -> CacheConfig:
    """The compiled core's configuration for the model's rules.

    slots: requests held at once. max_context: tokens of the longest request. drafts: most tokens verified at once.
    Raises UserError for rules that it does not pass on.
    """
    for field, neutral in _MODEL_ONLY.items():
        if getattr(rules, field) != neutral:
            raise UserError(field, getattr(rules, field), f"this adapter does not pass it on: use {neutral}")
    return CacheConfig(
        geometry=rules.geometry,
        pool_blocks=tuple(blocks + 1 for blocks in rules.pool_blocks),
        group_pool=rules.group_pool,
        max_requests=slots,
        max_context=max_context,
        token_budget=rules.token_budget,
        chunk_limit=rules.chunk_limit,
        chunk_adaptive=rules.chunk_adaptive,
        max_active=rules.max_active,
        prefill_interval=rules.prefill_interval,
        steps_in_flight=rules.steps_in_flight,
        watermark=float(rules.watermark),
        max_prefills=slots,
        max_drafts=drafts,
        slots_ahead=rules.slots_ahead,
        draft=rules.draft,
        lookahead=rules.lookahead,
        whole_prompts=rules.admit_whole,
        priority=rules.priority,
        emission=rules.emission,
        placement=Placement(
            rules.tail, rules.turn_end, rules.junctions, rules.ladder, rules.retention, rules.positions
        ),
        prefix_caching=rules.caching,
    )


@dataclasses.dataclass(eq=False)
class Request:
    """tokens: prompt and answer so far. limit: the most of both. chain: of its units. slot: -1 while outside."""

    name: str
    tokens: list[int]
    prompt: int
    limit: int
    priority: int
    flags: int
    chain: hashing.KeyChain
    slot: int = -1
    computed: int = 0
    drafts: int = 0


@dataclasses.dataclass
class Row:
    """start, length: tokens computed, drafts included. drafts: of those. samples: it reaches the last known token."""

    request: Request
    start: int
    length: int
    drafts: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclasses.dataclass
class Step:
    """rows; admitted: request -> its hit; preempted: names; copies: number of copies."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    admitted: dict[str, Hit] = dataclasses.field(default_factory=dict)
    preempted: list[str] = dataclasses.field(default_factory=list)
    copies: int = 0


@dataclasses.dataclass
class _Pool:
    free: int
    evicted: int = 0


class Core:
    """See the module; methods as those of `cache.reference.Model`."""

    def __init__(self, rules: Rules, config: CacheConfig) -> None:
        self.rules, self.config = rules, config
        self.requests: dict[str, Request] = {}
        self._state = initial_state(config)
        self._stepper = Stepper(config)
        names = ("arrive", "propose", "preempt_running", "reset")
        self._jit = {name: compiled(getattr(transitions, name), config) for name in names}
        self._jit |= {"lookup": compiled(lookup.lookup, config, consumes=False)}
        self._jit |= {"rows": compiled(_rows, config, consumes=False)}
        self._slots: list[Request | None] = [None] * config.max_requests
        self._outside: list[Request] = []
        self._seen = self._host()

    def arrive(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        answer: int = 1,
        salt: Hashable = None,
        priority: int = 0,
        read_cache: bool = True,
    ) -> None:
        """A new request, waiting. Raises UserError for one that can never run."""
        longest = len(prompt) + answer
        if not prompt or longest > self.config.max_context:
            raise UserError("prompt", len(prompt), f"use 1 to {self.config.max_context - answer} tokens")
        for number, (need, blocks) in enumerate(
            zip(self.config.blocks_of(longest), self.config.pool_blocks, strict=True)
        ):
            if need >= blocks:
                raise UserError(f"pool_blocks[{number}]", blocks, f"this request alone needs {need} blocks")
        flags = (lookup.SALTED if salt is not None else 0) | (0 if read_cache else lookup.SKIP_READ)
        request = Request(name, list(prompt), len(prompt), longest, priority, flags, self._chain(salt))
        self.requests[name] = request
        self._outside.append(request)
        self._enter()

    def schedule(self) -> Step:
        self._enter()
        if self.config.max_drafts:
            proposed = [request.drafts if request else 0 for request in self._slots]
            self._state = self._jit["propose"](self._state, np.array(proposed, np.int32))
            self._seen = self._host()
        before = self._seen
        self._state, fresh = self._stepper.schedule(self._state)
        self._seen = after = self._host()
        fields, step = layout(self.config), Step()
        flight, ends = jax.device_get(self._jit["rows"](self._state))
        for slot, request in enumerate(self._slots):
            if request is None:
                continue
            row, length = after.requests[:, slot], int(flight.scheduled[slot])
            if row[fields.PREEMPTIONS] > before.requests[:, slot][fields.PREEMPTIONS]:
                step.preempted.append(request.name)
            if not (fresh and length):
                continue
            request.computed, request.drafts = int(ends[slot]) - length, 0
            drafts, samples = int(flight.verifying[slot]), bool(flight.promised[slot])
            step.rows.append(Row(request, request.computed, length, drafts, samples))
            if row[fields.ADMITTED] == after.counters[PLANNED]:
                step.copies += int((row[fields.copy_source] > 0).sum())
                hit = int(row[fields.HIT])
                depth = max(int(row[fields.JUNCTION]), hit)
                step.admitted[request.name] = Hit(hit, depth, Reason(int(row[fields.REASON])))
        return step

    def commit(self, step: Step, answers: Mapping[str, Sequence[int]], ended: Sequence[str] = ()) -> None:
        slots = self.config.max_requests
        keys = np.zeros((slots, transitions.keys_per_append(self.config), hashing.KEY_WORDS), np.uint32)
        outcome = transitions.Outcome(np.zeros(slots, np.int32), np.zeros(slots, bool), keys)
        for name, sampled in answers.items():
            request = self.requests.get(name)
            if request is None:
                continue
            request.tokens += sampled
            fresh = request.chain.extend(np.array(request.tokens, np.int32))
            keys[request.slot, : len(fresh)] = fresh
            outcome.produced[request.slot] = len(sampled)
            outcome.finished[request.slot] = name in ended
        self._state = self._stepper.commit(self._state, outcome)
        for name in ended:
            self._leave(self.requests[name])
        self._seen = self._host()

    def propose(self, name: str, drafts: int) -> None:
        """Draft tokens to verify in the request's next row."""
        self.requests[name].drafts = drafts

    def abort(self, name: str) -> None:
        request = self.requests.get(name)
        if request is None:
            return
        if request.slot < 0:
            self._outside.remove(request)
        else:
            self._state = self._stepper.abort(self._state, request.slot)
            self._seen = self._host()
        self._leave(request)

    def probe(self, prompt: Sequence[int], salt: Hashable = None) -> Hit:
        """The hit a prompt would get."""
        keys = self._keys(self._chain(salt), prompt)
        found = self._jit["lookup"](self._state, keys, np.int32(len(prompt)), np.int32(0))
        return Hit(int(found.hit), max(int(found.junction), int(found.hit)), Reason(int(found.reason)))

    def reset(self, *, preempt_running: bool = False) -> bool:
        """Forget all content; False, and nothing changed, while any request runs, unless they are to wait again."""
        if preempt_running:
            self._state = self._jit["preempt_running"](self._state)
        self._state, done = self._jit["reset"](self._state)
        self._seen = self._host()
        return bool(done)

    @property
    def statistics(self) -> Statistics:
        return statistics(self.config, self._seen)

    @property
    def running(self) -> list[str]:
        status = self._seen.requests[layout(self.config).STATUS]
        return [one.name for slot, one in enumerate(self._slots) if one and status[slot] == RUNNING]

    @property
    def waiting(self) -> list[str]:
        running = set(self.running)
        return [name for name in self.requests if name not in running]

    @property
    def pools(self) -> list[_Pool]:
        evicted = int(self._seen.counters[EVICTED])
        return [_Pool(int(row[FREE_BLOCKS]), evicted) for row in self._seen.pools]

    def _host(self) -> CacheState:
        """The small arrays of the state on the host; the others are not looked at."""
        state = self._state
        return state._replace(requests=_host(state.requests), pools=_host(state.pools), counters=_host(state.counters))

    def _enter(self) -> None:
        while self._outside and None in self._slots:
            request = self._outside.pop(0)
            self._state, slot = self._jit["arrive"](
                self._state, np.int32(request.prompt), np.int32(request.flags),
                self._keys(request.chain, request.tokens), np.int32(request.priority), np.int32(request.limit),
            )  # fmt: skip
            request.slot = int(slot)
            self._slots[request.slot] = request
        self._seen = self._host()

    def _leave(self, request: Request) -> None:
        del self.requests[request.name]
        if request.slot >= 0:
            self._slots[request.slot] = None

    def _chain(self, salt: Hashable) -> hashing.KeyChain:
        seed = hashing.seed("" if salt is None else repr(salt))
        return hashing.KeyChain(self.config.unit, seed, lookahead=self.config.lookahead)

    def _keys(self, chain: hashing.KeyChain, tokens: Sequence[int]) -> np.ndarray:
        """The keys of a prompt, uint32[U, 4]."""
        keys = np.zeros((self.config.units, hashing.KEY_WORDS), np.uint32)
        fresh = chain.extend(np.array(tokens, np.int32))[: self.config.units]
        keys[: len(fresh)] = fresh
        return keys


def _host(array: jax.Array) -> Any:
    return np.asarray(array)


def _rows(config: CacheConfig, state: CacheState) -> tuple[flights.Flight, jax.Array]:
    """What the step planned last does with every request, and where the row of each ends."""
    place = flights.newest(config, state)
    return flights.at(config, state.requests, place), flights.planned(config, state.requests)
