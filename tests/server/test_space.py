"""What is deleted, or too old for its project, goes away and takes no room any more."""

import time

import numpy as np
import pytest

from tests.databases import SqliteFile
from tests.server.conftest import loss_frame
from tsemon.wire import Array, Frame
from tsemon_server.store import Store, schema
from tsemon_server.store.ledger.retention import Retention

DAY_S = 86400.0


@pytest.fixture
def api(start, clock):
    return start(clock=clock)


@pytest.fixture
def store(api, clock):
    store = Store(api.database.url, clock)
    yield store
    store.close()


def fill(api, run_id, num_frames, num_layers=3, **where):
    frames = [
        Frame(seq, seq, 1000.0 + seq, {"loss": float(seq)}, {"token_similarity": Array.of([0.5] * num_layers)})
        for seq in range(num_frames)
    ]
    for start in range(0, num_frames, 200):
        api.send_ok(run_id, frames[start : start + 200], **where)


def rows_of(api, run_id):
    """How many rows of each table are of the run."""
    tables = [table for table in schema.metadata.sorted_tables if "run_id" in table.c]
    counts = {
        table.name: api.database.execute(f"SELECT count(*) FROM {table.name} WHERE run_id = :run_id", run_id=run_id)[0][
            0
        ]
        for table in tables
    }
    return {table: count for table, count in counts.items() if count}


def keep(store, project="default", **ages):
    with store.write() as writer:
        writer.retention.keep(Retention(project, **ages))
    store.expire()


def stop_after(number):
    """An `is_stopped` that lets so many pieces of work through."""
    left = iter(range(number))
    return lambda: next(left, None) is None


class TestADeletedRun:
    def test_is_gone_at_once_with_all_but_its_frames(self, api, store):
        run_id = api.register()
        fill(api, run_id, 700)
        store.settle()
        api.http.delete(f"/api/v1/runs/{run_id}")
        assert api.get(f"/runs/{run_id}")[:2] == (404, "unknown_run")
        assert {*rows_of(api, run_id)} == {"frame", "segment", "chunk", "settled", "layout", "tally", "tombstone"}

    def test_leaves_nothing_behind(self, api, store):
        run_id, kept = api.register("a"), api.register("b")
        for run in (run_id, kept):
            fill(api, run, 700)
        store.settle()
        before = rows_of(api, kept)
        api.http.delete(f"/api/v1/runs/{run_id}")
        store.purge()
        assert rows_of(api, run_id) == {}
        assert rows_of(api, kept) == before
        assert len(api.losses(kept)) == 700

    def test_goes_on_going_where_it_was_interrupted(self, api, store):
        run_id = api.register()
        fill(api, run_id, 1200)
        api.http.delete(f"/api/v1/runs/{run_id}")
        counts = []
        for _ in range(3):
            counts.append(rows_of(api, run_id).get("frame", 0))
            store.purge(stop_after(2))
        assert counts == [1200, 200, 0]
        store.purge()
        assert rows_of(api, run_id) == {}


class TestRetention:
    @pytest.fixture
    def run_id(self, api, store, clock):
        """2,000 steps whose loss is 1 but for one step; the first 1,536 are settled."""
        run_id = api.register()
        frames = [loss_frame(step, 9.0 if step == 777 else 1.0) for step in range(2000)]
        for start in range(0, 2000, 200):
            api.send_ok(run_id, frames[start : start + 200])
        store.settle()
        clock.now += 10 * DAY_S
        api.http.post(f"/api/v1/runs/{run_id}/heartbeat", json={"writer": "w", "attempt": 1, "step": 1999})
        return run_id

    def samples(self, store, run_id):
        with store.read() as reader:
            return len(reader.frames.metric(run_id, "scalars", "loss").samples().steps)

    def test_keeps_everything_unless_told_otherwise(self, store, run_id):
        store.expire()
        assert self.samples(store, run_id) == 2000

    def test_deletes_runs_that_were_not_heard_of_for_too_long(self, api, store, clock, run_id):
        ended = api.register("ended")
        api.http.patch(f"/api/v1/runs/{ended}", json={"state": "finished"})
        clock.now += 2 * DAY_S
        api.http.post(f"/api/v1/runs/{run_id}/heartbeat", json={"writer": "w", "attempt": 1, "step": 1999})
        keep(store, runs_s=DAY_S)
        assert [run["run_id"] for run in api.get("/runs")["runs"]] == [run_id]
        assert self.samples(store, run_id) == 2000
        store.purge()
        assert rows_of(api, ended) == {}

    def test_gives_a_running_training_time_to_come_back_to_a_service_that_was_away(self, api, clock, run_id):
        clock.now += 10 * DAY_S
        store = Store(api.database.url, clock)
        keep(store, runs_s=2 * DAY_S)
        assert [run["run_id"] for run in api.get("/runs")["runs"]] == [run_id]
        clock.now += 1.1 * DAY_S
        keep(store, runs_s=2 * DAY_S)
        assert api.get("/runs")["runs"] == []
        store.close()


def random_frames(num_frames):
    """300 values each, which no packing makes much smaller."""
    random = np.random.default_rng(0)
    for seq in range(num_frames):
        yield Frame(seq, seq, 0.0, {}, {"token_similarity": Array.of(random.random(300).tolist())})


NUM_BYTES = 700 * 300 * 4


class TestTheFileOfSqlite:
    @pytest.fixture
    def database(self, tmp_path):
        return SqliteFile(tmp_path / "tsemon.db")

    @pytest.fixture
    def run_id(self, api, store):
        run_id = api.register(num_blocks=299)
        api.send_ok(run_id, [*random_frames(700)])
        store.settle()
        return run_id

    def size_bytes(self, store, database):
        store._database.checkpoint()
        return database.path.stat().st_size

    def test_becomes_shorter_when_a_run_is_deleted(self, api, store, database, run_id):
        fill(api, api.register("kept"), 100)
        before = self.size_bytes(store, database)
        api.http.delete(f"/api/v1/runs/{run_id}")
        store.purge()
        assert self.size_bytes(store, database) < before - NUM_BYTES

    def test_becomes_shorter_when_samples_are_dropped(self, store, clock, database, run_id):
        keep(store, samples_s=DAY_S)  # too young, but what is free already goes
        store._shrink(lambda: False)
        before = self.size_bytes(store, database)
        clock.now += 2 * DAY_S
        keep(store, samples_s=DAY_S)
        # 512 of 700 frames have settled; float32 of 24 random bits packs to about 0.9 of its size
        assert self.size_bytes(store, database) < before - 0.8 * NUM_BYTES * 512 / 700


class TestTheTablesOfPostgresql:
    @pytest.fixture
    def database(self, postgresql_server):
        database = postgresql_server.new_database()
        yield database
        postgresql_server.drop(database)

    def test_become_shorter_when_a_run_is_deleted_and_they_are_vacuumed(self, api, store, database):
        def size_bytes():
            return database.execute("SELECT pg_total_relation_size('chunk') + pg_total_relation_size('frame')")[0][0]

        run_id = api.register(num_blocks=299)
        api.send_ok(run_id, [*random_frames(700)])
        store.settle()
        before = size_bytes()
        assert before > NUM_BYTES
        api.http.delete(f"/api/v1/runs/{run_id}")
        store.purge()
        store.vacuum()
        assert size_bytes() < before / 4


class TestHousekeeping:
    def test_removes_and_reduces_by_itself(self, start, clock):
        api = start(clock=clock, housekeeping_pause_s=0.01)
        run_id = api.register()
        fill(api, run_id, 700)
        api.http.delete(f"/api/v1/runs/{run_id}")
        deadline = time.monotonic() + 60
        while rows_of(api, run_id):
            assert time.monotonic() < deadline
            time.sleep(0.02)
