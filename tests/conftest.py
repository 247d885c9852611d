import gc
import signal

import httpx
import hypothesis
import pytest
import torch

from tests import zoo
from tests.databases import ENGINES, PostgresServer, SqliteFile, share_compiled_statements


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="run the thorough tests too: both databases for all, every set-up, long faults and searches (make test-all)",
    )
    parser.addoption(
        "--fuzz-seconds",
        type=int,
        help="seconds that tests/fuzz searches the REST interface, with new cases each time; other searches scale with it",
    )


def pytest_configure(config):
    # A shell that starts `make test` in the background makes it ignore SIGINT, and a process inherits that: the tests of
    # Ctrl-C would wait forever. A child of a process with a handler gets the default.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # On a machine that others use, too, any answer and any example may take long.
    for limit in ("connect", "read", "write", "pool"):
        setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, limit, 60)
    hypothesis.settings.register_profile("busy", deadline=None)
    hypothesis.settings.load_profile("busy")
    share_compiled_statements()


def is_thorough(item):
    """Whether only `make test-all` runs it: it is marked so, or on PostgreSQL and not marked to run on both databases."""
    engine = getattr(item, "callspec", None) and item.callspec.params.get("engine")
    return item.get_closest_marker("thorough") is not None or (
        engine == "postgresql" and item.get_closest_marker("both_engines") is None
    )


LONG = (
    "tests/test_end_to_end.py",
    "tests/faults",
    "tests/test_benchmarks.py",
    "tests/test_stack.py",
    "tests/test_compose.py",
    "tests/fuzz",
    "tests/tsemon/lab/reproduce/test_command.py",
)
"""What takes longest. A file goes to one process: the others would wait for one of these at the end."""


def pytest_collection_modifyitems(config, items):
    if not config.option.all and (thorough := [item for item in items if is_thorough(item)]):
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if not is_thorough(item)]
    # They wait more than they compute, so they are spread over the first half: there is always something to do beside them.
    files = {True: [], False: []}
    for file in dict.fromkeys(item.path for item in items):
        is_long = file.relative_to(config.rootpath).as_posix().startswith(LONG)
        files[is_long].append(file)
    apart = max(1, len(files[False]) // (2 * len(files[True]) or 1))
    places = {file: (place, 1) for place, file in enumerate(files[False])}
    places |= {file: (place * apart, 0) for place, file in enumerate(files[True])}
    items.sort(key=lambda item: places[item.path])


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
def engine(request):
    """Each engine in turn in `make test-all`, and of tests that are marked `both_engines`; SQLite of all others."""
    return request.param


@pytest.fixture
def database(engine, request, tmp_path):
    """A database with today's tables, all empty."""
    if engine == "sqlite":
        file = SqliteFile(tmp_path / "tsemon.db")
        file.migrate()
        return file
    return request.getfixturevalue("postgresql")


@pytest.fixture
def empty_database(engine, request, tmp_path):
    """A database without any table."""
    if engine == "sqlite":
        yield SqliteFile(tmp_path / "tsemon.db")
        return
    server = request.getfixturevalue("postgresql_server")
    database = server.new_database()
    yield database
    server.drop(database)
