"""The table that several folders of tests fill."""

import pytest

from tests.setups.every import ROWS
from tests.setups.matrix import Matrix


@pytest.fixture(scope="session")
def matrix(pytestconfig):
    """What the tests see, held against docs/compatibility.md, and kept for scripts/compatibility.py, which writes it."""
    matrix = Matrix()
    yield matrix
    if (cache := getattr(pytestconfig, "cache", None)) is not None:
        matrix.keep(cache, ROWS)
