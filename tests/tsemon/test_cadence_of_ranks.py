"""Ranks that follow a budget choose the same steps, whatever the time that each of them takes."""

from tests import processes
from tests.tsemon import pacing

SIZE = 2


def test_ranks_sample_the_same_steps_though_one_is_late_for_the_first(tmp_path):
    with processes.ranks(pacing.main, SIZE, tmp_path):
        pass
    first, second = processes.seen_by_ranks(SIZE, tmp_path)
    least_s = min(seen.pop("seconds") for seen in (first, second))
    # Different costs could still lead to equal gaps by chance.
    assert first == second
    assert not first["faults"]
    assert first["sampled"][:2] == [0, 10]
    assert len(first["costs"]) == len(first["sampled"]) >= 4
    # The steps of an interval belong to its time: a pause is not multiplied with the steps of the next interval.
    assert pacing.PAUSE_S < sum(step_s * num_steps for _, step_s, _, num_steps in first["costs"]) < least_s
