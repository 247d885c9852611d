"""What the service does by itself, beside the requests."""

import threading
import time
from contextlib import closing

import pytest

from tests.server.conftest import Api, loss_frame
from tsemon.errors import StoreError
from tsemon_server.housekeeping import Housekeeping
from tsemon_server.rounds import LEASE_S
from tsemon_server.store import Store


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def await_that(condition, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def store(api):
    api.database.execute("DELETE FROM lease")  # the service has it
    store = Store(api.database.url)
    yield store
    store.close()


def fill(api, num_frames=600):
    run_id = api.register()
    api.send_ok(run_id, [loss_frame(step) for step in range(num_frames)])
    return run_id


class CountedStore:
    """A store of which is known how often it was asked to settle."""

    def __init__(self, store, settle=None):
        self._store, self._settle = store, settle
        self.num_rounds = self.num_ended = self.num_segments = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def settle(self, is_stopped):
        self.num_rounds += 1
        if self._settle is not None:
            self._settle()
        self.num_segments += self._store.settle(is_stopped)
        self.num_ended += 1


class TestHousekeeping:
    def test_settles_frames_while_the_service_runs(self, api, store):
        fill(api)
        counted = CountedStore(store)
        housekeeping = Housekeeping(counted, pause_s=0.01)
        housekeeping.start()
        await_that(lambda: counted.num_segments == 1)
        housekeeping.stop()

    def test_is_done_by_one_process_at_a_time(self, api, store):
        first, second = CountedStore(store), CountedStore(store)
        one, other = Housekeeping(first, pause_s=0.01), Housekeeping(second, pause_s=0.01)
        one.start()
        await_that(lambda: first.num_rounds > 0)
        other.start()
        before = first.num_rounds
        await_that(lambda: first.num_rounds > before + 20)
        assert second.num_rounds == 0
        one.stop()
        await_that(lambda: second.num_rounds > 0)  # it was handed over
        other.stop()

    def test_goes_on_after_a_failure(self, api, store, caplog):
        failures = [StoreError("the disk is full"), ZeroDivisionError()]

        def fail():
            if failures:
                raise failures.pop(0)

        counted = CountedStore(store, fail)
        housekeeping = Housekeeping(counted, pause_s=0.01)
        housekeeping.start()
        await_that(lambda: counted.num_rounds == 4)
        housekeeping.stop()
        assert "housekeeping waits: the disk is full" in caplog.text
        assert "housekeeping failed" in caplog.text

    def test_ends_between_two_pieces_of_work(self, api, store):
        fill(api, 2000)
        begun, may_go_on = threading.Event(), threading.Event()

        def wait():
            begun.set()
            may_go_on.wait()

        counted = CountedStore(store, wait)
        housekeeping = Housekeeping(counted, pause_s=0.01)
        housekeeping.start()
        begun.wait()
        stopping = threading.Thread(target=housekeeping.stop)
        stopping.start()
        await_that(housekeeping._stopped.is_set)
        may_go_on.set()
        stopping.join()
        assert counted.num_segments == 0

    def test_ends_when_it_wakes_up_and_another_has_the_work(self, api, store):
        fill(api, 2000)
        slept, woken = threading.Event(), threading.Event()

        def sleep():
            slept.set()
            woken.wait()

        sleeper = CountedStore(store, sleep)
        housekeeping = Housekeeping(sleeper, pause_s=0.01, lease_s=1.0)
        housekeeping.start()
        slept.wait()
        await_that(lambda: store.hold_lease("housekeeping", "another", 2.0))
        woken.set()
        await_that(lambda: sleeper.num_ended > 0)
        housekeeping.stop()
        assert sleeper.num_segments == 0

    def test_of_one_kind_goes_on_where_another_fails(self, api, store):
        api.http.delete(f"/api/v1/runs/{fill(api)}")

        def fail():
            raise ZeroDivisionError

        housekeeping = Housekeeping(CountedStore(store, fail), pause_s=0.01)
        housekeeping.start()
        await_that(lambda: not api.database.execute("SELECT run_id FROM tombstone"))
        housekeeping.stop()

    def test_notes_when_all_was_settled_and_not_where_it_was_not(self, api, store):
        def settled_at():
            return api.database.execute("SELECT until FROM lease WHERE work = 'settled'")

        def fail():
            raise ZeroDivisionError

        counted = CountedStore(store, fail)
        housekeeping = Housekeeping(counted, pause_s=0.01)
        housekeeping.start()
        await_that(lambda: counted.num_rounds > 2)
        housekeeping.stop()
        assert settled_at() == []
        before = time.time()
        housekeeping = Housekeeping(store, pause_s=0.01)
        housekeeping.start()
        await_that(settled_at)
        housekeeping.stop()
        assert before <= settled_at()[0][0] <= time.time()

    @pytest.fixture
    def at_work(self, database):
        """A service that does what no request asks for, too."""
        with closing(Api(database, housekeeping_pause_s=3600.0)) as api:
            yield api

    def test_has_its_lease_before_the_service_answers(self, at_work):
        assert "housekeeping" in [work for (work,) in at_work.database.execute("SELECT work FROM lease")]

    def test_is_part_of_the_service(self, at_work):
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("tsemon-housekeeping") == 1


class TestALease:
    @pytest.fixture
    def clock(self):
        return Clock()

    @pytest.fixture
    def store(self, api, clock):
        store = Store(api.database.url, clock)
        yield store
        store.close()

    def test_is_for_one(self, store):
        assert store.hold_lease("work", "a", LEASE_S)
        assert not store.hold_lease("work", "b", LEASE_S)
        assert store.hold_lease("other work", "b", LEASE_S)

    def test_can_be_kept(self, store, clock):
        for _ in range(3):
            assert store.hold_lease("work", "a", 60)
            clock.now += 50
        assert not store.hold_lease("work", "b", 60)

    def test_runs_out(self, store, clock):
        assert store.hold_lease("work", "a", 60)
        clock.now += 61
        assert store.hold_lease("work", "b", 60)
        assert not store.hold_lease("work", "a", 60)

    def test_can_be_given_back(self, store):
        assert store.hold_lease("work", "a", 60)
        store.drop_lease("work", "b")
        assert not store.hold_lease("work", "b", 60)
        store.drop_lease("work", "a")
        assert store.hold_lease("work", "b", 60)

    def test_does_not_outlast_a_clock_that_is_set_back(self, store, clock):
        assert store.hold_lease("work", "a", 60)
        clock.now -= 86400
        assert store.hold_lease("work", "b", 60)
