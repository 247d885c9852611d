"""All ranks zoom in at the same step, although only one of them has a sign of trouble. Each scenario runs once."""

from itertools import pairwise

import pytest

from tests import processes
from tests.tsemon import zooming
from tsemon.schedule import FOLLOW_UP_GAP
from tsemon.suspicion import SHARE_EVERY, TO_SAVE

SIZE = 2
FAULT = "contained in tsemon, training is not affected: ZeroDivisionError: division by zero"


def heard_after(step):
    """The step at which all ranks know of a sign in the loss of this step."""
    next_exchange = -(-(step + 1) // SHARE_EVERY) * SHARE_EVERY
    return next_exchange + SHARE_EVERY


def zoom_from(step, distances=(0, 4, 9, 13, 13 + FOLLOW_UP_GAP)):
    return [step + distance for distance in distances]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each rank saw in a scenario."""
    folder = tmp_path_factory.mktemp("zooming")
    with processes.ranks(zooming.main, SIZE, folder):
        pass
    of_ranks = processes.seen_by_ranks(SIZE, folder)
    return lambda scenario: [seen.get(scenario) for seen in of_ranks]


def steps_of(seen, since=91):
    return [step for step, *_ in seen["sampled"] if step >= since]


BURST = heard_after(zooming.BURST_AT)


class TestRanks:
    def test_zoom_in_at_the_same_steps_whichever_has_the_sign(self, seen):
        first, second = seen("training")
        assert first["sampled"] == second["sampled"]
        second_zoom = zoom_from(204 + 2 * SHARE_EVERY, (0, 5, 9, 14))
        assert steps_of(first) == [*zoom_from(131 + 1 + SHARE_EVERY), BURST, BURST + 1, *second_zoom]
        assert first["faults"] == second["faults"] == []

    def test_say_why(self, seen):
        first, second = seen("training")
        assert first["zooms"] == [2, heard_after(204), "the loss is not finite"]
        assert second["zooms"] == [2, heard_after(204), "rank 0 has a sign of trouble"]

    def test_sample_the_first_loss_that_is_not_finite_whatever_it_costs_and_count_a_sign_that_leads_to_no_zoom(
        self, seen
    ):
        first, second = seen("refused")
        assert steps_of(first) == steps_of(second) == [heard_after(131)]
        assert first["refusals"] == [1, heard_after(204), TO_SAVE, "rank 1 has a sign of trouble"]
        assert second["refusals"] == [1, heard_after(204), TO_SAVE, "the loss is not finite"]

    def test_share_bursts_at_a_fixed_interval_but_no_signs(self, seen):
        """One rank asks for 2 steps, the other for every second one of 3."""
        burst = [BURST, BURST + 1, BURST + 2]
        for each in seen("fixed_interval"):
            assert steps_of(each, 0) == [0, 50, 100, 150, 200, *burst]
            assert each["faults"] == []

    def test_share_a_burst_without_an_end(self, seen):
        for each in seen("endless_burst"):
            assert steps_of(each, BURST - 5) == [*range(BURST, zooming.STEPS)]
            assert each["faults"] == []

    def test_join_every_exchange_though_the_look_for_a_sign_fails(self, seen):
        first, second = seen("failing_sign")
        assert first["num_exchanges"] == second["num_exchanges"] == zooming.STEPS // SHARE_EVERY
        assert steps_of(first) == steps_of(second) == zoom_from(heard_after(131))
        for each in (first, second):
            assert each["faults"] == [FAULT]

    def test_zoom_in_without_a_pause_while_rank_0_knows_of_a_pending_alert(self, seen):
        first, second = seen("pending")
        begin = heard_after(zooming.PENDING[0] - 1)
        steps = steps_of(first)
        assert steps == steps_of(second)
        *gaps, follow_up_gap = [after - before for before, after in pairwise(steps)]
        assert set(pairwise(gaps)) == {(4, 5), (5, 4)}
        assert (steps[0], follow_up_gap) == (begin, FOLLOW_UP_GAP)
        assert 13 <= steps[-2] - heard_after(zooming.PENDING[-1] - 1) <= 13 + 5
        assert first["zooms"] == [1, begin, "onset is pending"]

    def test_prefer_a_sign_that_is_urgent(self, seen):
        first, second = seen("urgent")
        assert steps_of(first) == steps_of(second) == zoom_from(heard_after(137))
        assert first["zooms"] == [1, heard_after(137), "the loss is not finite"]

    def test_sample_the_same_steps_however_different_their_costs_signs_and_clocks(self, seen):
        first, second = seen("different_costs")
        assert first["sampled"] == second["sampled"]
        assert first["num_held_up"] > 0 == second["num_held_up"], "the maximum per hour is over in one rank alone"
        assert first["zooms"][0] == second["zooms"][0] > 10
        assert len({gap for _, gap, _ in first["sampled"]}) > 2
        assert first["faults"] == second["faults"] == [FAULT]

    def test_do_not_count_the_wait_for_a_late_rank_as_cost(self, seen):
        first, _ = seen("rank_1_is_late")
        assert first["cost_s"] < zooming.LATE_S / 2 < first["waited_s"]

    def test_have_no_exchange_on_its_way_once_closed(self, seen):
        assert all(each["is_over"] for each in seen("rank_1_is_late"))


class TestABrokenGroup:
    def test_holds_up_the_other_rank_once_at_most(self, seen):
        first, _ = seen("interrupted")
        assert first["num_exchanges"] == 3
        assert len(first["faults"]) == 1
        assert zooming.TIMEOUT_S / 2 < first["took_s"] < 3 * zooming.TIMEOUT_S

    def test_exchanges_nothing_and_zooms_in_no_more(self, seen):
        first, second = seen("interrupted")
        assert second["num_exchanges"] == 3
        assert steps_of(first) == steps_of(second) == []
        assert first["zooms"] is second["zooms"] is None

    @pytest.mark.parametrize("scenario", ["interrupted", "broken_on_the_way"])
    def test_begins_a_burst_that_it_could_not_share_alone(self, seen, scenario):
        first, second = seen(scenario)
        assert not [1 for before, after in pairwise(steps_of(first, 0)) if after == before + 1]
        assert [1 for before, after in pairwise(steps_of(second, 0)) if after == before + 1]

    def test_leaves_the_rest_training_when_a_rank_ends(self, seen):
        first, second = seen("rank_1_ends")
        assert second is None
        assert first["took_s"] < 10
        assert len(first["faults"]) == 1
        assert first["zooms"] is None
