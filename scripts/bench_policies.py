#!/usr/bin/env python3
"""Hit rate of the compiled core on published traces, with an unlimited pool and with a share of what they need.

    .venv/bin/python scripts/bench_policies.py --traces FOLDER [--trace miniswe ...] [--pool inf 10%] [--json]

Closed loop: the next request in trace order comes as soon as fewer than `--live` are, those of a session one after the
other; steps of 8,192 tokens; an answer comes in runs of 64 tokens. One page is 1,536 tokens of MLA rows or the state of
one of three recurrent groups, so a checkpoint costs three. `--pool 10%` is that share of the pages with content at the
end of the reference system's unlimited run (published with the traces); `--states` of them hold states.
"""

import argparse
import collections
import json
import time
from pathlib import Path

from hybrid_kv.cache.reference.rules import Rules
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.simulate.compiled import Core, config_of
from hybrid_kv.simulate.workloads import Arrival, reference

PAGE, BLOCK, UNIT, BUDGET, RUN = 1536, 128, 128, 8192, 64
LADDER = (512, 2048, 8192)
# Pages with content at the end of the reference system's unlimited run.
NEEDED = {
    "miniswe": 1783, "magagent": 1464, "synthetic": 14179, "conversation": 17848, "conversation+": 16487, "cc": 3519,
}  # fmt: skip


def core_for(pages: int, states: int, live: int, longest: int) -> Core:
    """states: checkpoints there is room for; the other pages hold rows."""
    groups = [GroupSpec("mla", "mla", BLOCK), GroupSpec("kda", "recurrent", BLOCK)]
    blocks = (pages - 3 * states) * PAGE // BLOCK
    rules = Rules(
        resolve(groups, hash_unit=UNIT), (blocks, states), (0, 1), max_requests=live, max_context=longest,
        token_budget=BUDGET, ladder=LADDER,
    )  # fmt: skip
    return Core(rules, config_of(rules, live, longest, RUN - 1))


def serve(core: Core, arrivals: list[Arrival], live: int) -> dict:
    """Serve all requests; what came of it."""
    waiting, busy = list(range(len(arrivals))), set()
    given: collections.Counter[int] = collections.Counter()
    first: dict[int, int] = {}
    steps = prefilled = 0
    while waiting or busy:
        while len(busy) < live:
            sessions = {arrivals[number].session for number in busy}
            number = next((n for n in waiting if arrivals[n].session not in sessions), None)
            if number is None:
                break
            waiting.remove(number)
            busy.add(number)
            one = arrivals[number]
            core.arrive(str(number), one.prompt.tolist(), answer=max(len(one.answer), 1))
        step = core.schedule()
        steps += 1
        for name, hit in step.admitted.items():
            first.setdefault(int(name), hit.tokens)
        answers, ended = {}, []
        for row in step.rows:
            number = int(row.request.name)
            prefilled += row.length if row.start < row.request.prompt else 0
            if row.samples:
                answer = arrivals[number].answer if len(arrivals[number].answer) else [1]
                answers[str(number)] = [int(n) for n in answer[given[number] : given[number] + row.drafts + 1]]
                given[number] += len(answers[str(number)])
                left = len(answer) - given[number]
                if left <= 0:
                    ended.append(str(number))
                else:
                    core.propose(str(number), min(left - 1, RUN - 1))
        core.commit(step, answers, ended)
        busy -= {int(name) for name in ended}
    prompts = sum(len(one.prompt) for one in arrivals)
    seen = core.statistics
    return {
        "hit %": round(100 * sum(first.values()) / prompts, 2),
        "states per 1k prefilled": round(1e3 * seen.states / max(prefilled, 1), 2),
        "skipped states": seen.skipped_states,
        "evictions": seen.evictions,
        "preemptions": seen.preemptions,
        "steps": steps,
        "reasons": {reason.name: count for reason, count in seen.reasons.items()},
    }


def main() -> None:
    """Print one line, or one JSON object, for each trace and pool."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--trace", nargs="+", default=["miniswe", "magagent", "synthetic", "conversation+", "cc"])
    parser.add_argument("--pool", nargs="+", default=["inf", "10%"])
    parser.add_argument("--states", type=float, default=0.3, help="share of the pages of a bounded pool")
    parser.add_argument("--live", type=int, default=8)
    parser.add_argument("--requests", type=int, default=None, help="only the first so many")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        for name in options.trace:
            arrivals = list(reference(options.traces, name))[: options.requests]
            longest = max(len(one.prompt) + len(one.answer) for one in arrivals) + BLOCK
            for pool in options.pool:
                pages = 4 * NEEDED[name] if pool == "inf" else round(NEEDED[name] * float(pool.rstrip("%")) / 100)
                states = pages // 4 if pool == "inf" else int(pages * options.states) // 3
                began = time.perf_counter()
                result = serve(core_for(pages, states, options.live, longest), arrivals, options.live)
                line = {"trace": name, "pool": pool, "pages": pages, "checkpoints": states, **result}
                line["seconds"] = round(time.perf_counter() - began, 1)
                print(json.dumps(line) if options.json else "  ".join(f"{k} {v}" for k, v in line.items()), flush=True)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
