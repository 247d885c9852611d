"""Scalars of steps without a frame are one series with those of frames, and live and die with their run."""

import pytest

from tests.server.conftest import loss_frame
from tsemon.errors import UnknownRun
from tsemon.wire import Frame, Rows
from tsemon_server.store.ledger.retention import Retention
from tsemon_server.store.series.settling import Sizes

pytestmark = pytest.mark.both_engines  # transactions and locks

TINY = Sizes(segment=8, kept=5)
DAY_S = 86_400.0


def rows_of(steps, *, seq=0, **columns):
    steps = [*steps]
    columns = columns or {"loss": [step / 8 for step in steps]}
    return Rows(seq, steps, [1e9 + step for step in steps], columns)


def sampled(run_id, bench, num_steps=1000, every=10):
    """A run with a frame every few steps, and rows of the others. Its loss is an eighth of the step."""
    bench.fill(run_id, [loss_frame(step, step / 8, seq=step // every) for step in range(0, num_steps, every)])
    bench.send_rows(run_id, rows_of(step for step in range(num_steps) if step % every))
    return run_id


@pytest.fixture(params=[False, True], ids=["hot", "settled"])
def settle(request, bench):
    return lambda: bench.store.settle(sizes=TINY) if request.param else None


class TestRows:
    def test_are_one_series_with_frames(self, bench, settle):
        run_id = sampled(bench.register(), bench)
        settle()
        assert bench.losses(run_id) == {step: step / 8 for step in range(1000)}

    def test_are_stored_once_however_often_they_are_sent(self, bench, settle):
        run_id = bench.register()
        bench.send_rows(run_id, rows_of(range(60)))
        settle()
        bench.send_rows(run_id, rows_of(range(70)))
        assert bench.losses(run_id) == {step: step / 8 for step in range(70)}

    @pytest.mark.parametrize("points", [3, 20, 100, 10_000])
    def test_have_their_extremes_in_every_bucket(self, bench, settle, points):
        run_id = sampled(bench.register(), bench)
        bench.send_rows(run_id, rows_of([777], seq=5000, loss=[1e6]))
        settle()
        series = bench.series(run_id, "loss", points=points)
        assert max(series["max"]) == 1e6
        assert len(series["step"]) == min(points, 1000) or len(series["step"]) <= points
        assert series["step"][0] == 0
        assert series["step"][-1] == 999

    def test_of_other_names_are_recorded_and_read_alone(self, bench, settle):
        run_id = sampled(bench.register(), bench)
        bench.send_rows(run_id, rows_of([50, 100], seq=2000, **{"val/acc": [0.5, 0.75]}))
        settle()
        assert "val/acc" in bench.detail(run_id)["metrics"]["scalars"]
        found = bench.samples(run_id, "scalars", "val/acc")
        assert (found.steps.tolist(), found.values[:, 0].tolist()) == ([50, 100], [0.5, 0.75])

    def test_are_hidden_by_a_later_attempt(self, bench, settle):
        run_id = sampled(bench.register(), bench)
        bench.register(resume_step=500)
        bench.send_rows(run_id, rows_of([501, 502], loss=[7.0, 8.0]), attempt=2)
        settle()
        losses = bench.losses(run_id)
        assert list(losses) == [*range(500), 501, 502]
        assert losses[501] == 7.0
        assert len(bench.losses(run_id, attempt=1)) == 1000

    def test_are_cut_to_the_steps_that_are_asked_for(self, bench, settle):
        run_id = sampled(bench.register(), bench)
        settle()
        assert list(bench.losses(run_id, from_step=95, to_step=105)) == [*range(95, 106)]

    def test_are_in_the_table_that_is_exported(self, bench, settle):
        run_id = sampled(bench.register(), bench)
        settle()
        with bench.store.read() as reader:
            table = reader.frames.table(run_id, metrics=["loss"])
            steps = sorted(step for piece in table.pieces() for step in piece.steps.tolist())
        assert steps == [*range(1000)]
        assert (table.num_dropped, table.num_damaged) == (0, 0)

    def test_are_never_the_newest_frame(self, bench, settle):
        run_id = sampled(bench.register(), bench)
        settle()
        with bench.store.read() as reader:
            assert reader.frames.newest(run_id).step == 990
            assert reader.frames.nearest(run_id, 995, None).step == 990
        assert bench.detail(run_id)["num_frames"] == 100

    def test_go_with_their_run(self, bench, settle):
        run_id, kept = (sampled(bench.register(name), bench) for name in "ab")
        settle()
        bench.delete(run_id)
        bench.store.purge()
        checked, findings = bench.findings()
        assert findings == []
        assert [one.run_id for one in checked] == [kept]
        assert len(bench.losses(kept)) == 1000

    def test_are_reduced_by_retention(self, bench, clock):
        run_id = sampled(bench.register(), bench)
        bench.end(run_id)
        bench.store.settle(sizes=TINY)
        clock.now += 10 * DAY_S
        bench.keep(Retention("p", samples_s=9 * DAY_S))
        found = bench.samples(run_id, "scalars", "loss")
        assert len(found.steps) <= 1  # a run's newest frame stays as it is
        assert max(bench.series(run_id, "loss")["max"]) == 999 / 8

    def test_of_a_run_that_is_not_there_are_refused(self, bench):
        with pytest.raises(UnknownRun):
            bench.send_rows("nobody", rows_of(range(3)))

    def test_give_the_run_its_newest_loss(self, bench):
        run_id = sampled(bench.register(), bench)
        assert bench.detail(run_id)["loss"] == 999 / 8
        bench.send_rows(run_id, rows_of([500], seq=5000, loss=[7.0]))
        assert bench.detail(run_id)["loss"] == 999 / 8


class TestFramesForRules:
    def frames(self, bench, run_id, after=-1, **which):
        with bench.store.read() as reader:
            return [*reader.frames.after(run_id, 1, after, **which)]

    def test_have_the_newest_of_the_users_scalars_since_the_one_before(self, bench, settle):
        run_id = bench.register()
        bench.fill(run_id, [Frame(seq, 10 * seq, 1e9, {"loss": 1.0}) for seq in range(4)])
        bench.send_rows(run_id, rows_of([3, 7, 12, 20, 35], acc=[0.3, 0.7, 0.12, 0.2, 0.35]))
        settle()
        found = self.frames(bench, run_id, own={"acc"})
        assert [frame.scalars.get("acc") for frame in found] == [None, 0.7, 0.2, None]
        assert [frame.scalars.get("acc") for frame in self.frames(bench, run_id, 10, own={"acc"})] == [0.2, None]

    def test_keep_their_own(self, bench):
        run_id = bench.register()
        bench.fill(run_id, [Frame(0, 0, 1e9), Frame(1, 10, 1e9, {"acc": 1.0})])
        bench.send_rows(run_id, rows_of([5], acc=[0.5]))
        assert self.frames(bench, run_id, own={"acc"})[1].scalars == {"acc": 1.0}

    def test_have_none_that_no_rule_reads(self, bench):
        run_id = sampled(bench.register(), bench)
        assert all(frame.scalars.keys() == {"loss"} for frame in self.frames(bench, run_id))
