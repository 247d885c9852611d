import importlib.util
import sys
import tempfile
from types import SimpleNamespace

import pytest

pytest.register_assert_rewrite("tests.zoo.contract")

from tests.setups.table import matrix  # noqa: E402
from tests.zoo.contract import judge  # noqa: E402
from tests.zoo.looking import seen_by_hooks, seen_by_tsemon  # noqa: E402
from tsemon.errors import NoBlocksFound  # noqa: E402

__all__ = ["judge", "matrix"]


def pytest_generate_tests(metafunc):
    """Run each of the file's SPECIMENS, in `make test` only the representative ones."""
    if "trained" in metafunc.fixturenames:
        specimens = [as_parameter(specimen) for specimen in metafunc.module.SPECIMENS]
        metafunc.parametrize("trained", specimens, ids=str, indirect=True, scope="module")


def as_parameter(specimen):
    absent = bool(specimen.package) and importlib.util.find_spec(specimen.package) is None
    marks = [pytest.mark.skipif(absent, reason=f"{specimen} needs {specimen.package}")]
    return pytest.param(specimen, marks=[*marks, *[pytest.mark.thorough] * (not specimen.is_representative)])


@pytest.fixture(scope="module")
def trained(request):
    """A specimen after training: the expected values from the test's own hooks, and what tsemon reported."""
    specimen = request.param
    if (compiling := sys.modules.get("torch._dynamo.utils")) is not None:
        compiling.counters.clear()  # as in a process that has compiled nothing: reasons say whether it has
    subject, left, expected = seen_by_hooks(specimen)
    found = SimpleNamespace(specimen=specimen, subject=subject, left=left, expected=expected, traces=[])
    try:
        with tempfile.TemporaryDirectory() as folder:
            found.left_by_tsemon, found.frames, found.status, found.traces = seen_by_tsemon(specimen, folder)
        found.has_blocks = True
    except NoBlocksFound:
        found.has_blocks = False
    return found
