"""Logits do not depend on the form in which latent attention runs, nor on the exchange between ranks."""

import numpy as np
import pytest

from hybrid_kv.models.execution import PLAIN, Execution
from tests.models.harness import Runner
from tests.models.test_bits_do_not_depend_on_the_cut import loaded, prompts

EXPANDED = Execution(workspace=512)
CASES = [
    ((1, 1), 1, EXPANDED),
    ((2, 2), 1, EXPANDED),
    ((1, 4), 8, Execution(workspace=512, exchange="all_to_all")),
]


def _logits(mesh, interleave, how):
    """A prompt from nothing, rows of many and of few tokens behind a context, and rows that decode, mixed."""
    run = Runner(*loaded(*mesh), rows=4, capacity=512, interleave=interleave, how=how, quick=True)
    found = []
    for length, start in (
        ((120, 0, 200, 7), (0, 0, 0, 0)),  # from nothing
        ((1, 60, 3, 90), (120, 0, 200, 7)),  # one decodes, one begins, few and many behind a context
        ((1, 1, 0, 1), (121, 60, 203, 97)),  # decoding alone, in the step of a prefill
        ((20, 1, 9, 1), (122, 61, 203, 98)),  # few behind a context, those that decode do not come first
    ):
        pieces = [p[s : s + n] for p, s, n in zip(prompts(), start, length, strict=True)]
        count = sum(length)
        found.append(run.run(run.batch(pieces, start, pad_to=384))[:count])
    return np.concatenate(found)


@pytest.mark.parametrize(("mesh", "interleave", "how"), CASES, ids=str)
def test_logits_are_those_of_the_absorbed_form(mesh, interleave, how):
    plain, other = (_logits(mesh, interleave, one) for one in (PLAIN, how))
    np.testing.assert_allclose(other, plain, atol=2e-4, rtol=2e-4)
    assert np.mean(other.argmax(1) == plain.argmax(1)) > 0.99
