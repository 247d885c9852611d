"""What holds for every way to train. A test file has these classes, and its SETUPS, each of which they try in turn."""

import pytest
import torch

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
from tests.setups.matrix import BIT_EQUAL, CLEAN, COPIES, FAMILIES, YES, Cell

quietly = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.* is deprecated:FutureWarning"),
]


class TestEverySetup:
    pytestmark = quietly

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

    def test_is_measured_as_by_plain_hooks(self, setup):
        plain = seen_plainly(setup)
        assert all("attention_entropy" in step for step in plain) or not setup.shows_weights
        for family in METRICS.keys() - {*setup.partial}:
            assert_measured_as(plain, watched(setup, 1).frames, family, may_lack=family in setup.lacks)

    @pytest.mark.once_per_kind
    def test_is_left_as_it_was_found(self, setup, matrix):
        traces, (first, second) = attached_twice(setup)
        assert traces == [[], []]
        assert first <= second, "attached again, it is measured again"
        matrix.record(setup, CLEAN, Cell(YES))

    @pytest.mark.once_per_kind
    def test_is_copied_and_pickled_while_armed_as_without_tsemon(self, setup, matrix):
        plain, plain_copies = copied(setup, watch=False)
        outcome, copies = copied(setup, watch=True)
        assert outcome.differs_from(plain) == []
        torch.testing.assert_close(copies, plain_copies, rtol=0, atol=0, equal_nan=True)
        matrix.record(setup, COPIES, Cell(YES))
