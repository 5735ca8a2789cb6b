#!/usr/bin/env python3
"""Tokens hashed per second on the host, median and best of nine: the chain with nothing extra, at unit 64.

.venv/bin/python scripts/hash_speed.py [UNIT]
"""

import statistics
import sys
import time

import numpy as np

from hybrid_kv import hashing

TOKENS = 1 << 20


def main() -> None:
    unit = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    tokens = np.random.default_rng(0).integers(0, 1 << 17, TOKENS).astype(np.int32)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        hashing.chain(tokens, unit, hashing.seed())
        times.append(time.perf_counter() - start)
    median, best = (TOKENS / seconds / 1e6 for seconds in (statistics.median(times), min(times)))
    print(f"unit {unit}: {median:.1f} million tokens/s, {best:.1f} at best")


if __name__ == "__main__":
    main()
