import shutil

import pytest

pytest.register_assert_rewrite("tests.setups.contract", "tests.setups.harness", "tests.setups.matrix")

from tests.setups.every import ROWS  # noqa: E402
from tests.setups.matrix import Matrix  # noqa: E402


def pytest_generate_tests(metafunc):
    """Each of the file's SETUPS in turn."""
    if "setup" in metafunc.fixturenames:
        metafunc.parametrize("setup", [as_parameter(setup) for setup in metafunc.module.SETUPS], ids=str)


def as_parameter(setup):
    """Tried in `make test-all` only where it is a variation of another, and nowhere where its program is missing."""
    program = setup.needs_program
    absent = bool(program) and shutil.which(program) is None
    marks = [pytest.mark.skipif(absent, reason=f"{setup} needs {program}")]
    return pytest.param(setup, marks=[*marks, *[pytest.mark.thorough] * bool(setup.like)])


@pytest.fixture(scope="session")
def matrix(pytestconfig):
    """What the tests see, held against docs/compatibility.md, and kept for scripts/compatibility.py, which writes it."""
    matrix = Matrix()
    yield matrix
    if (cache := getattr(pytestconfig, "cache", None)) is not None:
        matrix.keep(cache, ROWS)
