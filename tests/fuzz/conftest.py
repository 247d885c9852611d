import pytest

from tests.fuzz.searching import search


@pytest.fixture
def look(request):
    """Gives a target so many cases, or more where there is more time."""
    seconds = request.config.getoption("--fuzz-seconds")
    return lambda target, cases, num_examples: search(target, cases, num_examples, seconds)
