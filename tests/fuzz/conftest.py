import pytest

from tests.fuzz.searching import Search


@pytest.fixture
def search(request):
    return Search.of(request.config)


@pytest.fixture
def look(search):
    """Gives a target so many cases, or more where there is more time."""
    return search.run
