"""Clocks that are set back."""

import pytest
from starlette.testclient import TestClient

from tests.faults.counting import stored_frames
from tests.faults.processes import REGISTRATION, known_frame
from tsemon.wire import frames_to_body
from tsemon_server.main import create_app
from tsemon_server.settings import Settings
from tsemon_server.store import Store

DAY_S = 86_400


class Clock:
    now = 1_800_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def send(database, clock):
    """Sends frames to a service whose clock is `clock`."""
    app = create_app(Settings(database=database.url), clock=clock)
    with TestClient(app, base_url="http://127.0.0.1") as http:
        run_id = http.post("/api/v1/runs", json=REGISTRATION).json()["run_id"]

        def send(seqs, time=1732100000.0):
            frames = [known_frame("rank0", seq, time).to_json() for seq in seqs]
            http.post(f"/api/v1/runs/{run_id}/frames", content=frames_to_body("rank0", 1, frames)).raise_for_status()
            return http.get(f"/api/v1/runs/{run_id}").json()

        yield send


class TestAServiceWhoseClockIsSetBack:
    def test_stores_frames_once_and_in_order(self, send, database, clock):
        for start in range(0, 100, 10):
            clock.now -= DAY_S
            send(range(max(0, start - 5), start))  # sent once more
            run = send(range(start, start + 10))
            assert (run["num_frames"], run["latest"]["step"]) == (start + 10, start + 9)
        assert stored_frames(database.url, "rank0") == list(range(100))

    def test_goes_on_with_its_housekeeping(self, send, database, clock):
        """Another process took the work, was killed, and its lease seems to last another day."""
        send(range(600))
        store = Store(database.url, clock)
        try:
            clock.now += DAY_S
            assert store.hold_lease("housekeeping", "killed", seconds=60)
            clock.now -= DAY_S
            assert store.hold_lease("housekeeping", "heir", seconds=60)
            assert store.settle() == 1
        finally:
            store.close()
        assert send(range(600))["num_frames"] == 600
        assert stored_frames(database.url, "rank0") == list(range(600))


class TestAWriterWhoseClockIsSetBack:
    def test_is_believed(self, send, database):
        times = [send([seq], time=1732100000.0 - DAY_S * seq)["latest"]["time"] for seq in range(10)]
        assert times == [1732100000.0 - DAY_S * seq for seq in range(10)]
        assert stored_frames(database.url, "rank0") == list(range(10))
