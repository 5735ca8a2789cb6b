"""Every form of an op is held to the same tests."""

import pytest


@pytest.fixture(params=["reference", "xla"], scope="module")
def form(request) -> str:
    """Implementations of KDA that run on any platform."""
    return request.param
