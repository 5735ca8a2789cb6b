"""Random workloads against the content of every block: shared prompts, small pools, aborts, drafts.

`workload(seed)` draws a system and its traffic from a seed and runs it to the end; what it returns counts the faults.
"""

from __future__ import annotations

import collections
import dataclasses
import random

from hybrid_kv.cache.reference import Draft, Model, Rules
from hybrid_kv.cache.reference.content import Device, Unsound, broken
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve

# Steps without a row, and steps in all, after which a workload counts as stalled.
_STALL = 80
_ENDLESS = 2000


@dataclasses.dataclass(frozen=True)
class Outcome:
    """fault: "" or what went wrong first. The rest counts what happened, to see that it did happen."""

    seed: int
    rules: Rules
    fault: str
    steps: int
    hits: int
    evicted: int
    preempted: int
    aborted: int
    copies: int


def draw_rules(rng: random.Random) -> Rules:
    """A system: any mix of kinds, one pool or one for each group, any retention and drafter."""
    unit = rng.choice([2, 4])
    dcp = rng.choice([1, 1, 2, 4, 8])
    drafts = rng.choice([0, 0, 1, 3])
    draft = rng.choice(list(Draft)) if drafts else Draft.NONE
    kinds = rng.choice([
        ["mla"], ["full", "recurrent"], ["mla", "recurrent"], ["mla", "recurrent", "recurrent"],
        ["mla", "recurrent", "recurrent", "recurrent"], ["full", "sliding_window"], ["full", "chunked_local"],
        ["sliding_window"], ["mla", "recurrent", "sliding_window"], ["recurrent"], ["mla", "mla", "recurrent"],
    ])  # fmt: skip
    specs = []
    for number, kind in enumerate(kinds):
        rows = unit * rng.choice([1, 2]) if kind in ("mla", "full", "recurrent") else unit
        drafting = draft is not Draft.NONE and kind in ("mla", "full") and rng.random() < 0.7
        window = unit * rng.choice([2, 3]) - rng.choice([0, 1]) if kind == "sliding_window" else 4 * unit
        specs.append(GroupSpec(
            f"{kind}{number}", kind, rows, draft=drafting, replicated=kind in ("mla", "full") and rng.random() < 0.2,
            window=window if kind in ("sliding_window", "chunked_local") else 0,
        ))  # fmt: skip
    geometry = resolve(specs, dcp=dcp, hash_unit=unit)
    retention = rng.choice([None, 0, 0, 2 * geometry.schedule_block])
    budget = rng.choice([8, 16, 40])
    longest = 60 + 12
    one_pool = rng.random() < 0.5
    need = [g.columns(longest + 8) + 2 if g.kind.value != "recurrent" else 4 for g in geometry.groups]
    spare = rng.choice([0.8, 1.0, 1.2, 2.0, 5.0])
    pools = (int(sum(need) * spare),) if one_pool else tuple(int(blocks * spare) for blocks in need)
    return Rules(
        geometry=geometry, pool_blocks=pools, group_pool=(0,) * len(specs) if one_pool else tuple(range(len(specs))),
        max_requests=6, max_context=longest + 8, token_budget=budget, chunk_limit=rng.choice([1 << 30, 5, 16]),
        retention=retention, draft=draft, lookahead=rng.choice([1, drafts]) if draft is Draft.LOOKAHEAD else 0,
        slots_ahead=drafts if draft is not Draft.NONE else 0, turn_end=rng.random() < 0.7,
        ladder=rng.choice([(), (4 * unit,)]), priority=rng.random() < 0.2,
    )  # fmt: skip


def workload(seed: int, requests: int = 25) -> Outcome:
    """One system under random traffic; faults: unsound reads and names, broken invariants, stalls, leaks."""
    rng = random.Random(seed)
    rules = draw_rules(rng)
    model = Model(rules)
    device = Device(model)
    stems = [[rng.randrange(3) for _ in range(44)] for _ in range(2)]
    queue: list[list[int]] = []
    while len(queue) < requests:
        prompt = stems[rng.randrange(2)][: rng.randrange(45)] + [rng.randrange(3) for _ in range(rng.randrange(1, 16))]
        queue += [prompt] * rng.choice([1, 1, 2, 3])
    lengths: dict[str, int] = {}
    counts: collections.Counter[str] = collections.Counter()
    steps = idle = number = 0
    fault = ""
    while not fault and (queue or model.requests):
        while queue and len(model.requests) < 8 and rng.random() < 0.6:
            name = f"r{number}"
            number += 1
            lengths[name] = rng.randrange(1, 12)
            prompt, salt, priority = queue.pop(), rng.choice([None] * 8 + ["a"]), rng.randrange(3)
            reads = rng.random() < 0.95
            try:
                model.arrive(name, prompt, answer=lengths[name], salt=salt, priority=priority, read_cache=reads)
            except UserError:
                counts["refused"] += 1  # it needs more blocks than there are
        try:
            idle = 0 if _one_step(rng, model, device, lengths, counts) or not model.requests else idle + 1
        except Unsound as error:
            fault = f"unsound: {error}"
        steps += 1
        if idle > _STALL or steps > _ENDLESS:
            fault = "stalled"
        elif not fault and (faults := broken(model)):
            fault = f"broken: {faults[0]}"
    if not fault and (held := sum(pool.size - pool.free for pool in model.pools)):
        fault = f"leak: {held} blocks held at the end"
    if not fault and not model.reset():
        fault = "leak: reset refused at the end"
    return Outcome(
        seed, rules, fault, steps, counts["hits"], sum(pool.evicted for pool in model.pools), counts["preempted"],
        counts["aborted"], counts["copies"],
    )  # fmt: skip


def _one_step(
    rng: random.Random, model: Model, device: Device, lengths: dict[str, int], counts: collections.Counter[str]
) -> bool:
    step = model.schedule()
    device.plan(step)
    counts["preempted"] += len(step.preempted)
    counts["copies"] += step.copies
    counts["hits"] += sum(hit.tokens for hit in step.admitted.values())
    answers: dict[str, list[int]] = {}
    ended = []
    for row in step.rows:
        request = row.request
        if row.start + row.length - row.drafts < len(request.tokens):
            continue
        accepted = rng.randrange(row.drafts + 1) if row.drafts else 0
        left = lengths[request.name] - (len(request.tokens) - request.prompt)
        answers[request.name] = [rng.randrange(3) for _ in range(min(accepted + 1, left))]
        if len(answers[request.name]) == left:
            ended.append(request.name)
    if model.requests and rng.random() < 0.02:
        model.abort(rng.choice(sorted(model.requests)))  # while the step runs
        counts["aborted"] += 1
    turns = model.commit(step, answers, ended)
    device.run(turns)
    for name in answers:
        if name in model.requests and model.rules.slots_ahead:
            model.propose(name, rng.randrange(model.rules.slots_ahead + 1))
    if model.requests and rng.random() < 0.04:
        model.abort(rng.choice(sorted(model.requests)))
        counts["aborted"] += 1
    return bool(step.rows)
