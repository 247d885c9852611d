import shutil

import pytest

pytest.register_assert_rewrite("tests.setups.contract", "tests.setups.harness", "tests.setups.matrix")

from tests.setups.table import matrix  # noqa: E402

__all__ = ["matrix"]


def pytest_generate_tests(metafunc):
    """Each of the file's SETUPS in turn; of a test that is marked `once_per_kind`, the others in `make test-all` only."""
    if "setup" not in metafunc.fixturenames:
        return
    setups = metafunc.module.SETUPS
    is_once = any(mark.name == "once_per_kind" for mark in metafunc.definition.iter_markers())
    first = next(setup for setup in setups if not setup.like)
    marked = [as_parameter(setup, is_thorough=is_once and setup is not first) for setup in setups]
    metafunc.parametrize("setup", marked, ids=str)


def as_parameter(setup, *, is_thorough):
    """Tried in `make test-all` only where it is a variation of another, and nowhere where its program is missing."""
    program = setup.needs_program
    absent = bool(program) and shutil.which(program) is None
    marks = [pytest.mark.skipif(absent, reason=f"{setup} needs {program}")]
    return pytest.param(setup, marks=[*marks, *[pytest.mark.thorough] * (is_thorough or bool(setup.like))])
