import math

import pytest
import torch

from tsemon.errors import InvalidArgument
from tsemon.lab.train import schedules

PEAK = 0.5


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)


def rates(make, steps, **settings):
    """The learning rate of each step, as the training loop uses it."""
    sgd = optimizer()
    schedule = make(sgd, **settings)
    used = []
    for _ in range(steps):
        used.append(sgd.param_groups[0]["lr"])
        sgd.step()
        schedule.step()
    return used


class TestAConstantSchedule:
    def test_warms_up_linearly_and_stays(self):
        assert rates(schedules.constant, 6, warmup=4) == [PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK, PEAK, PEAK]

    def test_needs_no_warm_up(self):
        assert rates(schedules.constant, 3) == [PEAK] * 3


class TestACosineSchedule:
    def test_equals_its_formula(self):
        expected = [PEAK * (t + 1) / 3 for t in range(3)] + [
            PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t - 3) / 17))) for t in range(3, 20)
        ]
        assert rates(schedules.cosine, 20, warmup=3, total=20) == pytest.approx(expected, rel=1e-12)

    def test_ends_at_its_final_ratio_and_stays_there(self):
        used = rates(schedules.cosine, 13, total=10, final_ratio=0.2)
        assert used[10:] == pytest.approx([0.2 * PEAK] * 3, rel=1e-12)
        assert min(used[:10]) > 0.2 * PEAK

    def test_ends_in_its_warm_up_where_that_is_longer(self):
        assert rates(schedules.cosine, 2, warmup=4, total=2) == [PEAK / 4, PEAK / 2]

    def test_falls_to_nothing_with_a_final_ratio_of_zero(self):
        assert rates(schedules.cosine, 5, total=4, final_ratio=0.0)[4] == pytest.approx(0.0, abs=1e-16)


class TestAnInverseSqrtSchedule:
    def test_equals_its_formula(self):
        expected = [PEAK * min((t + 1) / 4, math.sqrt(4 / (t + 1))) for t in range(12)]
        assert rates(schedules.inverse_sqrt, 12, warmup=4) == pytest.approx(expected, rel=1e-12)

    def test_is_one_over_the_root_of_the_step_without_warm_up(self):
        assert rates(schedules.inverse_sqrt, 4) == pytest.approx([PEAK / math.sqrt(t) for t in (1, 2, 3, 4)])


class TestAMultiStepSchedule:
    def test_takes_a_fifth_at_seven_and_at_nine_tenths(self):
        expected = [PEAK] * 7 + [PEAK / 5] * 2 + [PEAK / 25]
        assert rates(schedules.multi_step, 10, total=10) == pytest.approx(expected, rel=1e-12)

    def test_warms_up_too(self):
        used = rates(schedules.multi_step, 10, total=10, at=(0.5,), factor=0.5, warmup=2)
        assert used == [PEAK / 2] + [PEAK] * 4 + [PEAK / 2] * 5


class TestEverySchedule:
    @pytest.mark.parametrize(
        ("make", "settings"),
        [
            (schedules.constant, {"warmup": 3}),
            (schedules.cosine, {"warmup": 3, "total": 9}),
            (schedules.inverse_sqrt, {"warmup": 3}),
            (schedules.multi_step, {"warmup": 3, "total": 9}),
        ],
        ids=lambda value: getattr(value, "__name__", ""),
    )
    def test_goes_on_from_its_state_with_the_very_rates(self, make, settings):
        whole = rates(make, 9, **settings)
        first, second = optimizer(), optimizer()
        schedule = make(first, **settings)
        for _ in range(5):
            first.step()
            schedule.step()
        resumed = make(second, **settings)
        second.load_state_dict(first.state_dict())
        resumed.load_state_dict(schedule.state_dict())
        assert second.param_groups[0]["lr"] == whole[5]
        second.step()
        resumed.step()
        assert second.param_groups[0]["lr"] == whole[6]

    @pytest.mark.parametrize(
        ("make", "settings", "told"),
        [
            (schedules.constant, {"warmup": -1}, "0 or more, got -1"),
            (schedules.cosine, {"total": 0}, "got a total of 0"),
            (schedules.cosine, {"total": 5, "final_ratio": 2.0}, "from 0 to 1, got 2.0"),
            (schedules.multi_step, {"total": 5, "at": (1.5,)}, r"got \(1.5,\) of 5"),
            (schedules.multi_step, {"total": 5, "factor": 0.0}, "above 0, got 0.0"),
        ],
    )
    def test_says_what_is_out_of_range(self, make, settings, told):
        with pytest.raises(InvalidArgument, match=told):
            make(optimizer(), **settings)
