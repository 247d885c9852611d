"""Several monitors in one process, and copies of a model that is watched."""

import copy

import pytest
import torch

from tests.setups import loops
from tests.setups.harness import (
    NUM_STEPS,
    attach,
    frames_in,
    outcome_of,
    plain_loop,
    seeded,
    unwatched,
    watched,
)

PLAIN = loops.SETUPS[0]


def measured(frames):
    """What was measured, without what it cost."""
    return [(frame["step"], frame["layers"], frame["heads"]) for frame in frames]


class TestTwoMonitorsOfOneModel:
    def test_measure_what_each_would_alone_and_change_nothing(self, tmp_path):
        training, losses = seeded(PLAIN.build), []
        monitors = [attach(training, tmp_path / str(every), every) for every in (1, 2)]
        for _ in range(NUM_STEPS):
            losses.append(training.step())
            for monitor in monitors:
                monitor.step(loss=losses[-1])
        for monitor in monitors:
            monitor.close()
        assert outcome_of(training, losses).differs_from(unwatched(PLAIN)) == []
        for every in (1, 2):
            assert measured(frames_in(tmp_path / str(every))) == measured(watched(PLAIN, every).frames)

    @pytest.mark.parametrize("first", [0, 1])
    def test_may_be_closed_in_any_order_in_the_middle(self, tmp_path, first):
        training = seeded(PLAIN.build)
        monitors = [attach(training, tmp_path / name) for name in "ab"]
        for step in range(NUM_STEPS):
            loss = training.step()
            for monitor in monitors:
                monitor.step(loss=loss)
            if step == 1:
                monitors[first].close()
        monitors[1 - first].close()
        remaining = frames_in(tmp_path / "ab"[1 - first])
        assert measured(remaining) == measured(watched(PLAIN, 1).frames)


class TestMonitorsOfTwoModels:
    def test_do_not_see_each_other(self, tmp_path):
        def build():
            return plain_loop()

        alone = []
        for number in (0, 1):
            torch.manual_seed(number)
            training = build()
            with attach(training, tmp_path / f"alone {number}") as monitor:
                torch.manual_seed(10 + number)
                for _ in range(NUM_STEPS):
                    monitor.step(loss=training.step())
            alone.append(measured(frames_in(tmp_path / f"alone {number}")))

        trainings, states = [], []
        for number in (0, 1):
            torch.manual_seed(number)
            trainings.append(build())
            torch.manual_seed(10 + number)
            states.append(torch.get_rng_state())
        monitors = [attach(training, tmp_path / f"both {number}") for number, training in enumerate(trainings)]
        for _ in range(NUM_STEPS):
            for number, (training, monitor) in enumerate(zip(trainings, monitors, strict=True)):
                torch.set_rng_state(states[number])
                loss = training.step()
                states[number] = torch.get_rng_state()
                monitor.step(loss=loss)
        for number, monitor in enumerate(monitors):
            monitor.close()
            assert measured(frames_in(tmp_path / f"both {number}")) == alone[number]


class TestAnAverageOfTheModel:
    """A copy made while tsemon's hooks are in the model, evaluated while they are there."""

    def train(self, folder):
        training, losses = seeded(PLAIN.build), []
        monitor = attach(training, folder) if folder else None
        average = copy.deepcopy(training.model).eval()
        held_out = torch.arange(3, 15).view(1, 12)
        for _ in range(NUM_STEPS):
            losses.append(training.step())
            losses.append(average(held_out).mean())  # with gradients, as some evaluate
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), training.model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
            if monitor is not None:
                monitor.step(loss=losses[-2])
        if monitor is not None:
            monitor.close()
            assert monitor.status.faults == ()
        return outcome_of(training, losses)

    def test_is_what_it_would_be_and_is_not_measured_for_the_model(self, tmp_path):
        assert self.train(tmp_path).differs_from(self.train(None)) == []
        assert measured(frames_in(tmp_path)) == measured(watched(PLAIN, 1).frames)

    def test_is_not_watched_when_it_goes_on_to_train(self, tmp_path):
        training = seeded(PLAIN.build)
        with attach(training, tmp_path) as monitor:
            twin = copy.deepcopy(training.model)
            twin(torch.arange(3, 15).view(1, 12)).sum().backward()
            monitor.step()
            assert "token_similarity" not in monitor.status.measured
