import pytest

from scripts import compatibility
from tests.setups.every import ROWS
from tests.setups.matrix import Matrix


@pytest.fixture(scope="session")
def matrix(pytestconfig):
    """What the tests see, for docs/compatibility.md: kept in pytest's cache, where scripts/compatibility.py reads it."""
    matrix = Matrix()
    yield matrix
    if (cache := getattr(pytestconfig, "cache", None)) is not None:
        kept = {row["name"]: row["cells"] for row in cache.get(compatibility.CACHE_KEY, [])}
        cells = {row.name: matrix.cells(row) or kept.get(row.name, []) for row in ROWS}
        rows = [{"kind": row.kind, "name": row.name, "cells": cells[row.name]} for row in ROWS]
        cache.set(compatibility.CACHE_KEY, rows)
