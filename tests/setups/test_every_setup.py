"""What holds for every way to train."""

import re

import pytest
import torch

from tests.setups.every import SETUPS
from tests.setups.harness import (
    Footprint,
    attach,
    copied,
    frames_in,
    seeded,
    seen_plainly,
    unwatched,
    values,
    watched,
)
from tests.setups.matrix import (
    ATTENTION,
    BIT_EQUAL,
    CLEAN,
    COPIES,
    FAMILIES,
    GRADIENTS,
    GRAPHS,
    HIDDEN_STATES,
    UPDATES,
    YES,
    Cell,
    family_cell,
)

METRICS = {
    HIDDEN_STATES: ("token_similarity", "hidden_rms"),
    ATTENTION: ("attention_entropy",),
    GRADIENTS: ("grad_norm",),
    UPDATES: ("update_norm", "update_ratio"),
}
TOLERANCE = {HIDDEN_STATES: 1e-5, ATTENTION: 1e-4, GRADIENTS: 1e-5, UPDATES: 2e-3}
"""Relative. Sums are in float32; the fused kernel and the softmax in plain sight round differently; an update is told
from weights a thousand times larger, themselves rounded to float32."""


@pytest.mark.parametrize("setup", SETUPS, ids=str)
class TestEverySetup:
    def test_trains_as_without_tsemon(self, setup, matrix):
        for every in (1, 2):
            outcome = watched(setup, every)
            assert outcome.differs_from(unwatched(setup)) == []
            assert outcome.status.faults == ()
        matrix.record(setup, BIT_EQUAL, Cell(YES))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_is_measured_or_told_why_not(self, setup, family, matrix):
        """The last frame: what must be learned about a model is learned by the first."""
        frame, status = watched(setup, 1).frames[-1], watched(setup, 1).status
        cell = family_cell([values(frame, metric) for metric in METRICS[family]], METRICS[family], status.not_measured)
        assert re.search(setup.lacks.get(family, "^$"), cell.words)
        matrix.record(setup, family, cell)

    def test_is_left_as_it_was_found(self, setup, matrix, tmp_path):
        training = seeded(setup.build)
        training.step()
        before = Footprint(training)
        names = []
        for attempt in "ab":
            with attach(training, tmp_path / attempt) as monitor:
                training.step()
                monitor.step()
                training.step()
                monitor.step()
            assert Footprint(training) == before
            assert monitor.status.faults == ()
            names.append({name for frame in frames_in(tmp_path / attempt) for name in frame["layers"]})
        assert names[0] <= names[1], "attached again, it is measured again"
        matrix.record(setup, CLEAN, Cell(YES))

    def test_is_copied_and_pickled_while_armed_as_without_tsemon(self, setup, matrix):
        plain, plain_copies = copied(setup, watch=False)
        outcome, copies = copied(setup, watch=True)
        assert outcome.differs_from(plain) == []
        torch.testing.assert_close(copies, plain_copies, rtol=0, atol=0, equal_nan=True)
        matrix.record(setup, COPIES, Cell(YES))


@pytest.mark.parametrize(
    ("setup", "family"),
    [(setup, family) for setup in SETUPS for family in FAMILIES if family not in setup.lacks],
    ids=str,
)
class TestWhatIsMeasuredWholly:
    def test_is_what_plain_hooks_measure(self, setup, family):
        for frame, plain in zip(watched(setup, 1).frames, seen_plainly(setup), strict=True):
            for metric in METRICS[family]:
                measured, expected = values(frame, metric), plain.get(metric)
                if measured is not None and expected is not None:
                    torch.testing.assert_close(measured, expected, rtol=TOLERANCE[family], atol=1e-7)


@pytest.mark.parametrize("setup", [setup for setup in SETUPS if GRAPHS in setup.columns], ids=str)
class TestACompiledSetup:
    def test_is_compiled_to_the_same_graphs(self, setup, matrix):
        assert unwatched(setup).num_graphs > 0
        assert watched(setup, 1).num_graphs == watched(setup, 2).num_graphs == unwatched(setup).num_graphs
        matrix.record(setup, GRAPHS, Cell(YES))
