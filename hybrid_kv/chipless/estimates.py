"""What XLA estimates for the operations of a compiled TPU module that are no kernels.

The text of a compiled module gives `estimated_cycles` for most operations. They come from its cost model and not from
a schedule: a small operation counts some 2,100 cycles whatever it does.
"""

import re

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_WHILE = re.compile(r" while\(.*body=%?([\w.\-]+)")


def estimated_cycles(text: str) -> tuple[int, ...]:
    """Cycles by depth of loop: outside of loops, in one trip through the outermost loops, through those in them, ...

    Args:
      text: of the compiled module (`executable.as_text()`).

    Raises:
      ValueError: the module has no entry, or branches, of which nobody knows which is taken.
    """
    computations: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = head.group(2)
            computations[current] = []
            entry = current if head.group(1) else entry
        elif current:
            computations[current].append(line)
    if not entry:
        raise ValueError("text: got no ENTRY computation; give the text of a compiled module")
    found: list[int] = []

    def add(name: str, depth: int) -> None:
        if depth == len(found):
            found.append(0)
        for line in computations[name]:
            if " conditional(" in line:
                raise ValueError(f"text: got a conditional in {name}; only loops are added up")
            if " custom-call(" not in line and (cycles := _CYCLES.search(line)):
                found[depth] += int(cycles.group(1))
            if body := _WHILE.search(line):
                add(body.group(1), depth + 1)

    add(entry, 0)
    return tuple(found)
