"""KDA kernels on eight interpreted devices that look for races, in a process of its own.

    python -m tests.kernels.mesh_with_checks

prints a line of JSON: whether a race was found in each case, and how far its results are from the kernel on one
device. The interpreter waits in callbacks until all devices have come as far, one thread of the client for each, so
the client needs more threads than a small machine has cores; it reads their number when it starts.
"""

import os

if __name__ == "__main__":
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "PJRT_NPROC": "16",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.kernels import golden
from tests.kernels.races import races_found
from tests.kernels.test_interpreter_finds_faults import copied_row
from tests.kernels.test_kda_sharded import DECODE, OPTIONS, PREFILL, QUICK, SPLIT, eight_devices, on_a_mesh
from tests.kernels.tpu import CHECKED


def race_of(**fault: bool) -> bool:
    """Whether a race is found in `copied_row` on all eight devices."""
    split = P(SPLIT)
    run = functools.partial(copied_row, **fault)
    run = jax.shard_map(run, mesh=eight_devices(), in_specs=split, out_specs=split, check_vma=False)
    jax.block_until_ready(jax.jit(run)(jnp.ones((64, 128))))
    return races_found()


def main() -> None:
    found: dict[str, Any] = {"right": race_of(), "early read": race_of(wait_first=False)}
    for name, (kernel, given) in {"decode": DECODE, "prefill": PREFILL}.items():
        got = jax.block_until_ready(on_a_mesh(functools.partial(kernel, interpret=CHECKED), given()))
        found[name] = races_found()
        whole = jax.jit(functools.partial(kernel, interpret=True, **OPTIONS), compiler_options=QUICK)(*given())
        pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(got, whole, strict=True)]
        same_gaps = all((np.isnan(a) == np.isnan(b)).all() for a, b in pairs)
        errors = [golden.rel_rmse(np.nan_to_num(a), np.nan_to_num(b)) for a, b in pairs]
        found[f"{name} error"] = max(errors) if same_gaps else np.inf
    print(json.dumps(found))


if __name__ == "__main__":
    main()
