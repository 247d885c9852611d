import contextlib

import pytest

from tests.faults.processes import Service, Trainer


@pytest.fixture(params=["sqlite"])
def database(request, tmp_path):
    """The URL of an empty database, on either engine."""
    return f"sqlite:///{tmp_path}/tsemon.db"


@pytest.fixture
def serve(tmp_path):
    """Starts a service on a database. Whatever happens to it, it does not fail in a way that it did not expect."""
    with contextlib.ExitStack() as running:

        def serve(database):
            return running.enter_context(Service(database, tmp_path / "service.log"))

        yield serve
    assert "Traceback" not in (tmp_path / "service.log").read_text()


@pytest.fixture
def service(serve, database):
    return serve(database)


@pytest.fixture
def train(tmp_path, service):
    """Starts a trainer that sends to the service, or to `url`."""
    started = []

    def train(*arguments, url=service.url, **options):
        started.append(Trainer(tmp_path / "spool", url, *arguments, **options))
        return started[-1]

    yield train
    for trainer in started:
        trainer.kill()
