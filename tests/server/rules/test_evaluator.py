"""From frames to alerts."""

import json
import math

import numpy as np
import pytest

from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.program import View
from tsemon_server.rules.rule import filled
from tsemon_server.rules.state import UnreadableState

from .definitions import changes, events, layers_view, loss_view, rule

HIGH, LOW, MIDDLE = 20.0, 1.0, 7.0
CLEAR = {"value": [{"scalar": "loss"}], "below": 5}


def views(losses, every=1):
    return [loss_view(place * every, loss) for place, loss in enumerate(losses)]


class TestAnAlert:
    def test_is_pending_at_once_and_fires_once_it_has_lasted(self):
        assert changes([rule()], views([LOW, HIGH, HIGH, HIGH, HIGH])) == [
            ("pending", 1, None, None),
            ("firing", 1, 3, None),
        ]

    def test_is_withdrawn_when_it_does_not_last(self):
        assert changes([rule()], views([HIGH, HIGH, LOW, LOW, LOW]))[1:] == [("withdrawn", 0, None, 4)]

    def test_forgives_a_gap_while_it_is_pending_but_counts_anew(self):
        assert changes([rule()], views([HIGH, HIGH, LOW, HIGH, HIGH, HIGH]))[1:] == [("firing", 0, 5, None)]

    def test_is_resolved_once_it_is_clear_for_as_long(self):
        found = changes([rule(clear=CLEAR)], views([*[HIGH] * 3, LOW, MIDDLE, LOW, LOW, LOW]))
        assert found[2:] == [("resolved", 0, 2, 7)]

    def test_may_be_resolved_sooner_than_it_fires(self):
        found = changes([rule(clear_for={"samples": 1})], views([*[HIGH] * 3, LOW]))
        assert found[2:] == [("resolved", 0, 2, 3)]

    def test_may_open_again(self):
        assert [kind for kind, *_ in changes([rule()], views([*[HIGH] * 3, *[LOW] * 3, *[HIGH] * 3]))] == [
            "pending",
            "firing",
            "resolved",
            "pending",
            "firing",
        ]

    def test_must_last_for_samples_and_steps(self):
        found = changes([rule(**{"for": {"samples": 2, "steps": 10}})], views([HIGH] * 5, every=4))
        assert found[1:] == [("firing", 0, 12, None)]

    def test_is_not_changed_by_what_was_not_measured(self):
        assert changes([rule()], views([HIGH, None, HIGH, math.nan, HIGH]))[1:] == [("firing", 0, 4, None)]
        assert changes([rule()], views([*[HIGH] * 3, *[None] * 9]))[2:] == []

    def test_is_not_changed_by_a_frame_that_was_read_before(self):
        assert changes([rule()], [*views([HIGH, HIGH]), *views([LOW, LOW])]) == [("pending", 0, None, None)]

    def test_waits_until_after_the_start(self):
        assert changes([rule(after={"steps": 4})], views([HIGH] * 9, every=2))[0] == ("pending", 4, None, None)
        assert changes([rule(after={"samples": 3})], views([HIGH] * 9, every=2))[0] == ("pending", 6, None, None)

    def test_is_neither_opened_nor_closed_while_a_guard_is_false(self):
        guarded = rule(only_while={"value": [{"scalar": "learning_rate"}], "above": 0})

        def view(step, loss, learning_rate):
            return View(step, {"loss": loss, "learning_rate": learning_rate})

        assert changes([guarded], [view(step, HIGH, 0.0) for step in range(9)]) == []
        firing = [view(step, HIGH, 0.1) for step in range(3)]
        assert len(changes([guarded], [*firing, *(view(step, LOW, 0.0) for step in range(3, 9))])) == 2
        assert len(changes([guarded], [*firing, *(view(step, LOW, 0.1) for step in range(3, 9))])) == 3

    def test_is_not_kept_back_by_a_guard_that_is_unknown(self):
        guarded = rule(only_while={"value": [{"scalar": "learning_rate"}], "above": 0})
        assert len(changes([guarded], views([HIGH] * 3))) == 2


class TestWhatAnAlertShows:
    @pytest.fixture
    def fired(self):
        collapse = rule(
            {
                "all": [
                    {"value": [{"layers": "token_diversity"}, {"layers": "last"}], "below": 0.01},
                    {"value": [{"layers": "grad_norm"}], "below": [{"scalar": "loss"}], "in": "any"},
                ]
            },
            name="collapse",
            evidence={"tau": [{"layers": "token_diversity"}, {"layers": "first"}], "none": [{"scalar": "missing"}]},
            advice="Try {tau}, not {none}.",
        )
        frames = [
            View(
                step,
                {"loss": HIGH},
                {"token_diversity": np.array([0.5, 0.1, 10.0**-step]), "grad_norm": np.array([30, 2])},
            )
            for step in range(8)
        ]
        return [event for event in events([rule(), collapse], frames) if event.kind == "firing"][-1]

    def test_is_a_sentence(self, fired):
        assert fired.summary == (
            "The loss is high: token_diversity of the last layer is 1e-05 (below 0.01); "
            "grad_norm (block 1) is 2 (below 20, loss)."
        )

    def test_has_a_title_with_its_block_and_step(self):
        high = {"value": [{"layers": "grad_norm"}], "above": 10, "in": "any"}
        named = rule({"all": [high]}, title="{block} is bad since step {step}")
        frames = [View(step, {}, {"grad_norm": np.array([1.0, 20.0 if step > 1 else 1.0])}) for step in range(8)]
        (fired,) = (event for event in events([named], frames) if event.kind == "firing")
        assert fired.summary == "1 is bad since step 2: grad_norm (block 1) is 20 (above 10)."

    def test_has_the_name_of_a_formula_that_is_evidence_too(self):
        rise = [{"scalar": "loss"}, {"over": [{"scalar": "grad_norm"}]}]
        named = rule({"all": [{"value": rise, "above": 1}, {"value": [{"scalar": "loss"}], "above": 1}]},
                     evidence={"relative_rise": rise, "height": [{"scalar": "loss"}]})  # fmt: skip
        frames = [View(step, {"loss": HIGH, "grad_norm": 2.0}) for step in range(8)]
        (fired,) = (event for event in events([named], frames) if event.kind == "firing")
        assert fired.summary == "The loss is high: relative rise is 10 (above 1); loss is 20 (above 1)."

    def test_is_each_value_with_what_it_was_held_against(self, fired):
        first, second = fired.evidence["conditions"]
        assert first == {"value": "token_diversity of the last layer", "seen": 1e-5, "below": 0.01, "holds": True}
        assert second == {
            "value": "grad_norm",
            "layer": 1,
            "block": 1,
            "seen": 2,
            "below": 20,
            "against": "loss",
            "holds": True,
        }

    def test_is_where_in_the_model_it_is(self, fired):
        layers = fired.evidence["layers"]["token_diversity"]
        assert layers["first"] == {"layer": 0, "block": None, "value": 0.5}
        assert layers["lowest"] == layers["last"] == {"layer": 2, "block": 1, "value": 1e-5}

    def test_is_how_it_came_there(self, fired):
        steps = [(row["step"], row["token_diversity of the last layer"]) for row in fired.evidence["window"]]
        assert steps == [(step, pytest.approx(10.0**-step)) for step in range(6)]

    def test_is_how_long_it_lasted(self, fired):
        assert fired.evidence["held"] == {"since_step": 3, "samples": 3, "steps": 2}

    def test_is_what_else_fires(self, fired):
        assert fired.evidence["also_firing"] == ["test"]

    def test_is_what_was_not_measured(self, fired):
        assert fired.evidence["not_measured"] == ["missing"]

    def test_is_advice_with_the_numbers_of_this_run(self, fired):
        assert fired.advice == {"text": "Try 0.5, not (not known).", "source": "s"}

    @pytest.mark.parametrize(
        ("advice", "text"),
        [
            ("Look at it. It is {known} by {missing}.", "Look at it."),
            ("It is {missing}. It is {known}.", "It is 0.5."),
            ("It is {missing}.", "It is (not known)."),
        ],
    )
    def test_is_advice_without_the_sentences_whose_numbers_are_not_known(self, advice, text):
        assert filled(advice, {"known": 0.5, "missing": None}) == text

    def test_is_plain_json(self, fired):
        json.dumps(fired.evidence, allow_nan=False)


class TestARuleThatCannotBeJudged:
    def test_is_unknown_until_it_can(self):
        evaluator = Evaluator([rule()])
        state = evaluator.start()
        assert [(s.state, s.judged_step) for s in evaluator.statuses(state)] == [("unknown", None)]
        evaluator.advance(state, loss_view(0, None))
        assert evaluator.statuses(state)[0].state == "unknown"
        evaluator.advance(state, loss_view(1, LOW))
        evaluator.advance(state, loss_view(2, None))
        assert [(s.state, s.judged_step) for s in evaluator.statuses(state)] == [("quiet", 1)]


MANY = [
    rule({"value": [{"scalar": "loss"}, {"z_score": 5}], "above": 3}, name="spike"),
    rule({"value": [{"scalar": "loss"}, {"over": [{"scalar": "loss"}, {"best": "lowest"}]}], "above": 2}, name="worse"),
    rule(
        {"value": [{"layers": "x"}, {"over": [{"layers": "x"}, {"start": "median"}]}], "above": 2, "in": "any"},
        name="x",
    ),
    rule(
        {"condition": {"value": [{"layers": "x"}, {"layers": "max"}], "above": 1}, "in_last": 5, "at_least": 2},
        name="k",
    ),
    rule({"value": [{"steps_in": {"value": [{"scalar": "loss"}], "above": 0}}], "above": 9}, name="long"),
]


def walk(num_views, seed=0):
    draw = np.random.default_rng(seed)
    return [View(5 * i, {"loss": float(draw.normal(1, 2))}, {"x": draw.normal(size=4)}) for i in range(num_views)]


class TestAState:
    def test_that_is_stored_between_all_frames_changes_nothing(self):
        evaluator, found = Evaluator(MANY), []
        raw = evaluator.dump(evaluator.start())
        for view in walk(60):
            state = evaluator.load(raw)
            found += evaluator.advance(state, view)
            raw = evaluator.dump(state)
        assert found == events(MANY, walk(60))
        assert len(found) > 10

    def test_does_not_grow(self):
        evaluator = Evaluator(MANY)
        state, sizes = evaluator.start(), []
        for view in walk(200):
            evaluator.advance(state, view)
            sizes.append(len(evaluator.dump(state)))
        assert max(sizes) == max(sizes[:20])

    def test_of_other_rules_gives_what_they_share(self):
        """So a rule that is edited goes on, and the others do not notice."""
        first, then = walk(60)[:30], walk(60)[30:]
        before, after = Evaluator(MANY), Evaluator([rule(name="new"), *reversed(MANY[1:])])
        state = before.start()
        for view in first:
            before.advance(state, view)
        state = after.load(before.dump(state))
        found = [event for view in then for event in after.advance(state, view) if event.rule.name != "new"]
        expected = [e for e in events(MANY, walk(60)) if e.rule.name != "spike" and e.evidence["step"] >= then[0].step]
        assert [(e.rule.name, e.kind, e.pending_step) for e in sorted(found, key=str)] == [
            (e.rule.name, e.kind, e.pending_step) for e in sorted(expected, key=str)
        ]

    def test_of_the_version_before_has_all_but_what_is_new(self):
        evaluator = Evaluator(MANY)
        state = evaluator.start()
        for view in walk(30):
            evaluator.advance(state, view)
        raw = evaluator.dump(state)
        numbers = [raw[end - 8 : end] for end in range(len(raw), len(raw) - 9 * 8 * len(MANY), -8)][::-1]
        older = [number for place, number in enumerate(numbers) if place % 9 < 8]
        start = raw[: -9 * 8 * len(MANY)]
        assert evaluator.dump(evaluator.load(bytes([3]) + start[1:] + b"".join(older))) == raw

    @pytest.mark.parametrize("raw", [b"", b"\x07" * 40, b"\x01" + b"\xff" * 90])
    def test_that_is_none_is_refused(self, raw):
        with pytest.raises(UnreadableState):
            Evaluator(MANY).load(raw)

    def test_that_is_cut_is_refused(self):
        evaluator = Evaluator(MANY)
        state = evaluator.start()
        for view in walk(10):
            evaluator.advance(state, view)
        with pytest.raises(UnreadableState):
            evaluator.load(evaluator.dump(state)[:-40])


class TestRules:
    def test_that_are_many_share_what_they_compute(self):
        one = Evaluator([rule()])
        two = Evaluator([rule(), rule(name="other")])
        assert len(two.start().cells) == len(one.start().cells)

    def test_on_the_clock_are_apart(self):
        rules = [rule(), rule("silent_seconds > 9", "silent", on="clock")]
        assert [r.name for r in Evaluator(rules).rules] == ["test"]
        assert [r.name for r in Evaluator(rules, on="clock").rules] == ["silent"]

    def test_do_not_mind_numbers_without_bound(self):
        wild = rule({"value": [{"layers": "x"}, "exp10", {"times": [{"layers": "x"}]}, {"layers": "max"}], "above": 1})
        assert len(changes([wild], [layers_view(step, x=[math.inf, 1e30, -math.inf]) for step in range(4)])) == 2
