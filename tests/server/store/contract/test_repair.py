"""The series keeps frames of which the ledger was not told, and the next frame tells it."""

from contextlib import closing
from dataclasses import replace

import pytest

from tests.server.conftest import loss_frame
from tests.server.store.bench import Bench
from tests.server.test_alerts import HIGH_LOSS

pytestmark = pytest.mark.both_engines  # transactions and locks


@pytest.fixture
def bench(engine, clock):
    with closing(engine.open(clock)) as store:
        yield Bench(engine, store, HIGH_LOSS)


def told(bench, run_id):
    """All that the ledger says of a run and its alerts, but for names and times of day."""
    run = bench.detail(run_id)
    of_run = {name: run[name] for name in ("num_frames", "last_step", "loss", "latest", "process_step", "open_alerts")}
    of_alert = ("rule", "state", "pending_step", "firing_step", "resolved_step", "evidence")
    return of_run, [{name: getattr(alert, name) for name in of_alert} for alert in bench.alerts(run_id)]


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
    def test_that_missed_frames_is_repaired_by_whatever_comes_next(self, bench, after):
        missed, whole = bench.register("missed"), bench.register("whole")
        for run_id in (missed, whole):
            bench.send(run_id, CALM)
        bench.send_without_a_word(missed, LOST)
        assert told(bench, missed)[0]["num_frames"] == 40
        bench.send(whole, LOST)
        for run_id in (missed, whole):
            bench.send(run_id, after)
        assert told(bench, missed) == told(bench, whole)
        assert told(bench, missed)[1][0]["firing_step"] == 42

    @pytest.mark.parametrize("num_missed", [1, 20, 200])
    def test_is_repaired_however_much_was_missed_and_however_late(self, bench, num_missed):
        missed, whole = bench.register("missed"), bench.register("whole")
        for run_id in (missed, whole):
            bench.send(run_id, losses(0, *[1.0] * 100)[::2])
        late = losses(0, *[20.0] * 100)[71::2]
        lost = [*late, *losses(100, *[2.0] * num_missed)]
        bench.send_without_a_word(missed, lost)
        bench.send(whole, lost)
        for run_id in (missed, whole):
            bench.send(run_id, losses(1000, 3.0))
        assert told(bench, missed) == told(bench, whole)
        assert told(bench, missed)[0]["num_frames"] == 50 + len(lost) + 1

    def test_that_was_repaired_stays_as_it_is(self, bench):
        run_id = bench.register()
        bench.send(run_id, CALM)
        bench.send_without_a_word(run_id, LOST)
        bench.send(run_id, LOST)
        before = told(bench, run_id)
        for _ in range(2):
            assert bench.send(run_id, LOST) == 0
        assert told(bench, run_id) == before

    def test_is_repaired_by_another_writer(self, bench):
        run_id = bench.register()
        bench.send_without_a_word(run_id, LOST, writer="gone")
        bench.send(run_id, losses(0, 1.0))
        run, alerts = told(bench, run_id)
        assert (run["num_frames"], run["last_step"], run["latest"]["scalars"]) == (5, 43, {"loss": 30.0})
        assert [alert["firing_step"] for alert in alerts] == [42]

    def test_that_missed_the_first_frames_of_all_is_repaired(self, bench):
        run_id = bench.register()
        bench.send_without_a_word(run_id, CALM)
        assert told(bench, run_id)[0]["latest"] is None
        bench.send(run_id, CALM[-1:])
        assert told(bench, run_id)[0] == {
            "num_frames": 40,
            "last_step": 39,
            "loss": 1.0,
            "latest": {"step": 39, "time": 1039.0, "scalars": {"loss": 1.0}},
            "process_step": 39,
            "open_alerts": 0,
        }

    def test_is_repaired_where_what_it_missed_has_settled(self, bench):
        run_id = bench.register()
        bench.send(run_id, CALM)
        bench.send_without_a_word(run_id, losses(40, *[2.0] * 1000))
        assert bench.store.settle() == 1
        bench.send(run_id, losses(1040, 3.0))
        run, _ = told(bench, run_id)
        assert (run["num_frames"], run["last_step"], run["loss"]) == (1041, 1040, 3.0)

    def test_does_not_show_what_a_later_attempt_hides(self, bench):
        run_id = bench.register()
        bench.send(run_id, CALM)
        bench.register(resume_step=30)
        bench.send_without_a_word(run_id, LOST)  # of the first attempt, late
        bench.send(run_id, [loss_frame(31, 3.0)], attempt=2)
        run, alerts = told(bench, run_id)
        assert (run["num_frames"], run["last_step"], run["loss"], run["process_step"]) == (45, 31, 3.0, 31)
        assert alerts == []

    def test_of_a_run_that_misses_nothing_is_not_looked_up(self, bench, monkeypatch):
        asked = []
        run_id = bench.register()
        monkeypatch.setattr(type(bench.store._series), "newest", lambda *_: asked.append(_))
        for frames in (CALM, CALM, LOST, [loss_frame(7, seq=1000)]):
            bench.send(run_id, frames)
        assert asked == []


class TestWhyAMetricIsNotMeasured:
    def test_is_told_again_with_the_same_frame(self, bench):
        run_id = bench.register()
        frame = replace(loss_frame(3), not_measured={"grad_norm": "no gradients"})
        bench.send_without_a_word(run_id, [frame])
        for _ in range(2):
            bench.send(run_id, [frame])
            assert bench.detail(run_id)["not_measured"] == {"grad_norm": "no gradients"}
