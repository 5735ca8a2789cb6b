"""Proves answers right: each must be what the model says without any cache.

The plain run is teacher-forced: prompt + answer is scored in one go, and every answer token has to be the
most likely one after what precedes it. By induction that is the greedy run without a cache, token for token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_kv.replay.run import Served

# Logits closer than this are a tie between two orders of adding the same numbers in float32.
TIE_MARGIN = 1e-4


@dataclass(frozen=True)
class Mismatch:
    """A served token that the plain run would not have chosen. offset: in the answer. margin: in logits."""

    index: int
    offset: int
    served: int
    plain: int
    margin: float


@dataclass(frozen=True)
class Verification:
    """ties: other choices within TIE_MARGIN of the best logit, allowed. mismatches: wrong tokens."""

    requests: int
    tokens: int
    sequences_scored: int
    tokens_scored: int
    ties: tuple[Mismatch, ...]
    mismatches: tuple[Mismatch, ...]

    @property
    def passed(self) -> bool:
        return not self.mismatches


def verify(
    score: Callable[[list[int]], np.ndarray],
    served: Sequence[Served],
    on_judged: Callable[[int], None] = lambda answers: None,
) -> Verification:
    """Checks every answer against `score(tokens) -> float32[T, vocab]`, the model without a cache.

    A sequence that is the beginning of another one (a turn and the next) is not scored again: row t of the
    logits depends on tokens 0 to t only. on_judged: told how many answers each scored sequence settled.
    """
    # The last token of an answer is judged, never computed on.
    sequences = [np.concatenate([one.prompt, one.answer])[:-1] for one in served]
    ties: list[Mismatch] = []
    mismatches: list[Mismatch] = []
    groups = group_by_prefix(sequences)
    for longest, members in groups:
        logits = score(sequences[longest].tolist())
        if logits.shape[0] != len(sequences[longest]):
            raise ValueError(f"score gave {logits.shape[0]} rows for {len(sequences[longest])} tokens")
        for member in members:
            first = len(served[member].prompt) - 1
            rows = logits[first : first + len(served[member].answer)]
            close, wrong = judge(served[member].index, served[member].answer, rows)
            ties += close
            mismatches += wrong
        del logits  # tens of megabytes for a long context; free before the next one
        on_judged(len(members))
    return Verification(
        requests=len(served),
        tokens=sum(len(one.answer) for one in served),
        sequences_scored=len(groups),
        tokens_scored=sum(len(sequences[longest]) for longest, _ in groups),
        ties=tuple(sorted(ties, key=_place)),
        mismatches=tuple(sorted(mismatches, key=_place)),
    )


def judge(index: int, answer: np.ndarray, rows: np.ndarray) -> tuple[list[Mismatch], list[Mismatch]]:
    """(ties, mismatches) of one answer against its logit rows, one row for each token."""
    best = rows.argmax(axis=1)
    top = rows.max(axis=1)
    with np.errstate(invalid="ignore"):  # infinity - infinity
        margin = top - rows[np.arange(len(answer)), answer]
    # JSON has neither infinity nor NaN.
    margin = np.where(np.isfinite(margin), margin, np.finfo(np.float32).max)
    # A row with NaN or infinity proves nothing, whatever its argmax is.
    right = (best == answer) & np.isfinite(top)
    ties: list[Mismatch] = []
    wrong: list[Mismatch] = []
    for offset in np.nonzero(~right)[0].tolist():
        found = Mismatch(index, offset, int(answer[offset]), int(best[offset]), float(margin[offset]))
        (ties if found.margin < TIE_MARGIN else wrong).append(found)
    return ties, wrong


def group_by_prefix(sequences: Sequence[np.ndarray]) -> list[tuple[int, list[int]]]:
    """[(index of a sequence, indices of all that are a prefix of it, itself included)]; each index once."""
    # In lexicographic order everything between a sequence and an extension of it begins with that sequence,
    # so going backwards the current group's longest sequence is the only candidate.
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    groups: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(keys)), key=keys.__getitem__, reverse=True):
        if groups and keys[groups[-1][0]].startswith(keys[index]):
            groups[-1][1].append(index)
        else:
            groups.append((index, [index]))
    return groups


def _place(mismatch: Mismatch) -> tuple[int, int]:
    return mismatch.index, mismatch.offset
