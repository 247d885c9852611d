from contextlib import closing

import pytest

from tests.server.store.bench import ENGINES, Bench, opened


@pytest.fixture(params=ENGINES)
def engine(request, tmp_path):
    server = request.getfixturevalue("postgresql_server") if request.param == "postgresql" else None
    with opened(request.param, tmp_path, server) as engine:
        yield engine


class Clock:
    now = 1e9

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def bench(engine, clock):
    with closing(engine.open(clock)) as store:
        yield Bench(engine, store)
