"""The series keeps frames of which the ledger was not told, and the next frame tells it."""

import pytest

from tests.server.conftest import loss_frame
from tests.server.test_alerts import HIGH_LOSS
from tsemon_server.store.engine import Unit
from tsemon_server.store.streams import Stream


@pytest.fixture
def api(start):
    return start(rules=HIGH_LOSS)


def store_without_a_word(api, run_id, frames, attempt=1, writer="w"):
    """What an engine of its own does before the process ends: it commits the frames, and the ledger nothing."""
    store = api.app.state.store
    with store._database.writing() as connection:
        store._series.add(Unit(connection), Stream(run_id, attempt, writer), frames)


def told(api, run_id):
    """All that the ledger says of a run and its alerts, but for names and times of day."""
    run = api.get(f"/runs/{run_id}")
    alerts = api.get("/alerts", run=run_id)["alerts"]
    of_run = {name: run[name] for name in ("num_frames", "last_step", "loss", "latest", "process_step", "open_alerts")}
    of_alert = ("rule", "state", "pending_step", "firing_step", "resolved_step", "evidence")
    return of_run, [{name: alert[name] for name in of_alert} for alert in alerts]


def losses(first, *values):
    return [loss_frame(first + index, value) for index, value in enumerate(values)]


CALM = losses(0, *[1.0] * 40)
LOST = losses(40, 20.0, 20.0, 20.0, 30.0)
STORIES = {
    "the next frame": losses(44, 25.0),
    "the next frame, which is calm": losses(44, 1.0, 1.0, 1.0, 1.0),
    "the same frames again": LOST,
    "one of the same frames again": LOST[1:2],
    "the same frames and more": [*LOST, *losses(44, 2.0)],
    "a frame from before": [loss_frame(39, 7.0, seq=99)],
}


class TestASummary:
    @pytest.mark.parametrize("after", STORIES.values(), ids=STORIES)
    def test_that_missed_frames_is_repaired_by_whatever_comes_next(self, api, after):
        missed, whole = api.register("missed"), api.register("whole")
        for run_id in (missed, whole):
            api.send_ok(run_id, CALM)
        store_without_a_word(api, missed, LOST)
        assert told(api, missed)[0]["num_frames"] == 40
        api.send_ok(whole, LOST)
        for run_id in (missed, whole):
            api.send_ok(run_id, after)
        assert told(api, missed) == told(api, whole)
        assert told(api, missed)[1][0]["firing_step"] == 42

    def test_that_was_repaired_stays_as_it_is(self, api):
        run_id = api.register()
        api.send_ok(run_id, CALM)
        store_without_a_word(api, run_id, LOST)
        api.send_ok(run_id, LOST)
        before = told(api, run_id)
        for _ in range(2):
            assert api.send_ok(run_id, LOST)["duplicates"] == 4
        assert told(api, run_id) == before

    def test_is_repaired_by_another_writer(self, api):
        run_id = api.register()
        store_without_a_word(api, run_id, LOST, writer="gone")
        api.send_ok(run_id, losses(0, 1.0))
        (run, alerts) = told(api, run_id)
        assert (run["num_frames"], run["last_step"], run["latest"]["scalars"]) == (5, 43, {"loss": 30.0})
        assert [alert["firing_step"] for alert in alerts] == [42]

    def test_that_missed_the_first_frames_of_all_is_repaired(self, api):
        run_id = api.register()
        store_without_a_word(api, run_id, CALM)
        assert told(api, run_id)[0]["latest"] is None
        api.send_ok(run_id, CALM[-1:])
        assert told(api, run_id)[0] | {"open_alerts": 0} == {
            "num_frames": 40,
            "last_step": 39,
            "loss": 1.0,
            "latest": {"step": 39, "time": 1039.0, "scalars": {"loss": 1.0}},
            "process_step": 39,
            "open_alerts": 0,
        }

    def test_does_not_show_what_a_later_attempt_hides(self, api):
        run_id = api.register()
        api.send_ok(run_id, CALM)
        api.register(resume_step=30)
        store_without_a_word(api, run_id, LOST)  # of the first attempt, late
        api.send_ok(run_id, [loss_frame(31, 3.0)], attempt=2)
        run, alerts = told(api, run_id)
        assert (run["num_frames"], run["last_step"], run["loss"], run["process_step"]) == (45, 31, 3.0, 31)
        assert alerts == []

    def test_of_a_run_that_misses_nothing_is_not_looked_up(self, api, monkeypatch):
        asked = []
        monkeypatch.setattr(type(api.app.state.store._series), "newest", lambda *_: asked.append(_))
        run_id = api.register()
        asked.clear()
        for frames in (CALM, CALM, LOST, [loss_frame(7, seq=1000)]):
            api.send_ok(run_id, frames)
        assert asked == []
