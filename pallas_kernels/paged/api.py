"""Block copies inside a pool: signature and contract."""

from jaxtyping import Array, Int32, Shaped

from pallas_kernels.dispatch import Implementations, choose
from pallas_kernels.paged import reference

_COPY: Implementations = {"reference": reference.copy_blocks, "tpu": "pallas_kernels.paged.tpu:copy_blocks"}


def copy_blocks(
    pool: Shaped[Array, "layers B ..."],
    source: Int32[Array, "n"],
    target: Int32[Array, "n"],
    *,
    implementation: str | None = None,
) -> Shaped[Array, "layers B ..."]:
    """Copy blocks (or slots) `source` to `target` in every layer.

    All sources are read before any target is written, so chains and swaps are safe. Pairs whose
    target is the null block 0 do nothing; the other targets must differ.
    """
    return choose("copy_blocks", implementation, _COPY)(pool, source, target)
