"""Training on two processes over gloo, on the CPU."""

import subprocess

import pytest
import torch

from tests.processes import Program
from tests.setups import ranks
from tests.setups.harness import METRICS, answer, assert_measured_as, seen_plainly
from tests.setups.matrix import BIT_EQUAL, CLEAN, FAMILIES, GRADIENTS, IN_PART, OUTPUTS, UPDATES, YES, Cell
from tests.setups.ranks import SETUPS

__all__ = ["SETUPS"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory, request):
    """What each rank saw: one pair of processes goes through all set-ups that are tried."""
    folder = tmp_path_factory.mktemp("ranks")
    names = {setup.name for setup in SETUPS if request.config.option.all or not setup.like}
    started = [Program(ranks.work, rank, str(folder), names, stderr=subprocess.PIPE) for rank in range(ranks.NUM_RANKS)]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    # Written by this very test: classes of ours are in it.
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(ranks.NUM_RANKS)]


def told(setup, rank):
    """What a rank above 0 is told that trains one model with others and attached alone."""
    if rank == 0 or setup.whole is not None or setup.build is ranks.pipeline:
        return []
    return [
        "this process is rank 1 of 2 that train one model together, and attach() got no process_group: it measures its own "
        "batches and sends frames of its own. Pass attach(process_group=...) on all ranks, or attach on "
        "rank 0 only"
    ]


class TestOnSeveralProcesses:
    def test_every_rank_trains_as_without_tsemon(self, setup, seen, matrix):
        for number, rank in enumerate(seen):
            for outcome in rank[setup.name].watched.values():
                assert outcome.differs_from(rank[setup.name].unwatched) == []
                assert outcome.warns_beyond(rank[setup.name].unwatched) == set()
                assert outcome.status is None or [*outcome.status.faults] == told(setup, number)
        matrix.record(setup, BIT_EQUAL, Cell(YES))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_rank_that_writes_measures_or_tells_why_not(self, setup, family, seen, matrix):
        cells = [answer(setup, family, seen[rank][setup.name].watched[1]) for rank in setup.writing]
        if len({*cells}) > 1:
            assert family in setup.lacks, f"the ranks answer alike: {cells}"
            cells = [Cell(IN_PART, "; ".join(cell.words for cell in cells if cell.words))]
        matrix.record(setup, family, cells[0])

    def test_what_is_measured_is_what_plain_hooks_measure_on_that_rank_or_on_the_whole(self, setup, seen):
        for rank in setup.writing:
            on_rank = seen[rank][setup.name]
            plain = on_rank.plain if setup.whole is None else seen_plainly(setup.whole)
            for family in METRICS.keys() - {*setup.partial}:
                may_lack = family in (*setup.lacks, OUTPUTS)  # only a pipeline's last stage has outputs
                assert_measured_as(plain, on_rank.watched[1].frames, family, may_lack)

    def test_frames_come_from_the_ranks_that_write(self, setup, seen):
        writing = tuple(rank for rank, on_rank in enumerate(seen) if on_rank[setup.name].watched[1].frames)
        assert writing == setup.writing

    def test_every_rank_is_left_as_it_was_found(self, setup, seen, matrix):
        for rank in seen:
            traces, names = rank[setup.name].visits
            assert traces == [[], []]
            assert names[:1] == names[1:], "attached again, it measures the same again"
        matrix.record(setup, CLEAN, Cell(YES))


class TestDataParallelTraining:
    @pytest.mark.parametrize("family", [GRADIENTS, UPDATES])
    def test_has_the_gradients_and_updates_of_one_process_with_the_whole_batch(self, seen, family):
        setups = [setup for setup in SETUPS if setup.build is ranks.data_parallel and setup.name in seen[0]]
        assert setups
        for setup in setups:
            for rank in setup.watching:
                assert_measured_as(seen_plainly(ranks.HALVES), seen[rank][setup.name].watched[1].frames, family)
