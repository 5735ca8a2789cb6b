"""What a compiled module says of itself: collectives, kernels, and arrays that it makes on the way.

Text of optimised HLO, as `executable.as_text()` gives it, one operation a line. Operations inside a layer carry the
layer's kind in their name (`jax.named_scope`), which says how often they run.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_ITEMSIZE = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4,
    "u32": 4, "f64": 8, "s64": 8, "u64": 8, "f4e2m1fn": 0.5, "f8e8m0fnu": 1,
}  # fmt: skip
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([0-9,]*)\]")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
ENTRY = "ENTRY"  # the computation that is called from outside
_CALLS = re.compile(r"(?:calls=|called_computations=\{)(%[\w.-]+)")
_TPU_KERNEL = "tpu_custom_call"
KERNEL_TARGETS = (_TPU_KERNEL, "mosaic_gpu_v2", "mosaic_gpu")
# On GPU a collective is a start and a done; the start counts.
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# What only names, selects or passes on arrays that exist.
_NAMES = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "optimization-barrier")


@dataclass(frozen=True)
class Operation:
    """One line of a module.

    Attributes:
      kind: as HLO names it, such as "all-gather".
      arrays: (type, dimensions) of what it returns.
      scope: names of the functions it comes from, joined by "/".
      group: devices that take part, of a collective; else 1.
      target: of a custom call; else "".
      fused: it lies inside a fusion, so its result is no array in memory unless it is the root.
      computation: the computation it belongs to, such as the branch of a conditional.
      calls: computations that are part of it.
    """

    name: str
    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    scope: str
    group: int
    target: str
    fused: bool
    computation: str
    calls: tuple[str, ...]

    @property
    def bytes(self) -> float:
        """Of all it returns, on one device."""
        return sum(array_bytes(*array) for array in self.arrays)

    def within(self, name: str) -> bool:
        return name in self.scope.split("/")


def array_bytes(dtype: str, shape: tuple[int, ...]) -> float:
    """Of an array by HLO's name of its type; unknown types count 4."""
    size = 1 if dtype.startswith("f8") else _ITEMSIZE.get(dtype, 4)
    return math.prod(shape) * size


def operations(text: str) -> list[Operation]:
    """All operations of a module."""
    return list(_operations(text))


def _operations(text: str) -> Iterator[Operation]:
    fused, computation = False, ""
    for line in text.splitlines():
        if line.endswith("{") and " = " not in line.split("(", 1)[0]:
            computation = ENTRY if line.startswith(ENTRY) else line.split("(", 1)[0].strip()
            fused = "fused_computation" in computation or "bitcast_fusion" in computation
            continue
        found = _OPERATION.match(line)
        if not found:
            continue
        scope, target = _SCOPE.search(line), _TARGET.search(line)
        arrays = tuple((dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(found[2]))
        kind = found[3].removesuffix("-start")
        if kind in COLLECTIVES and kind not in (found[3], "all-reduce"):
            arrays = arrays[len(arrays) // 2 :]  # a start returns operands, then results
        yield Operation(
            name=found[1], kind=kind, arrays=arrays, scope=scope[1] if scope else "", fused=fused,
            group=_group(line) if kind in COLLECTIVES else 1, target=target[1] if target else "",
            computation=computation, calls=tuple(_CALLS.findall(line)),
        )  # fmt: skip


def _group(line: str) -> int:
    """Devices of a replica group, written out ({{0,1},{2,3}}) or as a shape ([2,2]<=[4])."""
    listed = re.search(r"replica_groups=\{\{([0-9,]*)\}", line)
    if listed:
        return len(listed[1].split(","))
    shaped = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    return int(shaped[1]) if shaped else 1


def scopes_of(found: list[Operation], names: Sequence[str]) -> dict[str, str]:
    """Of every computation but the outermost the name among `names` that most operations of its branch or body are
    within, if any is.

    Operations that the compiler merges or makes keep the scope of one of them or none, so it is the branch that they
    run in which counts; one that runs asynchronously has a computation of its own, called from there.
    """
    callers = {called: operation.computation for operation in found for called in operation.calls}
    inner = {*callers, ENTRY}
    votes: dict[str, Counter[str]] = {}
    for operation in found:
        for name in names:
            if operation.computation not in inner and operation.within(name):
                votes.setdefault(operation.computation, Counter())[name] += 1

    def branch(computation: str) -> str:
        while computation in callers:
            computation = callers[computation]
        return computation

    chosen = {computation: count.most_common(1)[0][0] for computation, count in votes.items()}
    every = {operation.computation for operation in found}
    return {computation: chosen[branch(computation)] for computation in every if branch(computation) in chosen}


def collectives(found: list[Operation]) -> list[Operation]:
    """The collectives among operations; the fusions that begin and end one beside a product show it once more."""
    return [operation for operation in found if operation.kind in COLLECTIVES and not operation.fused]


def wire_bytes(operation: Operation) -> float:
    """Bytes that a device sends for a collective on a ring, the least that any topology needs for its result."""
    n, size = operation.group, operation.bytes
    share = (n - 1) / n
    return {
        "all-gather": size * share,
        "all-reduce": 2 * size * share,
        "reduce-scatter": size * n * share,
        "all-to-all": size * share,
        "ragged-all-to-all": size * share,
        "collective-permute": size,
    }[operation.kind]


def kernels(found: list[Operation]) -> dict[str, int]:
    """Names of the Pallas kernels and how often each is written in the module."""
    names: dict[str, int] = {}
    for operation in found:
        if operation.target in KERNEL_TARGETS:
            name = re.sub(r"\.\d+$", "", operation.name)
            if operation.target != _TPU_KERNEL:  # all of one name; the innermost scope is that of the call
                name = operation.scope.split("/")[-2]
            names[name] = names.get(name, 0) + 1
    return names


def made(found: list[Operation], at_least: float) -> list[Operation]:
    """Operations that put at least so many bytes into memory; kernels, which write in place, left out."""
    return [
        operation
        for operation in found
        if operation.kind not in _NAMES
        and not operation.fused
        and operation.target not in KERNEL_TARGETS
        and operation.bytes >= at_least
    ]
