import gc

import pytest
import torch

from tests import zoo
from tests.databases import ENGINES, PostgresServer, SqliteFile, share_compiled_statements
from tests.fuzz.searching import USUAL_S


def pytest_addoption(parser):
    parser.addoption(
        "--fuzz-seconds",
        type=int,
        default=USUAL_S,
        help="how long tests/fuzz looks for trouble in the REST interface; elsewhere it looks so many times longer, too",
    )


LONG = (
    "tests/test_end_to_end.py",
    "tests/faults",
    "tests/test_benchmarks.py",
    "tests/test_stack.py",
    "tests/test_compose.py",
    "tests/fuzz",
    "tests/tsemon/reproduce/test_command.py",
)
"""What takes minutes goes first: a file goes to one process, and the others would wait for it at the end."""


share_compiled_statements()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish():
    """What is imported and collected stays: to look through it for garbage, again and again, is a fifth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_unconfigure(config):
    """Where only the end of a log is kept, it says what failed."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    for outcome in ("failed", "error"):
        for report in reporter.stats.get(outcome, ()) if reporter else ():
            reporter.write_line(f"{outcome}: {report.nodeid}")


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
    """A database of each engine in turn, with today's tables, all empty."""
    if request.param == "sqlite":
        file = SqliteFile(tmp_path / "tsemon.db")
        file.migrate()
        return file
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
