"""What holds for every way to train."""

import shutil

import pytest
import torch

from tests.setups.every import SETUPS
from tests.setups.harness import (
    METRICS,
    answer,
    assert_measured_as,
    attached_twice,
    copied,
    seen_plainly,
    unwatched,
    watched,
)
from tests.setups.matrix import BIT_EQUAL, CLEAN, COPIES, FAMILIES, GRAPHS, IN_PART, YES, Cell

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.* is deprecated:FutureWarning"),
]


def wherever_possible(*values):
    """A parameter set, skipped on a machine that cannot run its set-up."""
    program = values[0].needs_program
    absent = bool(program) and shutil.which(program) is None
    return pytest.param(*values, marks=pytest.mark.skipif(absent, reason=f"{values[0]} needs {program}"))


@pytest.mark.parametrize("setup", [wherever_possible(setup) for setup in SETUPS], ids=str)
class TestEverySetup:
    def test_trains_as_without_tsemon(self, setup, matrix):
        plain = unwatched(setup)  # first: of some things torch warns once in a process
        for every in (1, 2):
            outcome = watched(setup, every)
            assert outcome.differs_from(plain) == []
            assert outcome.warns_beyond(plain) == set()
            assert outcome.status.faults == ()
        matrix.record(setup, BIT_EQUAL, Cell(YES))

    def test_is_seen_block_by_block(self, setup):
        assert len(watched(setup, 1).status.blocks) == setup.num_blocks

    @pytest.mark.parametrize("family", FAMILIES)
    def test_is_measured_or_told_why_not(self, setup, family, matrix):
        matrix.record(setup, family, answer(setup, family, watched(setup, 1)))

    def test_is_left_as_it_was_found(self, setup, matrix):
        traces, (first, second) = attached_twice(setup)
        assert traces == [[], []]
        assert first <= second, "attached again, it is measured again"
        matrix.record(setup, CLEAN, Cell(YES))

    def test_is_copied_and_pickled_while_armed_as_without_tsemon(self, setup, matrix):
        plain, plain_copies = copied(setup, watch=False)
        outcome, copies = copied(setup, watch=True)
        assert outcome.differs_from(plain) == []
        torch.testing.assert_close(copies, plain_copies, rtol=0, atol=0, equal_nan=True)
        matrix.record(setup, COPIES, Cell(YES))


@pytest.mark.parametrize(
    ("setup", "family"),
    [wherever_possible(setup, family) for setup in SETUPS for family in METRICS if family not in setup.partial],
    ids=str,
)
class TestWhatIsMeasuredWholly:
    def test_is_what_plain_hooks_measure(self, setup, family):
        plain = seen_plainly(setup)
        assert all("attention_entropy" in step for step in plain) or not setup.shows_weights
        assert_measured_as(plain, watched(setup, 1).frames, family, may_lack=family in setup.lacks)


@pytest.mark.parametrize("setup", [wherever_possible(setup) for setup in SETUPS if GRAPHS in setup.columns], ids=str)
class TestACompiledSetup:
    def test_is_compiled_to_the_same_graphs(self, setup, matrix):
        plain = unwatched(setup).num_graphs
        more = [watched(setup, every).num_graphs - plain for every in (1, 2)]
        assert plain > 0
        assert min(more) >= 0
        assert max(more) == bool(setup.more_graphs)
        matrix.record(setup, GRAPHS, Cell(IN_PART if setup.more_graphs else YES, setup.more_graphs))


@pytest.mark.parametrize("setup", [wherever_possible(setup) for setup in SETUPS], ids=str)
class TestTheDocument:
    def test_says_what_was_seen(self, setup, matrix):
        """The last of this file: by now the others have recorded it."""
        matrix.assert_documented(setup)
