"""Services and databases that do not answer for a while."""

import contextlib
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.databases import PostgresServer
from tests.faults.counting import assert_all_arrived


class TestAServiceThatIsStopped:
    """SIGSTOP: the system takes connections for it, and nobody ever answers on them."""

    def test_gets_everything_once_when_it_goes_on(self, service, train):
        trainers = [train(service.url, f"rank{number}", timeout_s=0.2) for number in range(2)]
        for _ in range(2):
            for trainer in trainers:
                trainer.await_sent(20)
            service.pause()
            for trainer in trainers:
                trainer.await_made(200)  # long enough: some requests are given up meanwhile, and sent again
            service.resume()
        assert_all_arrived(service, {trainer.writer: trainer.finish() for trainer in trainers})


class TestAServiceThatIsStoppedForHalfAMinute:
    @pytest.fixture
    def database(self, sqlite_file):
        return sqlite_file

    @pytest.mark.thorough
    def test_gets_everything_once_though_its_clients_gave_up_twice(self, service, train):
        trainers = [train(service.url, f"rank{number}") for number in range(2)]
        for trainer in trainers:
            trainer.await_sent(20)
        service.pause()
        time.sleep(30)  # a trainer waits 10 s for an answer
        service.resume()
        assert_all_arrived(service, {trainer.writer: trainer.finish() for trainer in trainers})


def stop_at_once(server):
    server.stop(signal.SIGQUIT)


class TestADatabaseThatGoesAway:
    @pytest.fixture
    def database(self, postgresql):
        return postgresql

    @pytest.mark.parametrize("end", [PostgresServer.stop, stop_at_once])
    def test_and_comes_back_has_every_frame_once(self, database, service, train, end):
        trainers = [train(service.url, f"rank{number}") for number in range(2)]
        for trainer in trainers:
            trainer.await_sent(20)
        end(database.server)
        reply = httpx.get(f"{service.url}/readyz")
        assert (reply.status_code, reply.json()["error"]) == (503, "store_unavailable")
        trainers[0].await_made(20)
        database.server.start()
        assert_all_arrived(service, {trainer.writer: trainer.finish() for trainer in trainers})


@contextlib.contextmanager
def locked(database):
    """Another process writes, and does not come to an end."""
    connection = sqlite3.connect(database.path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.rollback()
    connection.close()


class TestADatabaseThatIsLocked:
    @pytest.fixture
    def database(self, sqlite_file):
        return sqlite_file

    def test_for_a_moment_makes_the_service_wait(self, database, service, train):
        trainer = train(service.url)
        for _ in range(2):
            trainer.await_sent(20)
            with locked(database):
                trainer.await_made(100)
        assert_all_arrived(service, {"rank0": trainer.finish()})


class TestADatabaseThatIsLockedForLong(TestADatabaseThatIsLocked):
    """Longer than the service waits for it."""

    @pytest.fixture
    def service(self, database, serve):
        return serve(f"{database.url}?timeout=0.5")

    def test_refuses_frames_and_gets_them_later(self, database, service, train, http):
        trainer = train(service.url)
        trainer.await_sent(20)
        with locked(database):
            before = trainer.told.num_sent
            with pytest.raises(httpx.HTTPStatusError, match="503 Service Unavailable"):
                http.send([0], "witness")
            trainer.await_made(100)
            assert trainer.told.num_sent - before <= 256, "the batch under way at most"
        assert http.send([0], "witness") == (1, 0)
        assert_all_arrived(service, {"rank0": trainer.finish(), "witness": 1})

    def test_is_read_meanwhile_however_many_want_to_write(self, database, service, http):
        """They all get a thread of the service, of which there are 40, and each may wait for another's waiting."""

        http.http.timeout = 25

        def is_refused(seq):
            with pytest.raises(httpx.HTTPStatusError, match="503 Service Unavailable"):
                http.send([seq])

        with locked(database), ThreadPoolExecutor(60) as pool:
            refused = [pool.submit(is_refused, seq) for seq in range(60)]
            for answer in refused:
                answer.result()  # within the client's 25 s, not after 60 times half a second
            assert httpx.get(f"{service.url}/readyz").status_code == 200
        assert http.send([0]) == (1, 0)
