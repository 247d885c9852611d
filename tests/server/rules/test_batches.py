"""Frames that are read together: the same as one after the other."""

import math
from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsemon.errors import InvalidRules
from tsemon.stacks import Stack, Stacks
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.program import View

from .definitions import AT_ONCE, layers_view, loss_view, rule
from .test_printing import conditions, values
from .traces import read_all

TWO = Stacks((Stack("encoder", 2), Stack("decoder", 2)))
WILD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e38, -1.0]
SCALARS = "loss", "val/loss", "update_alignment", "silent_seconds", "own"
LAYERS = "grad_norm", "token_diversity", "my norm", "loss"
HEADS = "attention_entropy", "h"


def walk(seed, num_frames=24):
    """Frames with holes: metrics come and go, some values are not finite, the depth may change, steps may repeat."""
    draw = np.random.default_rng(seed)
    stacks, wild, step, depth = (TWO if seed % 4 == 0 else None), draw.random() * 0.2, 0, 4

    def array(*shape):
        values = draw.lognormal(0, 3, shape).round(1)
        is_wild = draw.random(shape) < wild
        values[is_wild] = draw.choice(WILD, is_wild.sum())
        return values.astype(np.float32)

    def some(names, *shape):
        return {name: array(*shape) for name in names if draw.random() < 0.8}

    for _ in range(num_frames):
        step += int(draw.integers(0, 6))
        depth = int(draw.integers(1, 6)) if stacks is None and draw.random() < 0.1 else depth
        scalars = {name: float(value[0]) for name, value in some(SCALARS, 1).items()}
        frozen = frozenset(draw.integers(0, 5, 2).tolist()) if seed % 3 == 0 else frozenset()
        yield View(step, scalars, some(LAYERS, depth), some(HEADS, depth, 2), frozen, stacks)


def told(events):
    """All that is to be seen of them."""
    return [repr(replace(event, rule=None)) + event.rule.name for event in events]


def read_in(evaluator, views, sizes):
    """The events and the last state, of frames that are read so many at a time, in turns."""
    state, found, views, turns = evaluator.start(), [], iter(views), cycle(sizes)
    while chunk := [*islice(views, next(turns))]:
        found += evaluator.read([(state, chunk)])[0]
    return told(found), evaluator.dump(state)


@st.composite
def few_samples(draw, trees):
    """A definition that remembers no more samples than the walk has."""

    def shortened(tree):
        if isinstance(tree, dict):
            short = {"samples", "z_score"}
            return {k: min(v, 4) if k in short and isinstance(v, int) else shortened(v) for k, v in tree.items()}
        return [*map(shortened, tree)] if isinstance(tree, list) else tree

    return shortened(draw(trees))


def may_be_a_rule(tree):
    try:
        rule(tree)
    except InvalidRules:
        return False
    return True


CONDITIONS = few_samples(conditions()).filter(may_be_a_rule)


class TestFramesThatAreReadTogether:
    @settings(max_examples=100, deadline=None)
    @given(CONDITIONS, CONDITIONS, CONDITIONS, few_samples(values(0)), st.integers(0, 999), st.integers(2, 9))
    def test_give_what_they_give_one_by_one(self, when, clear, guard, seen, seed, size):
        rules = [
            rule(when, clear=clear, **{"for": {"samples": 1 + seed % 3}}, evidence={"seen": seen}),
            rule(
                clear, name="other", only_while=guard, after={"samples": seed % 4, "steps": seed % 7}, clear_for=AT_ONCE
            ),
        ]
        evaluator = Evaluator(rules)
        expected = read_in(evaluator, walk(seed), [1])
        assert read_in(evaluator, walk(seed), [100]) == expected
        assert read_in(evaluator, walk(seed), [size, 1, 3]) == expected

    @pytest.mark.parametrize("trace", read_all(), ids=lambda trace: trace.name)
    def test_of_recorded_runs_are_judged_as_one_by_one(self, trace):
        evaluator = Evaluator(PACK)
        expected = read_in(evaluator, trace.views, [1])
        for sizes in ([3], [64], [10_000]):
            assert read_in(evaluator, trace.views, sizes) == expected

    def test_may_be_of_several_attempts(self):
        evaluator = Evaluator(PACK)
        walks = [[*walk(seed)] for seed in range(12)]
        states = [evaluator.start() for _ in walks]
        halves = [(slice(0, 9 + n), slice(9 + n, None)) for n in range(len(walks))]
        found = [[] for _ in walks]
        for half in (0, 1):
            each = [(state, views[part[half]]) for state, views, part in zip(states, walks, halves, strict=True)]
            for all_events, events in zip(found, evaluator.read(each), strict=True):
                all_events += events
        alone = [read_in(evaluator, views, [1]) for views in walks]
        assert [(told(events), evaluator.dump(state)) for events, state in zip(found, states, strict=True)] == alone
        assert any(events for events, _ in alone)

    def test_may_be_none(self):
        evaluator = Evaluator(PACK)
        assert evaluator.read([]) == []
        assert evaluator.read([(evaluator.start(), [])]) == [[]]

    def test_are_shown_as_they_were_at_the_frame_that_fired(self):
        """Not as they are at the end of what was read: the window, and the other alerts that fire."""
        losses = [1.0, 2.0, 20.0, 3.0, 40.0]
        high, higher = (
            rule(**{"for": AT_ONCE, "clear_for": AT_ONCE}),
            rule({"value": [{"scalar": "loss"}], "above": 30}, name="higher", **{"for": AT_ONCE}),
        )
        evaluator = Evaluator([high, higher])
        events = evaluator.read([(evaluator.start(), [loss_view(*at) for at in enumerate(losses)])])[0]
        fired = [event for event in events if event.kind == "firing"]
        assert [[row["loss"] for row in event.evidence["window"]] for event in fired] == [losses[:3], losses, losses]
        assert [event.evidence["also_firing"] for event in fired] == [[], ["higher"], ["test"]]


class TestAStateWhoseFramesCannotBeRead:
    def test_is_as_before(self):
        evaluator = Evaluator(PACK)
        frames = [*walk(1), replace([*walk(1)][-1], step=10**6, scalars={"update_alignment": "no number"})]
        state, other = evaluator.start(), evaluator.start()
        evaluator.read([(state, frames[:9])])
        before = [evaluator.dump(one) for one in (state, other)]
        with pytest.raises(ValueError, match="no number"):
            evaluator.read([(other, frames[:3]), (state, frames[9:])])
        assert [evaluator.dump(one) for one in (state, other)] == before


class TestEvidence:
    def test_names_no_bound_for_a_layer_that_the_bound_lacks(self):
        uneven = rule(
            {
                "any": [
                    {"value": [{"layers": "x"}], "above": [{"layers": "y"}], "in": "any"},
                    {"value": [{"scalar": "loss"}], "above": 0},
                ]
            },
            **{"for": AT_ONCE},
        )
        evaluator = Evaluator([uneven])
        view = replace(layers_view(0, x=[1, 2, 3], y=[1]), scalars={"loss": 1.0})
        (fired,) = evaluator.advance(evaluator.start(), view)
        assert fired.evidence["conditions"][0]["above"] is None
