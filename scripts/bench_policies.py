#!/usr/bin/env python3
"""Hit rate of the compiled core on published traces: orders of eviction side by side, pools of several sizes.

    .venv/bin/python scripts/bench_policies.py --traces FOLDER [--trace miniswe ...] [--pool inf 10% ...]
        [--policy lru tied joint ...] [--live 8 1] [--json] [--plot FILE]

Closed loop: the next request in trace order comes as soon as fewer than `--live` are, those of a session one after the
other; steps of 8,192 tokens; an answer comes in runs of 64 tokens. One pool: a page is 1,536 tokens of MLA rows, found
by units of 128, or the state of one of three recurrent groups, so a checkpoint costs three pages; what requests hold
while they run, copies and pages in part filled count. `--pool 10%` is that share of the pages with content at the end
of the reference system's unlimited run (published with the traces). A run is one compiled loop, and one program serves
all policies and pools of a trace.
"""

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from hybrid_kv.cache.config import CacheConfig, Placement
from hybrid_kv.cache.eviction import COVERAGE, JOINT, LRU, TIED, Eviction, utility
from hybrid_kv.cache.state import initial_state
from hybrid_kv.cache.statistics import statistics
from hybrid_kv.errors import UserError
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.simulate import sessions
from hybrid_kv.simulate.workloads import reference

PAGE, UNIT, BUDGET, RUN, STATE_GROUPS = 1536, 128, 8192, 64, 3
LADDER = (512, 2048, 8192)
# Pages with content at the end of the reference system's unlimited run.
NEEDED = {
    "miniswe": 1783, "magagent": 1464, "synthetic": 14179, "conversation": 17848, "conversation+": 16487, "cc": 3519,
}  # fmt: skip
UNLIMITED = 4  # times that


@dataclasses.dataclass(frozen=True)
class Policy:
    """An order of eviction, and who may start: see `CacheConfig`."""

    eviction: Eviction
    watermark: float = 0.0
    overtake: int = 0


POLICIES = {
    "lru": Policy(LRU),
    "tied": Policy(TIED),
    "coverage": Policy(COVERAGE),
    "admission": Policy(dataclasses.replace(TIED, guard=True)),
    "alpha 10": Policy(utility(10.0)),
    "alpha 100": Policy(utility(100.0)),
    "alpha 1000": Policy(utility(1000.0)),
    "joint, eviction alone": Policy(JOINT),
    "joint": Policy(JOINT, watermark=0.75, overtake=8),
}


def config_of(pages: int, live: int, longest: int) -> CacheConfig:
    """The core for requests of up to `longest` tokens and pools of up to so many pages."""
    groups = [GroupSpec("mla", "mla", PAGE)]
    groups += [GroupSpec(f"kda{nth}", "recurrent", PAGE) for nth in range(STATE_GROUPS)]
    return CacheConfig(
        geometry=resolve(groups, hash_unit=UNIT),
        pool_blocks=(pages + 1,),
        group_pool=(0,) * len(groups),
        max_requests=live,
        max_context=longest,
        token_budget=BUDGET,
        max_prefills=live,
        max_drafts=RUN - 1,
        placement=Placement(ladder=LADDER),
    )


def run(config: CacheConfig, requests: sessions.Traffic, policy: Policy, pages: int) -> dict[str, Any]:
    """Serve all requests from an empty pool of so many pages; what came of it."""
    began = time.perf_counter()
    config = dataclasses.replace(config, **{f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)})
    loop, through = sessions.begin(config, initial_state(config, (pages + 1,)), requests), False
    while not through:
        loop, through = sessions.serve(config, loop, requests)
    seen = statistics(config, loop.state)
    stuck = int(loop.idle) > 0
    return {
        "hit %": round(100 * seen.hits / max(seen.queries, 1), 2),
        "states per 1k prefilled": round(1e3 * seen.states / STATE_GROUPS / max(int(loop.prefilled), 1), 2),
        "skipped states": seen.skipped_states,
        "evictions": seen.evictions,
        "preemptions": seen.preemptions,
        "steps": int(loop.steps),
        "reasons": {reason.name: count for reason, count in seen.reasons.items()},
        "seconds": round(time.perf_counter() - began, 1),
        **({"stuck": True} if stuck else {}),
    }


def runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One line for each trace, pool and policy."""
    for name in options.trace:
        arrivals = list(reference(options.traces, name))[: options.requests]
        longest = max(len(one.prompt) + max(len(one.answer), 1) for one in arrivals) + UNIT
        config = config_of(UNLIMITED * NEEDED[name], max(options.live), longest)
        all_requests = sessions.traffic(config, arrivals)
        for live, pool in itertools.product(options.live, options.pool):
            requests = all_requests._replace(live=jnp.int32(live))
            share = UNLIMITED if pool == "inf" else float(pool.rstrip("%")) / 100
            pages = round(NEEDED[name] * share)
            for policy in options.policy:
                row = {"trace": name, "live": live, "pool": pool, "pages": pages, "policy": policy}
                if pages <= config.blocks_of(longest)[0]:
                    yield row | {"skipped": "the longest request does not fit"}
                    continue
                yield row | run(config, requests, POLICIES[policy], pages)


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Hit rate over the size of the pool, a picture for each trace. Raises UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plot", str(path), "install the plot extra: pip install 'hybrid-kv[plot]'") from None
    pictures = list(dict.fromkeys((row["trace"], row["live"]) for row in rows))
    pools = list(dict.fromkeys(row["pool"] for row in rows))
    figure = Figure(figsize=(4 * len(pictures), 4), layout="constrained")
    for nth, picture in enumerate(pictures, 1):
        axes = figure.add_subplot(1, len(pictures), nth)
        shown = [row for row in rows if (row["trace"], row["live"]) == picture and "hit %" in row]
        for policy in dict.fromkeys(row["policy"] for row in shown):
            mine = [row for row in shown if row["policy"] == policy]
            at = [pools.index(row["pool"]) for row in mine]
            axes.plot(at, [row["hit %"] for row in mine], marker=".", label=policy)
        title = f"{picture[0]}, {picture[1]} at once"
        axes.set(title=title, xlabel="pool, of the pages needed", ylabel="% of prompt tokens")
        axes.set_xticks(range(len(pools)), pools)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print one line, or one JSON object, for each trace, pool and policy."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--trace", nargs="+", default=["miniswe", "magagent", "synthetic", "conversation+", "cc"])
    parser.add_argument("--pool", nargs="+", default=["inf", "10%"])
    parser.add_argument("--policy", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--live", nargs="+", type=int, default=[8], help="requests at once; 1: one after the other")
    parser.add_argument("--requests", type=int, default=None, help="only the first so many")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, default=None, help="also draw the hit rates to this file")
    options = parser.parse_args()
    rows = []
    try:
        for row in runs(options):
            rows.append(row)
            print(json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
        if options.plot:
            plot(options.plot, rows)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
