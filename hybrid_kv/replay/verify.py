"""Proves answers right: each must be what the model says without any cache.

The plain run is teacher-forced: prompt + answer is scored in one go, and every answer token has to be the
most likely one after what precedes it. By induction that is the greedy run without a cache, token for token.

Two orders of adding the same fp32 numbers differ in the last bits. That can turn a choice between near equals
in two places: the token itself, and the experts of a token, whose change then shows in the logits of that
token and of some that follow it. Both are counted apart from wrong tokens and printed with their margins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_kv.replay.contract import ScoresLike
from hybrid_kv.replay.run import Served

# Logits closer than this are a tie between two orders of adding the same numbers in float32.
TIE_MARGIN = 1e-4
# Router scores closer than this are a tie between experts: the difference of two fp32 runs of the tiny model was
# measured at up to 1e-6 in router scores.
EXPERT_TIE_MARGIN = 5e-6
# Tokens after an expert tie in which its effect on the recurrent state is taken for the cause of a difference.
EXPERT_TIE_REACH = 64


@dataclass(frozen=True)
class Mismatch:
    """A served token that the plain run would not have chosen. offset: in the answer. margin: in logits.

    expert_margin: smallest router-score margin of the tokens up to EXPERT_TIE_REACH before it.
    """

    index: int
    offset: int
    served: int
    plain: int
    margin: float
    expert_margin: float


@dataclass(frozen=True)
class Verification:
    """ties: other choices within TIE_MARGIN of the best logit, the only differences allowed. expert_ties: those
    right after a tie between experts, told apart because the cause is known. mismatches: all others.
    """

    requests: int
    tokens: int
    sequences_scored: int
    tokens_scored: int
    ties: tuple[Mismatch, ...]
    expert_ties: tuple[Mismatch, ...]
    mismatches: tuple[Mismatch, ...]

    @property
    def passed(self) -> bool:
        return not (self.mismatches or self.expert_ties)


def verify(
    score: Callable[[list[int]], ScoresLike],
    served: Sequence[Served],
    on_judged: Callable[[int], None] = lambda answers: None,
) -> Verification:
    """Checks every answer against `score(tokens)`, logits and expert margins of the model without a cache.

    A sequence that is the beginning of another one (a turn and the next) is not scored again: row t of the
    logits depends on tokens 0 to t only. on_judged: told how many answers each scored sequence settled.
    """
    # The last token of an answer is judged, never computed on.
    sequences = [np.concatenate([one.prompt, one.answer])[:-1] for one in served]
    ties: list[Mismatch] = []
    expert_ties: list[Mismatch] = []
    mismatches: list[Mismatch] = []
    groups = group_by_prefix(sequences)
    for longest, members in groups:
        logits, margins = score(sequences[longest].tolist())
        if logits.shape[0] != len(sequences[longest]):
            raise ValueError(f"score gave {logits.shape[0]} rows for {len(sequences[longest])} tokens")
        for member in members:
            first = len(served[member].prompt) - 1
            rows = slice(first, first + len(served[member].answer))
            close, expert, wrong = judge(
                served[member].index, served[member].answer, logits[rows], recent_minimum(margins)[rows]
            )
            ties += close
            expert_ties += expert
            mismatches += wrong
        del logits  # tens of megabytes for a long context; free before the next one
        on_judged(len(members))
    return Verification(
        requests=len(served),
        tokens=sum(len(one.answer) for one in served),
        sequences_scored=len(groups),
        tokens_scored=sum(len(sequences[longest]) for longest, _ in groups),
        ties=tuple(sorted(ties, key=_place)),
        expert_ties=tuple(sorted(expert_ties, key=_place)),
        mismatches=tuple(sorted(mismatches, key=_place)),
    )


def recent_minimum(margins: np.ndarray) -> np.ndarray:
    """Smallest margin of every token and the EXPERT_TIE_REACH before it."""
    padded = np.concatenate([np.full(EXPERT_TIE_REACH, np.inf, margins.dtype), margins])
    return np.lib.stride_tricks.sliding_window_view(padded, EXPERT_TIE_REACH + 1).min(axis=1)


def judge(
    index: int, answer: np.ndarray, rows: np.ndarray, expert_margins: np.ndarray
) -> tuple[list[Mismatch], list[Mismatch], list[Mismatch]]:
    """(ties, expert ties, mismatches) of one answer against its logit rows and recent expert margins."""
    best = rows.argmax(axis=1)
    top = rows.max(axis=1)
    with np.errstate(invalid="ignore"):  # infinity - infinity
        margin = top - rows[np.arange(len(answer)), answer]
    # JSON has neither infinity nor NaN.
    margin = np.where(np.isfinite(margin), margin, np.finfo(np.float32).max)
    # A row with NaN or infinity proves nothing, whatever its argmax is.
    right = (best == answer) & np.isfinite(top)
    ties: list[Mismatch] = []
    experts: list[Mismatch] = []
    wrong: list[Mismatch] = []
    for offset in np.nonzero(~right)[0].tolist():
        expert = float(min(expert_margins[offset], np.finfo(np.float32).max))
        found = Mismatch(index, offset, int(answer[offset]), int(best[offset]), float(margin[offset]), expert)
        if found.margin < TIE_MARGIN:
            ties.append(found)
        elif expert < EXPERT_TIE_MARGIN and np.isfinite(top[offset]):
            experts.append(found)
        else:
            wrong.append(found)
    return ties, experts, wrong


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
