"""Serving scenarios: requests that arrive by step, a faked model, and the decisions as JSON lines.

    python -m hybrid_kv.simulate.scenarios FILE... --out DIR

A scenario says which groups and pool there are, which prompts arrive when, how long each answer is and how many drafts
are accepted; tokens are streams named by a seed. One step delivers what is due, schedules, samples and commits. Written
for every file: `cfg` (derived sizes), `s` (steps), `r` (requests as they end), `p` (probes), `end` (totals).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_kv.cache.reference import Draft, Hit, Model, Row, Rules, Step
from hybrid_kv.cache.reference.content import Device, Unsound, broken
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.schedule.programs import make_room

_VOCABULARY = 163840
_STALL = 65
_KINDS = {"mla": "mla", "full": "full", "swa": "sliding_window", "chunked_local": "chunked_local", "mamba": "recurrent"}


@functools.cache
def stream(seed: int, count: int) -> tuple[int, ...]:
    """The first `count` tokens of a stream: a mix of seed and index in 64-bit arithmetic."""
    with np.errstate(over="ignore"):
        base = np.array([seed], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = base + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return tuple((z % np.uint64(_VOCABULARY)).tolist())


def tokens_of(prompt: Any) -> list[int]:
    """A prompt's tokens: given as ids, or as segments [seed, length] or [seed, length, offset] of streams."""
    if isinstance(prompt, dict):
        return list(prompt["ids"])
    found: list[int] = []
    for seed, length, *offset in prompt:
        begin = offset[0] if offset else 0
        found += stream(seed, begin + length)[begin:]
    return found


def rules_of(config: dict[str, Any]) -> Rules:
    """The model's rules for a scenario's configuration."""
    eagle, mode = config.get("use_eagle", False), config.get("eagle_mode", "lookahead")
    drafts = config.get("num_speculative_tokens", 0)
    draft = Draft({"lookahead": "lookahead", "drop": "drop", "nodrop": "none"}[mode]) if eagle else Draft.NONE
    caching = config.get("enable_prefix_caching", True)
    specs = []
    for number, group in enumerate(config["groups"]):
        kind = _KINDS[group["kind"]]
        attention = kind in ("mla", "full")
        specs.append(
            GroupSpec(
                f"{group['kind']}{number}",
                kind,
                group["block_size"],
                replicated=not group.get("dcp_sharded", True),
                draft=group.get("eagle", eagle and attention),
                window=group.get("window") or group.get("chunk") or 0,
            )
        )
    unit = config.get("prefix_match_unit") or config.get("hash_block_size")
    geometry = resolve(specs, dcp=config.get("dcp_world_size", 1), hash_unit=unit)
    threshold = config.get("long_prefill_token_threshold", 0)
    blocks = {geometry.groups[group].block for group in geometry.recurrent}
    return Rules(
        geometry=geometry,
        pool_blocks=(config["num_blocks"] - 1,),
        group_pool=(0,) * len(specs),
        max_requests=config.get("max_num_seqs", 128),
        max_active=config.get("max_num_active_seqs"),
        max_context=config.get("max_model_len", 1 << 20),
        token_budget=config.get("max_num_batched_tokens", 8192),
        chunk_limit=threshold or 1 << 30,
        chunk_adaptive=config.get("long_prefill_token_threshold_adaptive", False),
        prefill_interval=config.get("prefill_schedule_interval", 1),
        watermark=config.get("watermark", 0),
        admit_whole=config.get("reserve_full_isl", True),
        steps_in_flight=2 if config.get("async_scheduling", False) else 1,
        caching=caching,
        # The reference system keeps the last whole block of a prompt as well as its last hash boundary.
        ladder=tuple(
            sorted(block for block in blocks if block > geometry.hash_unit and block % geometry.hit_unit == 0)
        ),
        retention=config.get("retention_interval", 0),
        draft=draft,
        lookahead=(drafts if config.get("multi_module_mtp") else 1) if draft is Draft.LOOKAHEAD else 0,
        slots_ahead=drafts if eagle else 0,
        priority=config.get("policy", "fcfs") == "priority",
    )


def check(scenario: dict[str, Any]) -> None:
    """Raises UserError for numbers out of range, names used twice or not at all, and floats where counts belong."""
    name = scenario["name"]
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]{1,100}", name):
        raise UserError("name", name, "it names the trace file: use up to 100 letters, digits, and . + - _")
    config = scenario["config"]
    for field, value in config.items():
        if isinstance(value, float) and field != "watermark":
            raise UserError(f"config.{field}", value, "use an integer")
    _count("config.num_blocks", config["num_blocks"], 2, 10**7)
    for group in config["groups"]:
        for field in ("block_size", "window", "chunk"):
            if field in group:
                _count(f"group.{field}", group[field], 1, 1 << 31)
    for field in ("num_speculative_tokens", "long_prefill_token_threshold"):
        _count(f"config.{field}", config.get(field, 0), 0, 1 << 20)
    _count("config.prefill_schedule_interval", config.get("prefill_schedule_interval", 1), 1, 1 << 20)
    if config.get("max_num_active_seqs") is not None:
        _count("config.max_num_active_seqs", config["max_num_active_seqs"], 1, 1 << 20)
    for field in ("async_scheduling", "reserve_full_isl", "long_prefill_token_threshold_adaptive"):
        if not isinstance(config.get(field, False), bool):
            raise UserError(f"config.{field}", config[field], "use true or false")
    watermark = config.get("watermark", 0)
    if not isinstance(watermark, int | float) or not 0 <= watermark < 1:
        raise UserError("config.watermark", watermark, "use a share of the pool, from 0 to below 1")
    _count("config.max_steps", config.get("max_steps", 1), 1, 10**9)
    before: set[str] = set()
    for request in scenario["requests"]:
        _check_request(request, before)
        before.add(request["id"])
    for prompt in [one["prompt"] for one in [*scenario["requests"], *(scenario.get("probes") or [])]]:
        for segment in [prompt["ids"]] if isinstance(prompt, dict) else prompt:
            for number in segment:
                _count("prompt", number, 0, (1 << 64) - 1)
        if not isinstance(prompt, dict):
            _count("prompt tokens", sum(sum(segment[1:]) for segment in prompt), 1, 1 << 24)
    for event in scenario.get("events") or []:
        _count("event step", event["step"], 0, 10**9)


def _check_request(request: dict[str, Any], before: set[str]) -> None:
    """before: ids of the requests that stand before this one."""
    where = f"request {request['id']}"
    if request["id"] in before:
        raise UserError(where, request["id"], "an id names one request")
    _count(f"{where} output_len", request["output_len"], 1, 1 << 24)
    _count(f"{where} output_seed", request.get("output_seed", 0), 0, (1 << 64) - 1)
    for field in ("arrival_step", "abort_step"):
        _count(f"{where} {field}", request.get(field, 0), 0, 10**9)
    for value in [*(request.get("accept") or []), *(request.get("drafts") or [])]:
        _count(f"{where} accept, drafts", value, 0, 1 << 20)
    if not isinstance(request.get("priority", 0), int):
        raise UserError(f"{where} priority", request["priority"], "use an integer")
    if "after" in request:
        other, delay = request["after"]
        _count(f"{where} after", delay, 0, 10**9)
        if other not in before:
            raise UserError(f"{where} after", other, "name a request that stands before it")


def _count(field: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise UserError(field, value, f"use an integer from {low} to {high}")


@dataclasses.dataclass
class _Client:
    """What the scenario says about one request, and what has become of it. steps: arrived, first scheduled, first
    token, finished."""

    spec: dict[str, Any]
    prompt: list[int]
    answer: tuple[int, ...]
    accept: Iterator[int]
    drafts: Iterator[int]
    steps: list[int] = dataclasses.field(default_factory=lambda: [-1, -1, -1, -1])
    chunks: list[int] = dataclasses.field(default_factory=list)
    first: Hit | None = None
    resumed: int = 0
    given: int = 0
    preempted: int = 0
    aborted: bool = False


class Run:
    """One scenario through the model; `records` is the trace. checked: look at the content of every block on the way
    (slow; raises `Unsound`). compiled: through the compiled core instead."""

    def __init__(self, scenario: dict[str, Any], *, checked: bool = False, compiled: bool = False) -> None:
        check(scenario)
        config = scenario["config"]
        self.name = scenario["name"]
        self.rules = rules_of(config)
        self.model: Any = _core(scenario, self.rules) if compiled else Model(self.rules)
        self.device = Device(self.model) if checked else None
        self.drafts = config.get("num_speculative_tokens", 0)
        self.limit = config.get("max_steps", 100_000)
        self.clients: dict[str, _Client] = {}
        for number, spec in enumerate(scenario["requests"]):
            answer = stream(spec.get("output_seed", 1_000_000 + number), spec["output_len"])
            self.clients[spec["id"]] = _Client(
                spec, tokens_of(spec["prompt"]), answer, itertools.cycle(spec.get("accept") or [0]),
                itertools.cycle(spec.get("drafts") or [self.drafts]),
            )  # fmt: skip
        self.probes = scenario.get("probes", [])
        self.events = list(scenario.get("events") or [])
        self.records: list[dict[str, Any]] = []
        self.overlapped = self.rules.steps_in_flight > 1
        self.flying: deque[tuple[Step, dict[str, Any]]] = deque()
        self.scheduled = self.copies = 0
        self.stalled = False

    def run(self) -> list[dict[str, Any]]:
        """Run to the end; the records."""
        self._configuration()
        step = idle = 0
        while step < self.limit and (self.model.requests or self._next_arrival() is not None):
            if not self.model.requests:
                self._drain(step)
                step = max(step, self._next_arrival() or 0)
            self._deliver(step)
            idle = 0 if self._step(step) else idle + 1
            step += 1
            if idle == _STALL:
                self.stalled = True
                break
        self._drain(step)
        for probe in self.probes:
            prompt = tokens_of(probe["prompt"])
            hit = self.model.probe(prompt, probe.get("cache_salt"))
            self._write("p", id=probe["id"], n=len(prompt), hit=hit.tokens, junction=_junction(hit))
        self._totals(step)
        return self.records

    def _write(self, kind: str, **fields: Any) -> None:
        self.records.append({"t": kind, **fields})

    def _configuration(self) -> None:
        geometry = self.rules.geometry
        self._write(
            "cfg", scenario=self.name, usable_blocks=self.rules.pool_blocks[0],
            scheduler_block_size=geometry.schedule_block, hash_block_size=geometry.hash_unit,
            hit_alignment=geometry.hit_unit, lookahead_tokens=self.rules.slots_ahead,
            hash_lookahead=self.rules.lookahead, eagle_block_drop=bool(self.rules.longest_lag),
            group_block_tokens=[group.block for group in geometry.groups],
        )  # fmt: skip

    def _due(self, client: _Client) -> int | None:
        """Step at which a request arrives; None while that is not known."""
        if "after" not in client.spec:
            return client.spec.get("arrival_step", 0)
        other, delay = client.spec["after"]
        ended = self.clients[other].steps[3]
        return None if ended < 0 else ended + 1 + delay

    def _next_arrival(self) -> int | None:
        due = [self._due(one) for one in self.clients.values() if one.steps[0] < 0]
        return min((at for at in due if at is not None), default=None)

    def _deliver(self, step: int) -> None:
        for event in [event for event in self.events if event["step"] <= step]:
            self.events.remove(event)
            self._write("reset", i=step, ok=self.model.reset())
        for name, client in self.clients.items():
            due = self._due(client)
            if client.steps[0] < 0 and due is not None and due <= step:
                client.steps[0] = step
                self.model.arrive(
                    name, client.prompt, answer=len(client.answer), salt=client.spec.get("cache_salt"),
                    priority=client.spec.get("priority", 0),
                    read_cache=not client.spec.get("skip_reading_prefix_cache", False),
                )  # fmt: skip
            elif name in self.model.requests and client.spec.get("abort_step", self.limit) <= step:
                client.aborted = True
                self.model.abort(name)
                self._ended(name, step)

    def _step(self, number: int) -> bool:
        """Plan a step, then complete the oldest one if as many are in flight as may be, or if nothing could be planned;
        whether anything was."""
        plan = self.model.schedule()
        for row in plan.rows:
            self.scheduled += row.length
            if row.start < row.request.prompt:
                self.clients[row.request.name].chunks.append(row.end - row.drafts)
        self.copies += plan.copies
        for name in plan.preempted:
            self.clients[name].preempted += 1
        admitted = self._admissions(plan, number)
        if plan.rows or plan.preempted:
            self._write(
                "s", i=number, sched=_rows(plan), **({"adm": admitted} if admitted else {}),
                **({"pre": plan.preempted} if plan.preempted else {}), **({"cow": plan.copies} if plan.copies else {}),
                q=[len(self.model.running), len(self.model.waiting)], free=[self.model.pools[0].free] * 2,
            )  # fmt: skip
        if plan.rows:
            self.flying.append((plan, self.records[-1]))
            if self.device:
                self.device.plan(plan)
            if self.overlapped:
                self._propose(plan)
        if self.flying and (len(self.flying) >= self.rules.steps_in_flight or not plan.rows):
            self._complete(number)
        return bool(plan.rows)

    def _complete(self, number: int) -> None:
        """Sample the oldest step in flight and commit it, at step `number`."""
        plan, record = self.flying.popleft()
        rows = [row for row in plan.rows if self.model.requests.get(row.request.name) is row.request]
        answers = {row.request.name: self._sample(row, number) for row in rows}
        ended = [name for name, given in answers.items() if given and self._through(name)]
        if self.device:
            self.device.run(plan, answers)
        self.model.commit(plan, answers, ended)
        if self.device:
            self.device.check(plan)
            if faults := broken(self.model):
                raise Unsound("; ".join(faults))
        record["free"][1] = self.model.pools[0].free
        if self.overlapped:
            record["u"] = number
        if out := {name: len(given) for name, given in answers.items() if len(given) > 1}:
            record["out"] = out
        if ended:
            record["fin"] = ended
        for name in ended:
            self._ended(name, number)
        if not self.overlapped:
            self._propose(plan)

    def _drain(self, number: int) -> None:
        """Complete what is still in flight when nothing is live."""
        while self.flying:
            self._complete(number)

    def _propose(self, plan: Step) -> None:
        """Drafts for the next row of each request that samples in this one; counted on where steps overlap."""
        for row in plan.rows:
            name = row.request.name
            if self.drafts and row.samples and self.model.requests.get(name) is row.request:
                self.model.propose(name, min(next(self.clients[name].drafts), self.drafts))

    def _admissions(self, plan: Step, number: int) -> list[dict[str, Any]]:
        found = []
        for name, hit in plan.admitted.items():
            client = self.clients[name]
            if client.first is None:
                client.first, client.steps[1] = hit, number
            else:
                client.resumed += hit.tokens
            tokens = len(self.model.requests[name].tokens)
            found.append(
                {"id": name, "hit": hit.tokens, "junction": _junction(hit), "tokens": tokens, "miss": hit.reason.text}
            )
        return found

    def _sample(self, row: Row, number: int) -> tuple[int, ...]:
        """Tokens the faked model returns for a row: none before the last known token, else one and accepted drafts."""
        client = self.clients[row.request.name]
        if not row.samples:
            return ()
        accepted = min(next(client.accept), row.drafts) if row.drafts else 0
        given = client.answer[client.given : client.given + accepted + 1]
        client.given += len(given)
        if client.steps[2] < 0:
            client.steps[2] = number
        return given

    def _through(self, name: str) -> bool:
        return self.clients[name].given >= len(self.clients[name].answer)

    def _ended(self, name: str, number: int) -> None:
        client = self.clients[name]
        client.steps[3] = number
        hit = client.first or Hit(0, 0)
        self._write(
            "r", id=name, prompt=len(client.prompt), out=client.given, hit=hit.tokens, junction=_junction(hit),
            steps=client.steps, chunks=client.chunks, preempt=client.preempted, aborted=client.aborted,
        )  # fmt: skip

    def _totals(self, steps: int) -> None:
        served = [client for client in self.clients.values() if client.first is not None]
        pool = self.model.pools[0]
        self._write(
            "end", steps=steps, query=sum(len(client.prompt) for client in served),
            hit=sum(client.first.tokens for client in served if client.first),
            resume_hit=sum(client.resumed for client in served), preempt=sum(c.preempted for c in served),
            scheduled=self.scheduled, cow=self.copies, evicted=pool.evicted,
            **({"keys": _keys(self.model)} if isinstance(self.model, Model) else {}), free=pool.free,
            **({"stall": True} if self.stalled else {}),
            **({"unfinished": sorted(self.model.requests)} if self.model.requests else {}),
        )  # fmt: skip


def _core(scenario: dict[str, Any], rules: Rules) -> Any:
    """The compiled core, with room for what the scenario holds."""
    from hybrid_kv.simulate.compiled import Core, config_of

    requests, probes = scenario["requests"], scenario.get("probes") or []
    lengths = [len(tokens_of(one["prompt"])) + one["output_len"] for one in requests]
    longest = max(lengths + [len(tokens_of(one["prompt"])) for one in probes])
    drafts = [
        scenario["config"].get("num_speculative_tokens", 0),
        *(d for r in requests for d in r.get("drafts") or []),
    ]
    slots = min(rules.max_requests, len(requests), rules.token_budget)
    return Core(rules, config_of(rules, slots, longest + rules.slots_ahead, max(drafts)))


def _keys(model: Model) -> list[int]:
    """Names filed in every group."""
    groups = range(len(model.rules.geometry.groups))
    return [sum(group == name[0] for name in model.index.names()) for group in groups]


def _junction(hit: Hit) -> int:
    return hit.depth if hit.depth > hit.tokens else 0


def _rows(plan: Step) -> dict[str, list[int]]:
    return {row.request.name: [row.start, row.length, *([row.drafts] if row.drafts else [])] for row in plan.rows}


def _run_file(path: Path, out: Path, checked: bool, compiled: bool) -> str:
    """Run one scenario file and write its trace; a line that sums it up."""
    try:
        scenario = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("scenario", str(path), f"must be a readable JSON file ({error})") from None
    try:
        records = Run(scenario, checked=checked, compiled=compiled).run()
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, MemoryError) as error:
        raise UserError("scenario", str(path), f"a field is missing or of another form ({error!r})") from None
    lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    (out / f"{scenario['name']}.jsonl").write_text(lines)
    end = records[-1]
    return f"{scenario['name']:32} {end['steps']:6} steps  hit {end['hit']:8,} of {end['query']:9,} tokens"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run scenario files; one line for each on standard output."""
    parser = argparse.ArgumentParser(prog="python -m hybrid_kv.simulate.scenarios", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for one .jsonl file a scenario")
    parser.add_argument("--check", action="store_true", help="look at the content of every block on the way; slow")
    parser.add_argument("--compiled", action="store_true", help="run the compiled core instead of the model")
    options = parser.parse_args(arguments)
    try:
        if options.check and options.compiled:
            raise UserError("--check", "with --compiled", "the model's content can be looked at: use one of them")
        options.out.mkdir(parents=True, exist_ok=True)
        for path in options.files:
            print(_run_file(path, options.out, options.check, options.compiled), flush=True)
            make_room()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
