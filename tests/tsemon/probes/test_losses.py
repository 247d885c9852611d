"""Losses of the steps between two samples."""

import json
import math
import statistics
import weakref

import pytest
import torch

import tsemon
from tests import zoo
from tests.frames import frames_in
from tsemon.errors import InvalidArgument
from tsemon.measures import loss_recent, loss_start
from tsemon.measures.losses import start_metrics, start_sums
from tsemon.probes.every_step import MAX_STEPS, NUM_PER_STACK
from tsemon.probes.losses import LossProbe

NAMES = LossProbe.METRICS[:5]
"""Of the steps since the last sample."""


def told(folder, losses, every=4, **options):
    """The frames of a run that is given these losses, and the monitor that wrote them."""
    model, _ = zoo.torch_encoder()
    with tsemon.attach(model, run="r", every=every, spool_dir=folder, **options) as monitor:
        for loss in losses:
            if callable(loss):
                loss(monitor)
            else:
                monitor.step(loss=loss)
    return [frame["scalars"] for frame in frames_in(folder)], monitor


def as_tensors(losses):
    return [torch.tensor(loss, requires_grad=True) * 1 for loss in losses]


LOSSES = [9.0, 1.0, 4.0, 2.0, 5.0]  # the first is a sample, and so is the last


class TestLossProbe:
    @pytest.mark.parametrize("give", [list, as_tensors], ids=["floats", "tensors"])
    def test_is_of_the_steps_since_the_last_sample_and_of_this_one(self, tmp_path, give):
        (first, second), _ = told(tmp_path, give(LOSSES))
        assert [first[name] for name in NAMES] == [9.0, 9.0, 9.0, 0.0, 0.0]
        assert [second[name] for name in NAMES] == pytest.approx([3.0, 1.0, 5.0, math.sqrt(2.5), 0.0])
        assert second["loss"] == 5.0

    @pytest.mark.parametrize("give", [list, as_tensors], ids=["floats", "tensors"])
    def test_counts_what_is_not_finite_and_leaves_it_out(self, tmp_path, give):
        (_, second), _ = told(tmp_path, give([9.0, 1.0, math.nan, -math.inf, 3.0]))
        assert [second[name] for name in NAMES] == [2.0, 1.0, 3.0, 1.0, 2.0]

    def test_is_undefined_where_no_loss_was_finite(self, tmp_path):
        (only,), _ = told(tmp_path, [torch.tensor(math.inf)])
        assert [only[name] for name in NAMES] == [None, None, None, None, 1.0]

    def test_takes_floats_and_tensors_of_several_dtypes_in_one_run(self, tmp_path):
        (_, second), monitor = told(tmp_path, [9.0, torch.tensor([1.0]), 4, torch.tensor(2.0).bfloat16(), 5.0])
        assert second["loss_mean"] == 3.0
        assert monitor.status.num_faults == 0

    def test_keeps_fractions_beside_a_tensor_of_integers(self, tmp_path):
        (first, second), _ = told(tmp_path, [2.25, torch.tensor(2), 2.75, torch.tensor(2), 2.25])
        assert [one["loss_mean"] for one in (first, second)] == [2.25, 2.25]
        assert second["loss_recent"] == 2.25

    @pytest.mark.parametrize("late", [1, NUM_PER_STACK])
    def test_takes_losses_of_two_devices(self, late):
        probe = LossProbe()
        for loss in [2.0] * late + [torch.ones((), device="meta"), 3.0]:
            probe.given.add(loss)
            if probe.given.is_full:
                probe.given.stack()
        for _ in range(2):
            assert probe.collect()
            assert probe._last.device.type == "meta", "a copy to the host would wait for the device"
            probe.given.add(2.0)

    def test_has_the_spread_of_losses_that_hardly_differ(self, tmp_path):
        losses = [10.0 + i * 1e-4 for i in range(5)]
        (_, second), _ = told(tmp_path, losses)
        assert second["loss_std"] == pytest.approx(math.sqrt(1.25) * 1e-4, rel=1e-3)

    @pytest.mark.parametrize("give", [list, as_tensors], ids=["floats", "tensors"])
    def test_counts_every_step_of_a_long_gap(self, tmp_path, give):
        num = 2 * NUM_PER_STACK + 1
        (_, second), _ = told(tmp_path, give([9.0, *map(float, range(1, num + 1))]), every=num)
        assert second["loss_mean"] == (num + 1) / 2

    def test_counts_every_step_once_whenever_the_status_is_read(self, tmp_path):
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=30, measures=["loss_mean"], spool_dir=tmp_path) as monitor:
            for step in range(31):
                forward()
                monitor.step(loss=float(step))
                if step % 5 == 3:
                    assert monitor.status.is_loss_watched
        assert frames_in(tmp_path)[1]["scalars"]["loss_mean"] == pytest.approx(statistics.fmean(range(1, 31)))

    @pytest.mark.parametrize("every", [1, 3, 7, 59])
    @pytest.mark.parametrize("give", [list, as_tensors], ids=["floats", "tensors"])
    def test_has_the_level_and_the_noise_of_the_last_steps_at_every_distance_of_samples(self, tmp_path, every, give):
        losses = [3 + math.sin(1.3 * step) + 0.01 * step for step in range(60)]
        frames, _ = told(tmp_path, give(losses), every=every)
        for step, scalars in zip(sorted({*range(0, 60, every), 59}), frames, strict=True):  # the last one at close
            known = losses[: step + 1]
            assert scalars["loss_recent"] == pytest.approx(statistics.fmean(known[-5:]), rel=1e-6)
            before = known[-40:-8]
            wanted = pytest.approx(statistics.pstdev(before), rel=1e-4) if len(before) >= 16 else None
            assert scalars["loss_noise"] == wanted
            level = pytest.approx(statistics.fmean(before), rel=1e-6) if len(before) >= 16 else None
            assert scalars["loss_before"] == level
            start = pytest.approx(max(losses[0], statistics.median_low(known[:48])), rel=1e-6)
            assert scalars["loss_start"] == (start if len(known) >= 24 else None)

    @pytest.mark.parametrize("every", [3, 30, 59])
    @pytest.mark.parametrize(("first", "start"), [(300.0, 10.0), (3.0, 3.0), (1.0, 2.0), (0.0, 2.0), (math.nan, 2.0)])
    def test_begins_at_the_first_one_or_at_one_to_five_medians(self, tmp_path, every, first, start):
        frames, _ = told(tmp_path, [first] * 20 + [2.0] * 40, every=every)
        assert frames[-1]["loss_start"] == start

    @pytest.mark.parametrize("every", [30, 300])
    def test_begins_with_the_first_that_are_finite(self, tmp_path, every):
        frames, _ = told(tmp_path, [math.nan] * 200 + [5.0] * 30 + [2.0] * 80, every=every)
        assert frames[-1]["loss_start"] == 5.0

    def test_begins_at_the_mean_of_several_processes(self):
        first, second = (start_sums(torch.tensor(losses)) for losses in ([4.0] * 30, [math.nan, *[2.0] * 30]))
        merged = {name: first[name].value + second[name].value for name in first}
        assert start_metrics(merged)["loss_start"] == 3.0

    def test_begins_somewhere_in_deterministic_mode(self, monkeypatch):
        """Where CUDA has no median."""

        def forbidden(*args, **options):
            raise RuntimeError("median CUDA with indices output does not have a deterministic implementation")

        for name in ("median", "nanmedian"):
            monkeypatch.setattr(torch.Tensor, name, forbidden)
        assert loss_start(torch.arange(48.0).flip(0)).item() == 47.0

    def test_counts_the_last_steps_of_one_that_is_longer_still(self):
        probe = LossProbe()
        for number in range(3 * MAX_STEPS):
            probe.given.add(float(number) if number else 100.0)
            if probe.given.is_full:
                probe.given.stack()
        sums = {name: partial.value for name, partial in probe.collect().items()}
        assert (sums["count"], sums["min"]) == (MAX_STEPS, 2 * MAX_STEPS)
        assert start_metrics(sums)["loss_start"] == 100.0

    def test_has_no_newest_one_if_it_was_overwritten_or_left_out(self):
        probe, overwritten = LossProbe(), torch.tensor(3.0)
        for loss in (2.0, overwritten):
            probe.given.add(loss)
        overwritten.zero_()
        assert probe.collect()["sum"].value == 2.0
        assert probe.newest is None
        probe.given.add(4.0)
        probe.collect()
        assert probe.newest == 4.0
        with pytest.raises(InvalidArgument):
            probe.given.add([5.0])
        assert probe.newest is None

    def test_keeps_no_graph_and_no_larger_tensor_of_which_the_loss_is_a_part(self, tmp_path):
        freed = []

        class Witness(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.witness = torch.ones(1)
                weakref.finalize(ctx.witness, freed.append, True)
                return x.sum()

            @staticmethod
            def backward(ctx, gradient):
                return None

        large = torch.ones(10_000)
        memory = large.untyped_storage()
        probe = LossProbe()
        probe.given.add(Witness.apply(torch.ones(2, requires_grad=True)))
        probe.given.add(large[0])
        assert freed == [True]
        assert all(loss.untyped_storage().data_ptr() != memory.data_ptr() for loss, _ in probe.given._pending)


class TestALossThatIsWrittenInto:
    def test_may_be_an_entry_of_a_history(self):
        history, probe = torch.zeros(20), LossProbe()
        for step in range(20):
            history[step] = step
            probe.given.add(history[step])
        assert probe.given.take().tolist() == list(range(20))

    def test_may_be_the_same_tensor_at_every_step(self, tmp_path):
        static = torch.zeros(())

        def replay(value):
            # As a CUDA graph does it: nobody counts this write.
            return lambda monitor: (static.data.fill_(value), monitor.step(loss=static))

        (_, second), monitor = told(tmp_path, [replay(loss) for loss in LOSSES])
        assert [second[name] for name in NAMES[:3]] == [3.0, 1.0, 5.0]
        assert monitor.status.num_faults == 0

    def test_counts_as_it_was_given(self, tmp_path):
        def scaled_afterwards(value):
            loss = torch.tensor(value)
            return lambda monitor: (monitor.step(loss=loss), loss.mul_(1000))

        (first, second), _ = told(tmp_path, [scaled_afterwards(loss) for loss in LOSSES])
        assert first["loss_mean"] == 9.0
        assert second["loss_mean"] == 3.0

    def test_does_not_count_if_it_was_still_on_a_device_and_is_copied_from_then_on(self):
        probe, found = LossProbe(), []
        for losses in ((1.0, 3.0, 5.0), (1.0, 3.0, 5.0)):
            for loss in map(torch.tensor, losses):
                probe.given.add(loss)
                if loss < 5:
                    loss.mul_(1000)
            sums = {name: partial.value for name, partial in probe.collect().items()}
            found.append(probe.finish(sums).scalars["loss_mean"])
        assert found == [5.0, 3.0]


class TestStatus:
    def test_says_that_no_loss_was_given(self, tmp_path):
        _, monitor = told(tmp_path, [lambda monitor: monitor.step()])
        assert monitor.status.not_measured["loss_mean"] == "monitor.step() was given no loss that is one number"

    def test_lacks_a_loss_that_is_not_wanted(self, tmp_path):
        (only,), monitor = told(tmp_path, [1.0], measures=["token_similarity"])
        assert "loss_mean" not in only
        assert "loss_mean" not in monitor.status.not_measured


class TestTheRecentLoss:
    def test_is_not_one_loss_after_a_recovery_from_nan(self):
        healthy, lost = [1.0] * 20, [math.nan] * 9
        assert loss_recent(torch.tensor([*healthy, *lost, 0.5])).isnan()
        assert loss_recent(torch.tensor([*healthy, *lost, 0.5, 0.6])).isnan()
        assert loss_recent(torch.tensor([*healthy, *lost, 0.5, 0.6, 0.7])).item() == pytest.approx(0.6)

    def test_is_the_mean_of_the_few_losses_that_there_are_at_first(self):
        assert loss_recent(torch.tensor([0.5])).item() == 0.5


class TestALoopThatDoesNotKnowItsLossYet:
    @pytest.mark.parametrize("every", [1, 7, 59])
    @pytest.mark.parametrize("stand_in", [0.0, -1.0])
    @pytest.mark.parametrize("num", [1, 12, 30, 130, 600])
    def test_is_waited_for(self, tmp_path, num, stand_in, every):
        losses = [3 + math.sin(1.3 * step) for step in range(60)]
        frames, _ = told(tmp_path / "with", [stand_in] * num + losses, every=every)
        without, _ = told(tmp_path / "without", losses, every=1)
        for name in ("loss_recent", "loss_before", "loss_noise", "loss_start"):
            steps = [*range(0, num + 60, every), num + 59]
            for step, frame in zip(steps, frames, strict=False):
                wanted = without[step - num][name] if step >= num else None
                assert frame[name] == (None if wanted is None else pytest.approx(wanted, rel=1e-6))
        assert frames[0]["loss"] == stand_in

    @pytest.mark.parametrize("stand_ins", [[0.0, math.nan, 0.0], [math.nan, *[0.0] * 12]])
    def test_may_give_nan_too(self, tmp_path, stand_ins):
        frames, _ = told(tmp_path, [*stand_ins, *[2.0] * 60], every=1)
        assert {frame["loss_before"] for frame in frames} == {None, 2.0}
        assert frames[-1]["loss_start"] == 2.0

    def test_counts_a_loss_that_is_always_positive_or_returns_to_zero(self, tmp_path):
        frames, _ = told(tmp_path, [2.0] * 30 + [0.0] * 30, every=1)
        assert frames[29]["loss_before"] == 2.0
        assert frames[59]["loss_recent"] == 0.0


class TestPastLosses:
    @pytest.mark.parametrize("num", [1, 30, 47, 100, 600])
    def test_make_a_run_go_on_as_if_it_had_not_ended(self, tmp_path, num):
        losses = [math.nan if step % 11 == 3 else 3 + math.sin(1.3 * step) for step in range(num + 60)]
        whole, _ = told(tmp_path / "whole", losses, every=1)
        model, _ = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=7, spool_dir=tmp_path / "first") as first:
            for loss in losses[:num]:
                first.step(loss=loss)
            state = json.loads(json.dumps(first.state_dict()))
        assert first.state_dict().keys() == {"project", "run", "step"}
        then, monitor = told(
            tmp_path / "then", [lambda monitor: monitor.load_state_dict(state), *losses[num:]], every=1
        )
        for name in ("loss_recent", "loss_before", "loss_noise", "loss_start"):
            assert [frame[name] for frame in then] == pytest.approx([frame[name] for frame in whole[num:]], nan_ok=True)
        assert monitor.status.num_faults == 0

    @pytest.mark.parametrize("give", [list, as_tensors], ids=["floats", "tensors"])
    def test_may_be_asked_for_at_every_step(self, tmp_path, give):
        losses = give([10.0 - 0.01 * step for step in range(400)])
        often = [part for loss in losses for part in (loss, lambda monitor: monitor.state_dict())]
        frames, monitor = told(tmp_path / "often", often, every=400)
        seldom, _ = told(tmp_path / "seldom", losses, every=400)
        for name in LossProbe.METRICS:
            assert [frame[name] for frame in frames] == pytest.approx([frame[name] for frame in seldom])
        assert monitor.status.num_faults == 0

    def test_of_a_checkpoint_soon_after_another_are_those_of_both(self, tmp_path):
        model, _ = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=7, spool_dir=tmp_path) as monitor:
            past = {"first": [4.0] * 48, "last": [3.0] * 40}
            for _ in range(2):
                monitor.load_state_dict({"project": "default", "run": "r", "step": 90, "losses": past})
            assert monitor.state_dict()["losses"] == past
            monitor.step(loss=2.0)
            assert monitor.state_dict()["losses"] == {"first": [4.0] * 48, "last": [3.0] * 39 + [2.0]}
