"""How the pools lie in device memory, which kernels have a say in.

The plain form has values of a token side by side and fits any sizes. Kernels of an accelerator want whole tiles: pages
of latent rows in planes of 128 lanes, and histories of the convolution in columns of 128 channels. Otherwise the
compiler pads them, or copies the whole pool around every call (docs/12-conv-kernel.md, docs/16-latent-cache.md).
"""

from __future__ import annotations

import dataclasses

from hybrid_kv.errors import UserError

KERNELS = ("tpu", "gpu")
LANES = 128
_TAIL, _TILE = 64, 16


@dataclasses.dataclass(frozen=True)
class PoolForms:
    """Which pools lie in the form that kernels want.

    planes: MLA pages are [rows * width / 128, 128] (`pallas_kernels.mla.pages`), not [rows, width].
    columns: convolution histories are [taps - 1, channels / 128, 128], not [taps - 1, channels].
    """

    planes: bool = False
    columns: bool = False


PLAIN = PoolForms()


def forms_for(
    kernels: str | None, *, latent: int, position: int, rows_per_rank: int, channels: int, parts: int
) -> PoolForms:
    """The forms that a back end's kernels take, plain ones where sizes do not allow them.

    kernels: "tpu", "gpu" or None for plain XLA. rows_per_rank: of an MLA page. channels: of the convolution, which the
    mesh splits into `parts`.
    """
    if kernels is None:
        return PLAIN
    if kernels not in KERNELS:
        raise UserError("kernels", kernels, f"use one of {', '.join(KERNELS)}, or None")
    planes = latent % LANES == 0 and position == _TAIL and rows_per_rank > 0 and rows_per_rank % _TILE == 0
    return PoolForms(planes=planes, columns=channels % (LANES * parts) == 0)
