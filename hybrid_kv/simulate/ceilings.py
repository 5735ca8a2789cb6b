"""Theoretical prefix reuse of requests with an unlimited cache: what a real cache is held against.

Requests are looked at one after the other. A hit may cover at most L - 1 of a prompt's L tokens, because one
token has to be computed, and it ends at a multiple of the grid. Four policies say where state is kept:

attention               no recurrent state is needed: every earlier position can be resumed.
end                     state at the last grid boundary of each prompt.
end + turn              and at the last boundary of prompt + answer, the answer's last token left out
                        (that token is returned, not computed on).
end + turn + branch     and, where a request leaves known content further on than its own state hit
                        reached, at the boundary below that point (so its successors gain, not itself).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_kv.errors import UserError

Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Ceilings:
    """Hit tokens / prompt tokens (0 to 1), cold requests included. grid: tokens."""

    grid: int
    prompt_tokens: int
    attention: float
    end: float
    end_turn: float
    end_turn_branch: float


def ceilings(served: Sequence[tuple[Tokens, Tokens]], grid: int) -> Ceilings:
    """The four ceilings of (prompt, answer) pairs in the order in which they were served.

    Raises UserError for a grid below one token or when there is no prompt token.
    """
    if grid < 1:
        raise UserError("grid", grid, "must be at least one token")
    total = sum(len(prompt) for prompt, _ in served)
    if not total:
        raise UserError("served requests", len(served), "give at least one request with a prompt")
    trie = BlockTrie(grid)
    # Each policy's set of trie nodes that hold a state. A node names a whole prefix.
    end: set[int] = set()
    turn: set[int] = set()
    branch: set[int] = set()
    hits = dict.fromkeys(("attention", "end", "end_turn", "end_turn_branch"), 0)
    for prompt, answer in served:
        length = len(prompt)
        known, path = trie.insert(np.concatenate([np.asarray(prompt, np.int64), np.asarray(answer, np.int64)]))
        known = min(known, length // grid)  # what the answer shares is of no use to this prompt
        top = min(known, (length - 1) // grid)
        branch_hit = _deepest(path, top, branch)
        hits["attention"] += top
        hits["end"] += _deepest(path, top, end)
        hits["end_turn"] += _deepest(path, top, turn)
        hits["end_turn_branch"] += branch_hit
        prompt_end = path[: length // grid][-1:]
        turn_end = path[: (length + len(answer) - 1) // grid][-1:]
        end.update(prompt_end)
        turn.update(prompt_end + turn_end)
        branch.update(prompt_end + turn_end)
        if known > branch_hit:
            branch.add(path[known - 1])
    return Ceilings(grid, total, **{name: blocks * grid / total for name, blocks in hits.items()})


class BlockTrie:
    """Every prefix seen so far, in whole blocks of `grid` tokens; exact: keys are (parent node, content)."""

    def __init__(self, grid: int) -> None:
        self._grid = grid
        self._nodes: dict[tuple[int, bytes], int] = {}

    def insert(self, tokens: np.ndarray) -> tuple[int, list[int]]:
        """(leading blocks that were there already, the node of every block of `tokens`)."""
        width = self._grid * tokens.itemsize
        content = tokens.tobytes()
        known, node = 0, 0
        path: list[int] = []
        for start in range(0, len(content) - width + 1, width):
            key = (node, content[start : start + width])
            found = self._nodes.get(key)
            if found is None:
                found = self._nodes[key] = len(self._nodes) + 1
            elif known == len(path):
                known += 1
            node = found
            path.append(node)
        return known, path


def _deepest(path: Sequence[int], top: int, states: set[int]) -> int:
    """Blocks up to the deepest of the first `top` nodes that holds a state; 0 if none does."""
    return next((depth for depth in range(top, 0, -1) if path[depth - 1] in states), 0)
