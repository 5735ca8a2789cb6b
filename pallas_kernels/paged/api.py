"""Whole blocks of a pool: copy, zero, gather, scatter. Signatures and contracts.

A pool is [layers, B, ...]; a block (or slot) is its content in every layer. Block 0 is the null block: nothing is
written to it, and it reads as zeros. Ids that are known when an op is called (not traced) are checked against the
pool; traced ones have to be checked where they are made, see `ids`. `paged.host` runs these ops on any number of
blocks with few programs.
"""

from jaxtyping import Array, Int32, Shaped

from pallas_kernels.dispatch import Implementations, choose
from pallas_kernels.paged import reference
from pallas_kernels.paged.ids import check, check_content, check_targets


def _forms(op: str) -> Implementations:
    return {"reference": getattr(reference, op), "tpu": f"pallas_kernels.paged.tpu:{op}"}


def copy_blocks(
    pool: Shaped[Array, "layers B ..."],
    source: Int32[Array, "n"],
    target: Int32[Array, "n"],
    *,
    implementation: str | None = None,
) -> Shaped[Array, "layers B ..."]:
    """Copy blocks (or slots) `source` to `target` in every layer.

    All sources are read before any target is written, so chains and swaps are safe. Pairs whose
    target is the null block 0 do nothing; the other targets must differ. The source of a pair that copies
    something is not the null block.

    Raises:
      ValueError: an id beyond the pool, two equal targets, or not as many targets as sources.
    """
    if len(source) != len(target):
        raise ValueError(f"target: got {len(target)} blocks for {len(source)} sources; give one each")
    check("source", source, pool.shape[1])
    check_targets("target", target, pool.shape[1])
    return choose("copy_blocks", implementation, _forms("copy_blocks"))(pool, source, target)


def zero_blocks(
    pool: Shaped[Array, "layers B ..."], target: Int32[Array, "n"], *, implementation: str | None = None
) -> Shaped[Array, "layers B ..."]:
    """Fill blocks with zeros in every layer; ids that are 0 do nothing.

    Raises:
      ValueError: an id beyond the pool, or two equal ones.
    """
    check_targets("target", target, pool.shape[1])
    return choose("zero_blocks", implementation, _forms("zero_blocks"))(pool, target)


def gather_blocks(
    pool: Shaped[Array, "layers B ..."], source: Int32[Array, "n"], *, implementation: str | None = None
) -> Shaped[Array, "layers n ..."]:
    """Content of blocks, one after the other; zeros for ids that are 0.

    Raises:
      ValueError: an id beyond the pool.
    """
    check("source", source, pool.shape[1])
    return choose("gather_blocks", implementation, _forms("gather_blocks"))(pool, source)


def scatter_blocks(
    pool: Shaped[Array, "layers B ..."],
    target: Int32[Array, "n"],
    content: Shaped[Array, "layers m ..."],
    *,
    implementation: str | None = None,
) -> Shaped[Array, "layers B ..."]:
    """Put content into blocks; ids that are 0 drop theirs, the others must differ.

    Raises:
      ValueError: an id beyond the pool, two equal ones, or content of another shape or type than that of the blocks.
    """
    check_targets("target", target, pool.shape[1])
    check_content(content, pool, target.shape[0])
    return choose("scatter_blocks", implementation, _forms("scatter_blocks"))(pool, target, content)
