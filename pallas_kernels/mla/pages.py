"""How a page of latent rows lies in memory: two forms, told apart by the shape of the pool.

A row of the cache is [latent (L) | position key (P)]; a page holds n rows of one rank.

* Rows: `[layers, B, n, L + P]`. Any widths. Where 576-wide rows end in half a lane tile, an accelerator pads
  them to 640.
* Planes: `[layers, B, n (L + P) / 128, 128]`, for L a multiple of 128, P = 64 and n even. L / 128 planes [n, 128] of
  the latent, one after the other, then n / 2 rows of tails: row i = [position key of row i | of row i + n / 2].
  Nothing is padded, a page is one piece of memory (one transfer), and a plane is ready to be multiplied.
  A page of more than 256 rows is cut into equal *sections*, each of which is a page of its own in planes, one behind
  the other. So a kernel takes keys in pieces of memory that are no larger, and none of a section that it does not need.
  Sections are as few as there can be of at most 256 rows, a multiple of gcd(n, 64): 1024 rows are 4 x 256, 320 are
  5 x 64. Where n is no multiple of 16, which no kernel takes, there is one.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

LANES = 128
TAIL = 64
# Most rows of a section; what kernels take at a time, at best and at least.
_MOST, _BEST, _LEAST = 256, 64, 16


@dataclasses.dataclass(frozen=True)
class Pages:
    """The form of a page.

    Attributes:
      rows: n, rows of a page on one rank.
      latent, position: widths L and P.
      planes: whether it is the second form.
    """

    rows: int
    latent: int
    position: int
    planes: bool

    @property
    def width(self) -> int:
        """Values of a cache row."""
        return self.latent + self.position

    @property
    def shape(self) -> tuple[int, int]:
        """Of one page in the pool."""
        return (self.rows * self.width // LANES, LANES) if self.planes else (self.rows, self.width)

    @property
    def sections(self) -> int:
        """Of a page in planes."""
        unit = math.gcd(self.rows, _BEST)
        if self.rows <= _MOST or unit < _LEAST:
            return 1
        counts = range(-(-self.rows // _MOST), self.rows // unit + 1)
        return next(count for count in counts if self.rows % (count * unit) == 0)

    @property
    def section(self) -> int:
        """Rows of a section."""
        return self.rows // self.sections

    def section_table(self, table: Int32[Array, "R C"]) -> Int32[Array, "R Cs"]:
        """A block table of sections, of a pool seen as pages of one each; null blocks stay 0."""
        if self.sections == 1:
            return table
        each = table[..., None] * self.sections + jnp.arange(self.sections, dtype=jnp.int32)
        return jnp.where(table[..., None] == 0, 0, each).reshape(table.shape[0], -1)

    def split(self, pages: Float[Array, "..."]) -> Float[Array, "... n LP"]:
        """Cache rows of pages [..., *shape]."""
        if not self.planes:
            return pages
        lead, n = pages.shape[:-2], self.section
        pages = pages.reshape(*lead, self.sections, -1, LANES)
        tails = pages[..., n * self.latent // LANES :, :]
        latent = pages[..., : n * self.latent // LANES, :].reshape(*lead, self.sections, -1, n, LANES)
        tails = jnp.concatenate([tails[..., :TAIL], tails[..., TAIL:]], axis=-2)
        latent = jnp.moveaxis(latent, -3, -2).reshape(*lead, self.sections, n, self.latent)
        return jnp.concatenate([latent, tails], axis=-1).reshape(*lead, self.rows, self.width)

    def join(self, rows: Float[Array, "... n LP"]) -> Float[Array, "..."]:
        """Pages [..., *shape] of cache rows; the inverse of `split`."""
        if not self.planes:
            return rows
        lead, n = rows.shape[:-2], self.section
        rows = rows.reshape(*lead, self.sections, n, self.width)
        latent = jnp.moveaxis(rows[..., : self.latent].reshape(*lead, self.sections, n, -1, LANES), -2, -3)
        tails = rows[..., self.latent :]
        tails = jnp.concatenate([tails[..., : n // 2, :], tails[..., n // 2 :, :]], axis=-1)
        pages = jnp.concatenate([latent.reshape(*lead, self.sections, -1, LANES), tails], axis=-2)
        return pages.reshape(*lead, *self.shape)


def pages_of(cache: Any, latent: int, position: int) -> Pages:
    """The form of a pool (or of anything with its shape).

    Raises:
      ValueError: its last two axes are no page of such rows.
    """
    length, width = cache.shape[-2:]
    if width == latent + position:
        return Pages(length, latent, position, planes=False)
    n = length * LANES // (latent + position)
    found = Pages(n, latent, position, planes=True)
    if latent % LANES or position != TAIL or n % 2 or found.shape != (length, width):
        raise ValueError(
            f"cache: got pages of {length} x {width} for rows of {latent} + {position}; "
            f"they are [n, {latent + position}], or [n * {latent + position} / {LANES}, {LANES}] with n even where the "
            f"latent is a multiple of {LANES} and the position key {TAIL} wide"
        )
    return found


def pool_shape(layers: int, blocks: int, rows: int, latent: int, position: int, *, planes: bool) -> tuple[int, ...]:
    """Shape of a pool whose pages hold `rows` rows on a rank.

    Raises:
      ValueError: such pages have no planes.
    """
    if planes and (latent % LANES or position != TAIL or rows % 2):
        raise ValueError(
            f"planes: got {rows} rows of {latent} + {position}; pages in planes need an even number of rows, a latent "
            f"that is a multiple of {LANES} and a position key of {TAIL}"
        )
    return (layers, blocks, *Pages(rows, latent, position, planes).shape)
