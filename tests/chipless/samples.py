"""Two small kernels, of which tests/data/schedules holds the schedules for v6e (jax 0.10.2, libtpu 0.0.52).

python -m tests.chipless.samples FOLDER     compiles them again; keep the files that `FILES` names
"""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hybrid_kv.chipless.compile import compile_for
from hybrid_kv.chipless.targets import CODE, SCHEDULE, UNITS, prepare_environment

FILES = (SCHEDULE, CODE, UNITS)
LENGTHS = (3, 0, 7, 5, 9, 0, 1, 2)


def ragged_steps(lengths: jax.Array, x: jax.Array) -> jax.Array:
    """A grid of as many steps as there are lengths above 0; step i loops lengths[i] times."""

    def body(length, block, out):
        def added(i, total):
            return total + block[...] * i

        out[...] = lax.fori_loop(0, length[pl.program_id(0)], added, jnp.zeros((8, 128), jnp.float32))

    steps = jnp.sum((lengths > 0).astype(jnp.int32))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(steps,), in_specs=[pl.BlockSpec((8, 128), lambda i, n: (n[i], 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, n: (i, 0)),
    )  # fmt: skip
    out = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    return pl.pallas_call(body, grid_spec=grid, out_shape=out, name="ragged_steps")(lengths, x)


def gather_rows(slots: jax.Array, pool: jax.Array) -> jax.Array:
    """Rows of a pool by slot, one copy ahead; slot 0 leaves its row alone."""

    def body(slot, source, out, buffer, arrived):
        count = slot.shape[0]

        def fetch(i):
            place = lax.rem(i, 2)
            return pltpu.make_async_copy(source.at[slot[i]], buffer.at[place], arrived.at[place])

        fetch(0).start()

        @pl.loop(0, count)
        def _(i):
            pl.when(i + 1 < count)(lambda: fetch(i + 1).start())
            fetch(i).wait()

            @pl.when(slot[i] > 0)
            def _():
                out[pl.ds(i, 1)] = buffer[lax.rem(i, 2)][None]

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(), in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        scratch_shapes=[pltpu.VMEM((2, 16, 512), jnp.float32), pltpu.SemaphoreType.DMA((2,))],
    )  # fmt: skip
    out = jax.ShapeDtypeStruct((slots.shape[0], 16, 512), jnp.float32)
    pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    return pl.pallas_call(body, grid_spec=grid, out_shape=out, name="gather_rows")(slots, pool)


SAMPLES = {
    "ragged_steps": (ragged_steps, jax.ShapeDtypeStruct((512, 128), jnp.float32)),
    "gather_rows": (gather_rows, jax.ShapeDtypeStruct((100_000, 16, 512), jnp.float32)),
}


def main(folder: Path) -> None:
    """Compile both for v6e into `folder`."""
    prepare_environment(folder)
    for function, data in SAMPLES.values():
        compile_for("v6e", function, jnp.array(LENGTHS, jnp.int32), data)
    for path in folder.iterdir():
        if not (re.search("|".join(SAMPLES), path.name) and re.search(rf"\d-({'|'.join(FILES)})\.txt", path.name)):
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
