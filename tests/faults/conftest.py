import contextlib

import pytest

from tests.faults.processes import Service, Trainer


@pytest.fixture
def serve(database, tmp_path):
    """Starts a service on the database, or on `url`. Nothing that happens to it is a surprise to it."""
    with contextlib.ExitStack() as running:

        def serve(url=database.url, **options):
            return running.enter_context(Service(url, tmp_path / "service.log", **options))

        yield serve
    assert "Traceback" not in (tmp_path / "service.log").read_text()


@pytest.fixture
def service(serve):
    return serve()


@pytest.fixture
def train(tmp_path):
    """Starts a trainer that sends to `url`."""
    started = []

    def train(url, *arguments, **options):
        started.append(Trainer(tmp_path / "spool", url, *arguments, **options))
        return started[-1]

    yield train
    for trainer in started:
        trainer.kill()
