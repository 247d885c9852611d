import pytest
import torch

from tests import zoo
from tests.databases import ENGINES, PostgresServer, SqliteFile


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """All models here are tiny: a second thread costs more than it brings."""
    torch.set_num_threads(1)


@pytest.fixture(params=zoo.MODELS, ids=lambda make: make.__name__)
def any_model(request):
    """A model and a function that runs it on an input."""
    torch.manual_seed(0)
    return request.param()


@pytest.fixture(scope="session")
def postgresql_server():
    if not PostgresServer.is_installed():
        pytest.skip("PostgreSQL is not installed; scripts/system_parts.py does it where it can")
    server = PostgresServer()
    try:
        server.create()
        yield server
    finally:
        server.remove()


@pytest.fixture
def postgresql(postgresql_server):
    """A database with today's tables, which the test may stop or kill with its server."""
    with postgresql_server.borrowed() as database:
        yield database


@pytest.fixture(params=ENGINES)
def database(request, tmp_path):
    """A database of each engine in turn."""
    if request.param == "sqlite":
        return SqliteFile(tmp_path / "tsemon.db")
    return request.getfixturevalue("postgresql")


@pytest.fixture(params=ENGINES)
def empty_database(request, tmp_path):
    """A database of each engine in turn, without any table."""
    if request.param == "sqlite":
        yield SqliteFile(tmp_path / "tsemon.db")
        return
    server = request.getfixturevalue("postgresql_server")
    database = server.new_database()
    yield database
    server.drop(database)


def pytest_collection_modifyitems(items):
    """Where tests run in several processes, those of a file stay together, and those of the set-ups, for their table."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder == "setups" else str(item.path)))
