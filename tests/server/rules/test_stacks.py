"""A model with several stacks: rules look at each of them by itself, and never across their border."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tsemon.stacks import Stack, Stacks
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.program import View
from tsemon_server.rules.state import UnreadableState

from .definitions import AT_ONCE, events, rule

TWO = Stacks((Stack("encoder", 4), Stack("decoder", 4)))
FALLING = {
    "all": [
        {"value": [{"layers": "token_diversity"}, {"layers": "last"}], "below": 1e-3},
        {"value": [{"layers": "token_diversity"}, "log_odds", {"layers": "fall"}], "at_most": -0.03},
    ]
}
EVEN = [0.3] * 5
FLAT_LOW = [1e-4] * 5
COLLAPSE = [0.3, 0.03, 0.003, 0.0003, 0.00003]
ANY = {"value": [{"layers": "grad_norm"}], "in": "any", "above": 10}
HIGH = {"value": [{"layers": "x"}, {"layers": "max"}], "above": 10}


def view(step, encoder, decoder, stacks=TWO, metric="token_diversity", **scalars):
    return View(step, scalars, {metric: np.array([*encoder, *decoder], np.float32)}, stacks=stacks)


def at_once(when=None, **fields):
    return rule(when, **{"for": AT_ONCE, "clear_for": AT_ONCE}, **fields)


def told(rules, views):
    return [(event.kind, event.evidence.get("stack"), event.firing_step) for event in events(rules, views)]


class TestAFallOverDepth:
    def test_that_only_exists_across_the_border_fires_nothing(self):
        across = view(0, EVEN, FLAT_LOW)
        assert events([at_once(FALLING)], [across]) == []
        as_one_depth = replace(across, stacks=None)
        assert [event.kind for event in events([at_once(FALLING)], [as_one_depth])] == ["firing"]

    def test_within_a_stack_fires_and_names_it(self):
        (fired,) = events([at_once(FALLING)], [view(0, EVEN, COLLAPSE)])
        assert fired.evidence["stack"] == "decoder"
        assert fired.summary.startswith("The loss is high (decoder): token_diversity of the last layer is 3e-05")

    def test_is_that_of_the_stack_alone(self):
        alone = View(0, {}, {"token_diversity": np.array(COLLAPSE, np.float32)})
        (of_model,), (of_stack,) = (events([at_once(FALLING)], [one]) for one in (alone, view(0, EVEN, COLLAPSE)))
        assert [c["seen"] for c in of_model.evidence["conditions"]] == [
            c["seen"] for c in of_stack.evidence["conditions"]
        ]

    def test_of_one_stack_and_the_end_of_another_are_no_alert_together(self):
        assert events([at_once(FALLING)], [view(0, [*COLLAPSE[:4], 0.3], FLAT_LOW)]) == []


class TestABuiltInRule:
    def views(self, encoder, decoder):
        similar = [0.6] * 10
        layers = {"token_diversity": [*encoder, *decoder], "centred_token_similarity": similar}
        arrays = {name: np.array(values, np.float32) for name, values in layers.items()}
        return [View(step, {}, arrays, stacks=TWO) for step in range(0, 40, 5)]

    def fired(self, encoder, decoder):
        found = events(PACK, self.views(encoder, decoder))
        return {event.rule.name: event.evidence.get("stack") for event in found if event.kind == "firing"}

    def test_raises_no_alert_for_a_fall_that_only_exists_across_the_border(self):
        assert "token-similarity-escalation" not in self.fired(EVEN, FLAT_LOW)

    def test_raises_it_for_a_fall_in_one_of_the_stacks(self):
        assert self.fired(COLLAPSE, EVEN)["token-similarity-escalation"] == "encoder"
        assert self.fired(EVEN, COLLAPSE)["token-similarity-escalation"] == "decoder"


class TestLayers:
    def grads(self, *values, **fields):
        return View(0, {}, {"grad_norm": np.array(values, np.float32)}, stacks=TWO, **fields)

    def test_are_named_by_their_stack_with_their_number_in_arrays(self):
        (fired,) = events([at_once(ANY)], [self.grads(1, 1, 1, 1, 1, 99, 1, 1)])
        (condition,) = fired.evidence["conditions"]
        assert (condition["layer"], condition["label"], condition["seen"]) == (5, "decoder 1", 99)
        assert fired.summary == "The loss is high (decoder): grad_norm (block 1 of the decoder) is 99 (above 10)."
        assert fired.evidence["layers"]["grad_norm"]["first"] == {
            "layer": 4,
            "block": 4,
            "label": "decoder 0",
            "value": 1,
        }

    def test_of_activations_begin_with_the_input_of_their_stack(self):
        high = at_once({"value": [{"layers": "token_diversity"}], "in": "any", "above": 0.5})
        (fired,) = events([high], [view(0, EVEN, [0.9, *EVEN[1:]])])
        assert fired.evidence["conditions"][0]["label"] == "decoder 0"
        assert fired.evidence["conditions"][0]["layer"] == 5

    def test_are_counted_within_a_stack(self):
        three = at_once({"value": [{"layers": "grad_norm"}], "in": {"layers": 3}, "above": 10})
        assert events([three], [self.grads(99, 99, 1, 1, 99, 99, 1, 1)]) == []
        assert len(events([three], [self.grads(1, 1, 1, 1, 99, 99, 99, 1)])) == 1

    def test_that_are_frozen_are_those_of_their_stack(self):
        low = at_once({"value": [{"layers": "grad_norm"}, "skip_frozen"], "in": "any", "below": 0.5})
        assert events([low], [self.grads(1, 1, 1, 1, 1, 0, 1, 1, frozen=frozenset({5}))]) == []
        (fired,) = events([low], [self.grads(1, 1, 1, 1, 1, 0, 1, 1, frozen=frozenset({1}))])
        assert fired.evidence["conditions"][0]["label"] == "decoder 1"

    def test_with_heads_are_those_of_their_stack(self):
        heads = np.ones((8, 2), np.float32)
        heads[6, 1] = 0.01
        sharp = at_once({"value": [{"heads": "attention_entropy"}, {"heads": "min"}], "in": "any", "below": 0.1})
        (fired,) = events([sharp], [View(0, {}, {}, {"attention_entropy": heads}, stacks=TWO)])
        assert fired.evidence["conditions"][0]["label"] == "decoder 2"


class TestARuleOnTheWholeRun:
    def test_has_one_alert_that_names_no_stack(self):
        frames = [view(step, EVEN, EVEN, loss=20.0) for step in range(3)]
        assert told([rule()], frames) == [("pending", None, None), ("firing", None, 2)]

    def test_shows_the_stack_in_which_its_further_numbers_are_known(self):
        bad = at_once(evidence={"first_bad": [{"layers": "nonfinite"}, {"layers": {"first_above": 0}}]})
        (fired,) = events([bad], [view(0, [0] * 5, [0, 0, 1, 1, 1], metric="nonfinite", loss=20.0)])
        assert (fired.evidence["stack"], fired.evidence["numbers"]) == ("decoder", {"first_bad": 2})


class TestAnAlert:
    """A rule has one at a time, about the stack that was first."""

    def frames(self, *pairs):
        return [view(step, [a] * 5, [b] * 5, metric="x") for step, (a, b) in enumerate(pairs)]

    def test_opens_once_for_stacks_that_fire_together(self):
        assert told([at_once(HIGH)], self.frames((99, 99), (99, 99))) == [("firing", "encoder", 0)]

    def test_goes_on_while_its_stack_fires(self):
        found = told([at_once(HIGH)], self.frames((99, 1), (99, 99), (99, 1)))
        assert found == [("firing", "encoder", 0)]

    def test_is_followed_by_one_about_the_stack_that_still_fires(self):
        found = events([at_once(HIGH)], self.frames((99, 1), (99, 99), (1, 99), (1, 1)))
        assert [(e.kind, e.evidence["stack"], e.firing_step, e.resolved_step) for e in found] == [
            ("firing", "encoder", 0, None),
            ("resolved", "encoder", 0, 2),
            ("firing", "decoder", 2, None),
            ("resolved", "decoder", 1, 3),
        ]
        assert found[2].evidence["held"] == {"since_step": 1, "samples": None, "steps": 1}

    def test_must_last_in_one_stack(self):
        lasting = rule(HIGH)
        found = told([lasting], self.frames((99, 1), (1, 99), (99, 1), (1, 99), (99, 1)))
        assert "firing" not in [kind for kind, *_ in found]

    def test_is_not_resolved_by_a_stack_that_was_never_met(self):
        nan = float("nan")
        found = told([at_once(HIGH)], self.frames((99, 1), (nan, 1), (nan, 1)))
        assert found == [("firing", "encoder", 0)]

    def test_needs_nothing_from_a_stack_that_lacks_the_metric(self):
        nan = float("nan")
        found = told([at_once(HIGH)], self.frames((nan, 99), (nan, 1)))
        assert found == [("firing", "decoder", 0), ("resolved", "decoder", 0)]


class TestTheStateOfARule:
    def test_is_the_loudest_of_all_stacks(self):
        evaluator = Evaluator([at_once(HIGH)])
        state = evaluator.start()
        evaluator.advance(state, view(0, [1] * 5, [99] * 5, metric="x"))
        assert [(status.state, status.judged_step) for status in evaluator.statuses(state)] == [("firing", 0)]


def walk(num_views, stacks, seed=0):
    draw = np.random.default_rng(seed)
    names = {"token_diversity": 10, "grad_norm": 8, "hidden_rms": 10, "update_norm": 8, "param_norm": 8}
    for number in range(num_views):
        layers = {name: draw.lognormal(0, 3, size).astype(np.float32) for name, size in names.items()}
        yield View(5 * number, {"loss": float(draw.normal(3, 2))}, layers, stacks=stacks)


class TestAStoredState:
    @pytest.mark.parametrize("stacks", [TWO, None], ids=["two stacks", "one stack"])
    def test_changes_nothing_between_any_two_frames(self, stacks):
        evaluator, found = Evaluator(PACK), []
        raw = evaluator.dump(evaluator.start())
        for one in walk(40, stacks):
            state = evaluator.load(raw)
            found += evaluator.advance(state, one)
            raw = evaluator.dump(state)
        assert found == events(PACK, walk(40, stacks))
        assert found

    def test_that_was_cut_off_is_refused(self):
        evaluator = Evaluator(PACK)
        state = evaluator.start()
        for one in walk(4, TWO):
            evaluator.advance(state, one)
        raw = evaluator.dump(state)
        for end in (1, 3, len(raw) // 2, len(raw) - 1):
            with pytest.raises(UnreadableState):
                evaluator.load(raw[:end])


class TestOneStack:
    def test_gives_the_same_alerts_whether_it_is_told_or_not(self):
        one = Stacks((Stack("decoder", 8),))
        walks = ([replace(v, layers=nine(v.layers)) for v in walk(60, stacks)] for stacks in (one, None))
        told_of, untold = (events(PACK, views) for views in walks)
        assert told_of == untold
        assert told_of
        assert "stack" not in json.dumps([event.evidence for event in told_of])


def nine(layers):
    """Activations of eight blocks."""
    return {name: values[: 9 if len(values) == 10 else 8] for name, values in layers.items()}
