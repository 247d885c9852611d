"""What is deleted or too old goes away, and a recount finds what does not fit."""

import pytest

from tests.server.conftest import loss_frame
from tsemon.wire import Frame
from tsemon_server.store.ledger.retention import Retention

pytestmark = pytest.mark.both_engines  # transactions and locks

DAY_S = 86_400.0


def stop_after(number):
    """An `is_stopped` that lets so many pieces of work through."""
    left = iter(range(number))
    return lambda: next(left, None) is None


class TestADeletedRun:
    def test_is_gone_at_once_and_then_with_all_its_frames(self, bench):
        run_id, kept = bench.register("a"), bench.register("b")
        for run in (run_id, kept):
            bench.fill(run, [loss_frame(step) for step in range(700)])
        bench.store.settle()
        bench.delete(run_id)
        assert [run.run for run in bench.runs()] == ["b"]
        bench.store.purge()
        assert bench.findings() == ([(kept, 188, 512, 1, bench.findings()[0][0].num_chunks)], [])
        assert len(bench.losses(kept)) == 700

    def test_frees_its_name_at_once(self, bench):
        run_id = bench.register()
        bench.fill(run_id, [loss_frame(step) for step in range(600)])
        bench.delete(run_id)
        again = bench.register()
        assert again != run_id
        bench.send(again, [loss_frame(0, 7.0)])
        bench.store.purge()
        assert bench.losses(again) == {0: 7.0}


class TestRetention:
    @pytest.fixture
    def run_id(self, bench, clock):
        """2,000 steps whose loss is 1 but for one step; the first 1,536 are settled."""
        run_id = bench.register()
        bench.fill(run_id, [loss_frame(step, 9.0 if step == 777 else 1.0) for step in range(2000)])
        bench.store.settle()
        clock.now += 10 * DAY_S
        with bench.store.write() as writer:
            writer.runs.hear_of(run_id, 1, 1999)
        return run_id

    def samples(self, bench, run_id):
        return len(bench.samples(run_id, "scalars", "loss").steps)

    def test_spares_what_is_younger_and_other_projects(self, bench, run_id):
        bench.keep(Retention("p", samples_s=11 * DAY_S, rollups_s=12 * DAY_S, runs_s=1.0))
        bench.keep(Retention("other", samples_s=0.0, rollups_s=0.0, runs_s=0.0))
        assert self.samples(bench, run_id) == 2000

    def test_drops_old_samples_but_none_that_has_not_settled(self, bench, run_id):
        before = bench.series(run_id, "loss", points=100)
        bench.keep(Retention("p", samples_s=9 * DAY_S))
        assert self.samples(bench, run_id) == 2000 - 1536
        after = bench.series(run_id, "loss", points=100)
        for key in ("step", "min", "mean", "max", "nonfinite"):  # the first step does not stand alone any more
            assert after[key][1:] == before[key][2:]

    @pytest.mark.parametrize(("ages", "span"), [({}, 16), ({"rollups_s": 9 * DAY_S}, 128)])
    def test_leaves_charts_that_see_every_spike(self, bench, run_id, ages, span):
        bench.keep(Retention("p", samples_s=9 * DAY_S, **ages))
        series = bench.series(run_id, "loss", points=10_000)
        assert len(series["step"]) == 1536 // span + 2000 - 1536
        assert max(series["max"]) == 9.0
        assert (series["step"][0], series["step"][-1]) == ((span - 1) // 2, 1999)

    def test_drops_rollups_after_samples_and_never_brings_them_back(self, bench, run_id):
        bench.keep(Retention("p", samples_s=9 * DAY_S, rollups_s=9 * DAY_S))
        coarse = bench.series(run_id, "loss", points=10_000)
        bench.keep(Retention("p", samples_s=9 * DAY_S))
        assert bench.series(run_id, "loss", points=10_000) == coarse

    def test_may_be_interrupted_anywhere(self, bench, run_id):
        with bench.store.write() as writer:
            writer.retention.keep(Retention("p", samples_s=DAY_S))
        for left in (2000 - 512, 2000 - 1024, 2000 - 1536):
            bench.store.expire(stop_after(1))
            assert self.samples(bench, run_id) == left


class TestARecount:
    def test_finds_nothing_where_all_is_whole(self, bench):
        for name in "ab":
            bench.fill(bench.register(name), [loss_frame(step) for step in range(700)])
        bench.store.settle()
        checked, findings = bench.findings()
        assert findings == []
        assert [(run.num_hot, run.num_settled, run.num_segments) for run in checked] == [(188, 512, 1)] * 2

    def test_finds_nothing_in_frames_without_any_value(self, bench):
        bench.send(bench.register(), [Frame(step, step, 1.0) for step in range(5)])
        assert bench.findings()[1] == []

    def test_finds_a_run_that_counts_other_frames_than_there_are(self, bench):
        run_id = bench.register()
        bench.send(run_id, [loss_frame(step) for step in range(5)])
        bench.engine.database.execute("UPDATE run SET num_frames = num_frames + 1")
        _, [finding] = bench.findings()
        assert (finding.run_id, finding.where) == (run_id, "run")
        assert finding.what == "counts 6 frames, has 5 + 0 settled ones"

    def test_finds_frames_of_a_run_that_is_not_there(self, bench):
        bench.send_without_a_word("gone", [loss_frame(0)])
        _, findings = bench.findings()
        assert {finding.run_id for finding in findings} == {"gone"}
        assert {finding.what for finding in findings} == {"rows of a run that is not there, nor marked as deleted"}

    def test_finds_nothing_of_a_deleted_run_that_is_still_being_removed(self, bench):
        run_id = bench.register()
        bench.send(run_id, [loss_frame(0)])
        bench.delete(run_id)
        assert bench.findings() == ([], [])
