"""Reads the schedules that the TPU compiler writes: bundles of instructions, one a cycle.

The schedule taken is the one after register allocation with the latency gaps still in it (`targets.SCHEDULE`): a
bundle of it is a cycle. In the code as stored (`targets.CODE`) the gaps are folded into delay fields, so its
bundles tell the size and not the time.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hybrid_kv.chipless.targets import CODE, SCHEDULE, UNITS

# Columns of the compiler's table of unit use. FILL and SPILL are the shares of loads and stores that are register
# spills; MATMUL counts cycles a matrix unit is busy.
UNIT_NAMES = (
    "MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU",
)  # fmt: skip

# Operands smaller than this are put into vector memory by XLA as a matter of course.
_SMALL_OPERAND = 16384


@dataclass(frozen=True)
class Bundle:
    """Instructions that issue in one cycle, without comments; `raw` has the comments."""

    index: int
    operations: tuple[str, ...]
    raw: str


@dataclass(frozen=True)
class Operand:
    """An operand of the compiled call: where it lies, input or output, shape as the compiler prints it."""

    index: int
    memory: str
    kind: str
    shape: str

    @property
    def elements(self) -> int:
        count = 1
        for size in re.findall(r"\d+", self.shape[self.shape.find("[") :]):
            count *= int(size)
        return count


@dataclass(frozen=True)
class Schedule:
    """The schedule of one kernel.

    Attributes:
      name: name of the `pallas_call`, perhaps with a suffix of the compiler.
      bundles: in order; branch targets are indices of it.
      units: per bundle, slots used by unit (`UNIT_NAMES`); empty if not dumped.
      capacity: slots there are in a cycle, by unit.
      code_bundles: size of the stored code.
      operands: of the compiled call, by position.
      vmem_bytes: vector memory of blocks, scratch and spills; 0 if not dumped.
    """

    name: str
    bundles: tuple[Bundle, ...]
    units: tuple[tuple[int, ...], ...] = ()
    capacity: tuple[int, ...] = ()
    code_bundles: int = 0
    operands: tuple[Operand, ...] = ()
    vmem_bytes: int = 0

    @property
    def moved_to_vmem(self) -> tuple[Operand, ...]:
        """Operands that XLA copied into vector memory ahead of the call: their traffic is not in this kernel."""
        return tuple(o for o in self.operands if o.memory == "vmem" and o.elements > _SMALL_OPERAND)

    def slots(self, spans: list[tuple[int, int]] | None = None) -> Counter[str]:
        """Slots used by unit in the bundles of these half-open spans, each bundle once; all of them if None."""
        total: Counter[str] = Counter()
        for low, high in spans if spans is not None else [(0, len(self.bundles))]:
            for row in self.units[low:high]:
                for name, used in zip(UNIT_NAMES, row, strict=True):
                    total[name] += used
        return total

    @property
    def spills(self) -> int:
        """Vector registers stored to make room, each such store once."""
        return self.slots()["VSTORE:SPILL"]


_HEAD = re.compile(r"^\s*(0x[0-9a-f]+|\d+)\s+([A-Z][A-Z: ]*)?:\s*(>*)\s*\{", re.M)
# A copy through a descriptor names its direction only in a comment.
_GENERAL_COPY = re.compile(r"dma\.general([^;{}]*?)/\* (\w+)-to-(\w+) \*/", re.S)
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_OPERAND = re.compile(r"inlined_call_operand\.(<[^>]*>|\w+) \[shape: (\w+\[[\d,]*\]).*?index: (\d+), kind: (\w+)", re.S)
_FILE = re.compile(r"^(\d+)-(.*?)-(\d\d+)-(.*)\.txt$")


def parse_bundles(text: str) -> tuple[Bundle, ...]:
    """The bundles of one listing."""
    heads = list(_HEAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    bundles = []
    for head, end in zip(heads, ends, strict=True):
        body = _GENERAL_COPY.sub(r"dma.\2_to_\3\1", text[head.end() : end])
        clean = _COMMENT.sub("", body)
        operations = (part.strip() for part in clean[: clean.rfind("}")].split(";;"))
        bundles.append(Bundle(int(head.group(1), 0), tuple(part for part in operations if part), body))
    return tuple(bundles)


def parse_units(text: str) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Capacities and the rows of a table of unit use."""
    rows = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == len(UNIT_NAMES) and all(x.isdigit() for x in fields):
            rows.append(tuple(int(x) for x in fields))
    return (rows[0], tuple(rows[1:])) if rows else ((), ())


def _operands(bundles: tuple[Bundle, ...]) -> tuple[Operand, ...]:
    found: dict[int, Operand] = {}
    for bundle in bundles[:64]:  # they stand at the beginning
        for match in _OPERAND.finditer(bundle.raw):
            memory, shape, index, kind = match.groups()
            found[int(index)] = Operand(int(index), memory, kind, shape)
    return tuple(found[i] for i in sorted(found))


def _vmem_by_kernel(folder: Path) -> dict[str, int]:
    """Bytes of vector memory by kernel; the last compilation of a name counts."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*vmem_report.html")):
        if match := re.search(r"const DATA =(\{.*?\n\});", path.read_text(), re.S):
            kernels = json.loads(match.group(1))["hlo_breakdowns"]
            sizes.update({name: int(entry["total_size"]) for name, entry in kernels.items()})
    return sizes


def read_dump(folder: Path | str, name: str = ".*") -> list[Schedule]:
    """Schedules of the kernels whose name matches the regular expression, in the order they were compiled."""
    groups: dict[tuple[str, str], dict[str, Path]] = {}
    for path in sorted(Path(folder).glob("*.txt")):
        match = _FILE.match(path.name)
        if match and re.search(name, match.group(2)):
            groups.setdefault((match.group(1), match.group(2)), {})[match.group(4)] = path
    vmem = _vmem_by_kernel(Path(folder))
    schedules = []
    for (_, kernel), files in groups.items():
        if SCHEDULE not in files:
            continue
        bundles = parse_bundles(files[SCHEDULE].read_text())
        capacity, units = parse_units(files[UNITS].read_text()) if UNITS in files else ((), ())
        if len(units) != len(bundles):
            units = ()
        code = len(_HEAD.findall(files[CODE].read_text())) if CODE in files else 0
        schedules.append(Schedule(kernel, bundles, units, capacity, code, _operands(bundles), vmem.get(kernel, 0)))
    return schedules
