import itertools
import statistics
from collections import deque

import pytest

from tsemon.errors import InvalidArgument
from tsemon.schedule import (
    AIM,
    FIRST_GAP,
    FOLLOW_UP_GAP,
    MAX_GAP,
    REPAID,
    SLOW_EVERY,
    WARM_UP_REPAID,
    WARM_UP_STEPS,
    ZOOM_GAP,
    ZOOM_SAMPLES,
    ZOOM_SHARE,
    Cadence,
    Spent,
)

BUDGET = 0.01 / AIM
"""The gaps aim at one percent."""


def sample(cadence, cost_s, step_s, is_slow=False):
    """The next sample, told that the one before it cost so much."""
    return cadence.next_gap(Spent(cost_s, step_s, is_slow, num_steps=cadence.gap))


def settle(cadence, cost_s, step_s, samples=40):
    for _ in range(samples):
        sample(cadence, cost_s, step_s)
    return cadence.gap


def costs_of(cadence, steps, first_s=0.050, cost_s=0.004, slow_s=0.012, step_s=0.001):
    """What each step of a run cost: its samples, of which the first pays for the warm-up."""
    costs, step, newest = [0.0] * steps, 0, (0.0, False, 0)
    while step < steps:
        is_slow = cadence.is_slow
        costs[step] = first_s if step == 0 else slow_s if is_slow else cost_s
        gap = cadence.next_gap(Spent(newest[0], step_s * (step > 0), newest[1], step - newest[2]))
        newest = costs[step], is_slow, step
        step += gap
    return costs


class TestCadence:
    def test_is_fixed_when_it_was_asked_for(self):
        cadence = Cadence(every=7)
        assert settle(cadence, cost_s=9.0, step_s=0.001) == 7

    def test_keeps_the_cost_at_the_budget(self):
        gap = settle(Cadence(budget=BUDGET), cost_s=0.03, step_s=0.1)
        assert 0.03 / (gap * 0.1) == pytest.approx(0.01, rel=0.05)

    @pytest.mark.parametrize("num_steps", [5_000, 7_000, 50_000])
    def test_leaves_a_part_of_the_budget_to_what_it_cannot_steer(self, num_steps):
        """As measured: samples of 30 and 60 ms in steps of 12 ms."""
        costs = costs_of(Cadence(), num_steps, first_s=0.15, cost_s=0.03, slow_s=0.06, step_s=0.012)
        assert sum(costs) / (0.012 * num_steps) < 0.0095

    def test_follows_a_run_that_becomes_five_times_faster(self):
        cadence = Cadence(budget=BUDGET)
        assert settle(cadence, 0.03, 0.1) == 30
        assert settle(cadence, 0.03, 0.02) == 150

    @pytest.mark.parametrize(("slow_s", "slow_every"), [(1.03, 10), (0.15, 6), (0.06, 3), (0.033, 2)])
    def test_takes_the_slow_tier_the_more_often_the_less_it_costs(self, slow_s, slow_every):
        costs = costs_of(Cadence(budget=BUDGET), steps=400_000, cost_s=0.03, slow_s=slow_s, step_s=0.1)
        late = [cost for cost in costs[200_000:] if cost]
        assert late.count(slow_s) == pytest.approx(len(late) / slow_every, rel=0.05)
        assert sum(late) / (0.1 * 200_000) == pytest.approx(0.01, rel=0.02)

    @pytest.mark.parametrize(("first_s", "more_s", "slow_every"), [(1.03, 0.03, 3), (0.04, 0.01, 2)])
    def test_expects_the_slow_tier_to_double_the_cost_or_less_until_it_is_known(self, first_s, more_s, slow_every):
        cadence = Cadence(budget=BUDGET)
        for cost_s, is_slow in ((0.0, False), (first_s, True), (0.03, False)):  # nothing is known at the first
            sample(cadence, cost_s, 0.1, is_slow)
        assert cadence.slow_every == slow_every
        assert 1 <= cadence.gap / ((0.03 + more_s / slow_every) / 0.001) <= 1 + REPAID + WARM_UP_REPAID + 0.02

    @pytest.mark.parametrize("cost_s", [0.5, 5.0])
    def test_recovers_from_one_expensive_sample(self, cost_s):
        cadence = Cadence(budget=BUDGET)
        for number in range(200):
            is_slow = cadence.is_slow
            sample(cadence, cost_s if number in (2, 3) else 0.15 if is_slow else 0.03, 0.1, is_slow)
        assert cadence.slow_every == 6
        assert cadence.gap == pytest.approx((0.03 + 0.12 / 6) / 0.001, abs=1)

    def test_recovers_from_a_burst_at_the_start(self):
        cadence = Cadence(budget=BUDGET)
        cadence.burst(steps=50, every=1)
        for _ in range(400):
            is_slow = cadence.is_slow
            sample(cadence, 0.15 if is_slow else 0.03, 0.1, is_slow)
        assert cadence.slow_every == 6

    def test_takes_the_slow_tier_at_every_tenth_sample_of_a_fixed_interval_and_after_a_burst(self):
        cadence = Cadence(every=5)
        slow = []
        for number in range(40):
            if number == 13:
                cadence.burst(steps=4, every=1)
            if cadence.is_slow:
                slow.append(number)
            sample(cadence, 0.03, 0.1, is_slow=cadence.is_slow)
        assert slow == [0, 10, 13, 14, 15, 16, 26, 36]

    def test_is_within_the_budget_one_sample_after_steps_became_five_times_faster(self):
        cadence = Cadence(budget=BUDGET)
        settle(cadence, 0.03, 0.1)
        gaps = [settle(cadence, 0.03, 0.02, samples=1) for _ in range(10)]
        assert max(0.03 / (gap * 0.02) for gap in gaps) <= 0.01

    def test_stays_within_the_budget_while_it_follows_a_run_that_becomes_five_times_slower(self):
        cadence = Cadence(budget=BUDGET)
        settle(cadence, 0.03, 0.02)
        gaps = [settle(cadence, 0.03, 0.1, samples=1) for _ in range(20)]
        assert max(0.03 / (gap * 0.1) for gap in gaps) <= 0.01
        assert gaps[-1] == 31  # 30 and what the average still has of the fast steps, rounded up

    def test_is_back_at_its_pace_soon_after_a_pause(self):
        cadence = Cadence(budget=BUDGET)
        settle(cadence, 0.03, 0.1)
        sample(cadence, 0.03, 0.1 + 60.0 / cadence.gap)  # an evaluation of a minute
        assert settle(cadence, 0.03, 0.1, samples=1) == 55  # saves the sample that the pause made come early
        assert settle(cadence, 0.03, 0.1, samples=2) == 30

    def test_does_not_believe_the_first_sample_which_pays_for_the_warm_up(self):
        cadence = Cadence(budget=BUDGET)
        assert sample(cadence, 0.0, 0.0, is_slow=True) == FIRST_GAP  # nothing is known yet
        assert sample(cadence, 10.0, 1.0, is_slow=True) == WARM_UP_STEPS - 2 * FIRST_GAP  # what the first one cost
        assert sample(cadence, 0.1, 1.0) < 2 * (0.1 + 9.9 / SLOW_EVERY) / 0.01

    @pytest.mark.parametrize("first_s", [0.004, 0.050, 0.500])
    def test_is_within_the_budget_from_step_100_on(self, first_s):
        costs = costs_of(Cadence(budget=BUDGET), steps=50_000, first_s=first_s)
        for stop in range(2_000, 50_000, 500):
            assert sum(costs[100:stop]) / (0.001 * (stop - 100)) <= 0.01 + 0.012 / (0.001 * (stop - 100))

    def test_samples_three_times_in_the_first_hundred_steps_of_a_run_in_which_that_is_dear(self):
        costs = costs_of(Cadence(budget=BUDGET), steps=100)
        assert [step for step, cost in enumerate(costs) if cost] == [0, FIRST_GAP, WARM_UP_STEPS]

    def test_saves_what_early_samples_cost_and_slowly_the_warm_up_of_the_first(self):
        costs = costs_of(Cadence(budget=BUDGET), steps=100_000)
        assert sum(costs) <= 0.01 * 0.001 * len(costs) + 0.012
        costs = costs_of(Cadence(budget=BUDGET), steps=2500, first_s=0.5, cost_s=0.02, slow_s=0.04, step_s=0.04)
        steps = [step for step, cost in enumerate(costs) if cost]
        assert steps[:3] == [0, FIRST_GAP, WARM_UP_STEPS]
        assert statistics.median(b - a for a, b in itertools.pairwise(steps[3:])) < 1.2 * 0.025 / 0.01 / 0.04

    def test_saves_what_a_burst_cost(self):
        cadence = Cadence(budget=BUDGET)
        settle(cadence, 0.03, 0.1)
        cadence.burst(steps=20, every=1)
        for _ in range(20):
            cadence.next_gap(Spent(0.03, 0.1, is_slow=False, num_steps=1))
        gaps = [settle(cadence, 0.03, 0.1, samples=1) for _ in range(60)]
        assert max(gaps) == 60
        assert gaps[-1] == 30
        assert 80 * 0.03 / ((sum(gaps) + 20) * 0.1) <= 0.0102

    def test_samples_now_and_then_however_dear_it_is(self):
        assert settle(Cadence(budget=0.001), cost_s=100.0, step_s=0.001) == MAX_GAP

    def test_samples_every_step_when_that_is_within_the_budget(self):
        assert settle(Cadence(budget=BUDGET), cost_s=1e-6, step_s=1.0) == 1

    @pytest.mark.parametrize("every", [0, -1, 2.5, True, "10"])
    def test_refuses_a_cadence_that_is_no_number_of_steps(self, every):
        with pytest.raises(InvalidArgument, match="every is a number of optimizer steps"):
            Cadence(every=every)

    @pytest.mark.parametrize("budget", [0, -0.1, 1.5])
    def test_refuses_a_budget_that_is_no_share(self, budget):
        with pytest.raises(InvalidArgument, match="share of wall time"):
            Cadence(budget=budget)


def zoomed(cadence, cost_s=0.03, slow_s=0.06, step_s=0.1, samples=ZOOM_SAMPLES):
    """Zoom in and return the gaps after so many samples, and which of these took the slow tier."""
    assert cadence.zoom_in()
    gaps, slow = [], []
    for _ in range(samples):
        slow.append(cadence.is_slow)
        cost = slow_s if cadence.is_slow else cost_s
        gaps.append(cadence.next_gap(Spent(cost, step_s, slow[-1], num_steps=ZOOM_GAP)))
    return gaps, slow


class TestZoomingIn:
    def test_is_four_samples_at_uneven_distances_and_every_second_one_is_slow(self):
        cadence = Cadence(budget=BUDGET)
        usual = settle(cadence, 0.03, 0.1)
        gaps, slow = zoomed(cadence)
        assert gaps[:-1] == [4, 5, 4]
        assert slow in ([True, False] * 2, [False, True] * 2)
        assert not cadence.is_zoomed_in
        assert gaps[-1] == FOLLOW_UP_GAP > usual

    def test_is_followed_by_a_sample_48_steps_later(self):
        cadence = Cadence(budget=BUDGET)
        usual = settle(cadence, 0.1, 0.1)
        assert zoomed(cadence, 0.1, 0.1)[0][-1] == FOLLOW_UP_GAP < usual
        assert sample(cadence, 0.1, 0.1) > usual

    def test_is_followed_by_a_whole_burst_if_there_is_one(self):
        cadence = Cadence(budget=BUDGET)
        settle(cadence, 0.1, 0.1)
        zoomed(cadence, 0.1, 0.1)
        cadence.burst(steps=30, every=10)
        gaps = [sample(cadence, 0.1, 0.1) for _ in range(3)]
        assert gaps[:2] == [10, 10]
        assert gaps[2] > 10

    def test_never_makes_samples_rarer(self):
        cadence = Cadence(every=5)
        cadence.burst(steps=1000, every=500)
        slow = 0
        for _ in range(250):
            slow += cadence.is_slow
            assert sample(cadence, 0.1, 0.1) == 5
        assert slow == 200 + 5

    def test_lasts_two_samples_longer_whenever_there_is_a_reason(self):
        cadence = Cadence(budget=BUDGET)
        settle(cadence, 0.03, 0.1, samples=400)
        zoomed(cadence, samples=ZOOM_SAMPLES - 1)
        assert cadence.zoom_in()
        gaps = [sample(cadence, 0.03, 0.1) for _ in range(2)]
        assert gaps[0] <= 5 < gaps[1]

    def test_leaves_room_for_another_one_in_a_short_run(self):
        cadence = Cadence(budget=BUDGET)
        for _ in range(4):
            sample(cadence, 0.03, 0.1, is_slow=cadence.is_slow)
        assert cadence.zoom_in()
        num_samples = 0
        while cadence.is_zoomed_in:
            cadence.zoom_in()  # it becomes longer
            sample(cadence, 0.03, 0.1, is_slow=cadence.is_slow)
            num_samples += 1
        assert ZOOM_SAMPLES < num_samples < 3 * ZOOM_SAMPLES
        assert max(zoomed(cadence, slow_s=0.03)[0][:2]) == 5

    @pytest.mark.parametrize("room", [0.0, 1.0, 2.0, 2.9, 3.1, 20.0])
    def test_is_whole_or_refused(self, room):
        """A part of a zoom would neither last as long as rules hold nor lead to the frames that follow a refused one."""
        cadence = Cadence(budget=BUDGET)
        settle(cadence, 0.03, 0.1, samples=400)
        zoomed(cadence)
        settle(cadence, 0.03, 0.1, samples=5)
        slow_s = 0.06
        cadence._zoomed_s = ZOOM_SHARE * BUDGET * cadence._elapsed_s - room * slow_s
        if room < ZOOM_SAMPLES / 2 * (0.03 + slow_s) / slow_s:
            assert cadence.lacks_room
            assert not cadence.zoom_in()
            return
        gaps, slow = zoomed(cadence)
        assert max(gaps[:-1]) <= ZOOM_GAP + 1
        assert sum(slow) == ZOOM_SAMPLES / 2

    def test_is_saved_by_the_gaps_that_follow(self):
        cadence = Cadence(budget=BUDGET)
        settle(cadence, 0.03, 0.1)
        zoomed(cadence, slow_s=0.03)
        gaps = [settle(cadence, 0.03, 0.1, samples=1) for _ in range(40)]
        assert max(gaps) == 60
        assert gaps[-1] == 30

    def test_does_not_show_the_speed_of_a_run_with_pauses(self):
        cadence = Cadence(budget=BUDGET)
        settle(cadence, 0.03, 0.1)
        zoomed(cadence, slow_s=0.03, step_s=0.02)  # between two pauses
        assert max(settle(cadence, 0.03, 0.1, samples=1) for _ in range(4)) <= 61

    @pytest.mark.parametrize("lag", [1, 2])
    def test_costs_a_fifth_of_the_budget_however_long_something_stirs(self, lag):
        cadence, costs, step, gap = Cadence(budget=BUDGET, lag=lag), [0.0] * 100_000, 0, 0
        unknown, zoomed_s = deque([(0.0, False)] * lag), 0.0
        while step < len(costs):
            cadence.zoom_in()
            is_slow, is_zoomed = cadence.is_slow, cadence.is_zoomed_in
            costs[step] = 0.012 if is_slow else 0.004
            zoomed_s += costs[step] * is_zoomed
            unknown.append((costs[step], is_slow))
            cost_s, was_slow = unknown.popleft()
            gap = cadence.next_gap(Spent(cost_s, 0.001 * (step > 0), was_slow, gap))
            step += gap
        assert 0.8 * ZOOM_SHARE < zoomed_s / (BUDGET * 0.001 * len(costs)) < 1.1 * ZOOM_SHARE
        assert sum(costs) - lag * 0.012 < 0.01 * 0.001 * len(costs) + 1e-9  # the newest samples are not known yet

    @pytest.mark.parametrize("lag", [1, 2])
    def test_is_charged_for_its_own_samples(self, lag):
        cadence, unknown = Cadence(budget=BUDGET, lag=lag), deque([(0.0, False)] * lag)
        for number in range(40):
            if number == 20:
                assert cadence.zoom_in()
            unknown.append((1.0 if cadence.is_zoomed_in else 0.03, cadence.is_slow))
            cost_s, was_slow = unknown.popleft()
            cadence.next_gap(Spent(cost_s, 0.1, was_slow, cadence.gap))
        assert cadence._zoomed_s == ZOOM_SAMPLES * 1.0 + 0.03

    def test_does_not_come_at_a_fixed_interval_nor_in_a_burst_nor_where_samples_are_as_near(self):
        assert not Cadence(every=20).zoom_in()
        bursting = Cadence()
        bursting.burst(steps=12, every=2)
        assert not bursting.zoom_in()
        near = Cadence()
        assert settle(near, 0.001, 0.1) <= ZOOM_GAP
        assert not near.zoom_in()

    def test_is_not_longer_after_a_burst_that_another_one_replaced(self):
        cadence = Cadence(budget=0.5)
        settle(cadence, 0.001, 1e-4)
        assert cadence.zoom_in()
        cadence.burst(steps=11, every=1)
        cadence.burst(steps=20, every=5)
        num_zoomed = 0
        while cadence.is_zoomed_in:
            num_zoomed += 1
            sample(cadence, 0.0, 1e-4)
        assert num_zoomed <= 20 // 5 + ZOOM_SAMPLES

    def test_gives_way_to_a_burst(self):
        cadence = Cadence(budget=BUDGET)
        settle(cadence, 0.03, 0.1)
        assert cadence.zoom_in()
        cadence.burst(steps=3, every=1)
        assert [sample(cadence, 0.03, 0.1) for _ in range(2)] == [1, 1]
