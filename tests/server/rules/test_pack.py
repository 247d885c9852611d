"""The built-in rules on recorded trainings, on the clock, and on what was made up to try them."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import traces

from tsemon.schedule import FOLLOW_UP_GAP, ZOOM_GAP
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.program import View
from tsemon_server.rules.rule import FAMILIES, OWN_FAMILY
from tsemon_server.services.replay.traces import loss_scalars

from .definitions import rule as own_rule

ALERTS = Path(__file__).parents[3] / "docs/alerts.md"
RUNS = {trace.name: trace for trace in traces.read_all()}
FAILING = [name for name, trace in RUNS.items() if not trace.is_healthy and not trace.is_gray]
HEALTHY = [name for name, trace in RUNS.items() if trace.is_healthy]


def fired(views, rules=PACK, on="frame"):
    """(rule, step) of each alert, those that only inform left out."""
    evaluator = Evaluator(rules, on=on)
    state = evaluator.start()
    events = [event for view in views for event in evaluator.advance(state, view)]
    return [(e.rule, e.firing_step) for e in events if e.kind == "firing" and e.rule.severity != "info"]


def kinds(views, name):
    """(kind, step) of each change of the alert of one rule."""
    evaluator = Evaluator([one for one in PACK if one.name == name])
    state = evaluator.start()
    return [(event.kind, view.step) for view in views for event in evaluator.advance(state, view)]


def names(views, on="frame"):
    return {rule.name for rule, _ in fired(views, on=on)}


@functools.cache
def alarms(name):
    return fired(RUNS[name].views)


class TestThePack:
    def test_has_rules_of_every_family(self):
        assert {rule.family for rule in PACK} == {*FAMILIES} - {OWN_FAMILY}

    def test_is_described_rule_by_rule(self):
        described = re.findall(r"^### ([a-z-]+)$", ALERTS.read_text(), flags=re.MULTILINE)
        assert sorted(described) == sorted(rule.name for rule in PACK)

    def test_says_in_numbers_only_what_the_rules_say(self):
        """Each bound of a rule stands in its section."""
        sections = _sections()
        for rule in PACK:
            for bound in _bounds(rule.tree["when"]):
                assert re.search(rf"(?<![\d.e-]){re.escape(_written(bound))}(?![\d.]*\d)", sections[rule.name]), (
                    rule.name,
                    bound,
                )

    @pytest.mark.parametrize("rule", PACK, ids=lambda rule: rule.name)
    def test_is_described_in_the_words_of_the_rules(self, rule):
        """Severity, hold, origin, advice and source are those of the rule; a number is named where the alert fills it in."""
        described = _flat(_sections()[rule.name])
        assert described.startswith(f"{rule.severity.capitalize()}. {_held(rule)}")
        advice = re.sub(r"\{(\w+)\}", r"*\1*", rule.advice)
        assert described.endswith(f"Origin: {_flat(rule.origin)} Advice: {_flat(advice)} Source: {_flat(rule.source)}")


def _sections():
    """The text below the heading of each rule."""
    return dict(re.findall(r"^### ([a-z-]+)$(.*?)(?=^##|\Z)", ALERTS.read_text(), flags=re.MULTILINE | re.DOTALL))


def _flat(text):
    return " ".join(text.split())


def _held(rule):
    if rule.on == "clock":
        return "On the clock"
    return (
        f"Held for {rule.hold.samples} samples over {rule.hold.steps} steps."
        if rule.hold.steps
        else "Held for 1 sample."
    )


def _bounds(data):
    if isinstance(data, list):
        return [bound for item in data for bound in _bounds(item)]
    if not isinstance(data, dict):
        return []
    keys = ("above", "below", "at_least", "at_most")
    here = [data[key] for key in keys if isinstance(data.get(key), int | float) and data[key]]
    return here + [bound for key, item in data.items() if key not in keys for bound in _bounds(item)]


def _written(bound):
    text = f"{bound:g}"
    return re.sub(r"e([+-])0*", lambda match: "e" + match[1].replace("+", ""), text)


class TestRecordedTrainings:
    @pytest.mark.parametrize("name", HEALTHY)
    def test_that_are_healthy_raise_no_alarm(self, name):
        assert [(rule.name, step) for rule, step in alarms(name)] == []

    @pytest.mark.parametrize("name", FAILING)
    def test_that_fail_are_not_called_before_they_do(self, name):
        """`test_verdicts` looks at the failure that they are called for."""
        assert min(step for _, step in alarms(name)) >= RUNS[name].header["event_step"]


def zoomed(every, at, until):
    """Steps of samples that are `every` steps apart, with one zoom that begins soon after step `at`."""
    zoom = [at + 3 + gap for gap in (0, ZOOM_GAP, 2 * ZOOM_GAP + 1, 3 * ZOOM_GAP + 1)]
    follow_up = zoom[-1] + FOLLOW_UP_GAP
    return [*range(0, zoom[0], every), *zoom, follow_up, *range(follow_up + every, until, every)]


CADENCES = {f"every {gap} steps": range(0, 3000, gap) for gap in (5, 40, 200)}
CADENCES["every 200 steps and a zoom"] = zoomed(200, 1010, 3000)
at_each_cadence = pytest.mark.parametrize("steps", CADENCES.values(), ids=CADENCES)


def first_after(step, steps):
    return next(sample for sample in steps if sample >= step)


def noisy(num_samples, stuck_from=None, seed=0):
    """The input of the first block, from batches that differ, or one that no longer does and drifts as embeddings learn."""
    draw = np.random.default_rng(seed)
    for sample in range(num_samples):
        drift = 1e-6 * sample
        is_stuck = stuck_from is not None and sample >= stuck_from
        similarity, diversity = (0.7, 0.3) if is_stuck else (draw.normal(0.7, 0.02), draw.normal(0.3, 0.01))
        layers = {
            "batch_similarity": np.array([similarity + drift, 0.9]),
            "global_diversity": np.array([diversity + drift, 0.1]),
        }
        yield View(5 * sample, {"loss": 2.0}, layers)


class TestTheSameBatchAgainAndAgain:
    RULE = tuple(rule for rule in PACK if rule.name == "batch-repeats")

    @pytest.mark.parametrize("seed", range(5))
    def test_is_told(self, seed):
        ((_, step),) = fired(noisy(60, stuck_from=30, seed=seed), self.RULE)
        assert 150 < step < 200

    @pytest.mark.parametrize("seed", range(5))
    def test_is_not_what_differs(self, seed):
        assert fired(noisy(1000, seed=seed), self.RULE) == []

    def test_is_not_a_training_on_one_batch_on_purpose(self):
        """It is as still from the first step on, and gets stiller as the embeddings settle."""

        def settling():
            for sample in range(80):
                moved = 0.1 * (1 - 0.8**sample)
                layers = {"batch_similarity": np.array([0.5 + moved]), "global_diversity": np.array([0.3 + moved])}
                yield View(5 * sample, {}, layers)

        assert names(settling()) == set()

    def test_is_not_one_whose_samples_are_suddenly_near_each_other(self):
        """What drifts over hundreds of steps hardly does over four."""

        def drifting():
            gaps = [10, 80, 345, *[4] * 5, 200, 489, 478, 125, 175, 179, 171, 332, 239, 293, 192, *[4] * 7, 480]
            for step in np.cumsum([0, *gaps]).tolist():
                moved = 0.1 * (1 - math.exp(-step / 2000))
                layers = {"batch_similarity": np.array([0.5 + moved]), "global_diversity": np.array([0.3 + moved])}
                yield View(step, {}, layers)

        assert fired(drifting(), self.RULE) == []

    @pytest.mark.parametrize(
        ("steps", "is_held_back"), [((0, 10, 89, *range(339, 6000, 126)), True), (range(0, 2000, 50), False)]
    )
    def test_is_held_back_unless_samples_are_equally_far_apart(self, steps, is_held_back):
        draw = np.random.default_rng(0)
        evaluator = Evaluator(self.RULE)
        state = evaluator.start()
        for step in steps:
            similarity, diversity = draw.normal(0.7, 0.02), draw.normal(0.3, 0.01)
            layers = {"batch_similarity": np.array([similarity]), "global_diversity": np.array([diversity])}
            evaluator.advance(state, View(step, {}, layers))
        (status,) = evaluator.statuses(state)
        assert (status.state, status.waits_for, status.is_held_back) == ("quiet", "", is_held_back)

    def test_is_judged_after_14_samples_of_the_input_however_many_frames_lack_it(self):
        def settling():
            for frame in range(80):
                moved = 0.1 * (1 - 0.5 ** (frame // 2))
                layers = {"batch_similarity": np.array([0.5 + moved]), "global_diversity": np.array([0.3 + moved])}
                yield View(5 * frame, {}, layers if frame % 2 == 0 else {})

        evaluator = Evaluator(self.RULE)
        state, waited = evaluator.start(), []
        for view in settling():
            waited.append(evaluator.statuses(state)[0].waits_for)
            assert evaluator.advance(state, view) == []
        assert waited[:4] == [f"{num} more samples with global_diversity and 10 more steps" for num in (16, 15, 15, 14)]
        assert waited[27:] == [""] * 53


def overlapping(*shares):
    return [View(5 * sample, {"input_overlap": share}) for sample, share in enumerate(shares)]


class TestTheSameSequences:
    def test_are_told_where_there_once_were_others(self):
        assert names(overlapping(0.0, 0.1, 1.0, 1.0, 1.0)) == {"sequences-repeat"}

    def test_are_not_a_training_on_one_batch_on_purpose(self):
        assert names(overlapping(*[1.0] * 20)) == set()


def different(*counts):
    """With dropout: equal samples have different states."""
    layers = {"batch_similarity": np.array([0.5, 0.6, 0.7])}
    return [View(5 * sample, {"distinct_inputs": float(count)}, layers) for sample, count in enumerate(counts)]


class TestABatchOfOneSample:
    def test_is_told_though_its_states_differ(self):
        assert names(different(*[32] * 10, *[1] * 3)) == {"batch-of-one-sample"}

    @pytest.mark.parametrize("has_similarities", [True, False])
    def test_is_over_with_the_next_different_samples(self, has_similarities):
        views = different(*[32] * 10, *[1] * 5, *[32] * 5)
        views = views if has_similarities else [View(view.step, view.scalars) for view in views]
        assert [kind for kind, _ in kinds(views, "batch-of-one-sample")][-2:] == ["firing", "resolved"]

    def test_is_not_over_while_nothing_is_measured(self):
        views = [*different(*[32] * 10, *[1] * 5), *(View(100 + 5 * step) for step in range(5))]
        assert kinds(views, "batch-of-one-sample")[-1][0] == "firing"

    def test_is_not_one_of_size_one(self):
        assert names(different(*[32] * 10, *[math.nan] * 20)) == set()


def untrained(*counts):
    """In a zoom: samples 4 steps apart."""
    return [View(4 * sample, {"untrained_parameters": count}) for sample, count in enumerate(counts)]


class TestParametersThatNobodyTrains:
    def test_are_told_after_20_steps(self):
        ((rule, step),) = fired(untrained(math.nan, *[12.0] * 30))
        assert (rule.name, step) == ("parameters-not-trained", 24)

    def test_are_those_of_the_blocks_that_stay_as_they_are(self):
        views = [
            View(view.step, view.scalars, {"param_norm": np.array([5 + view.step, 5.0, 5 - view.step / 100])})
            for view in untrained(math.nan, *[12.0] * 30)
        ]
        assert blocks_told(views, "parameters-not-trained") == (1, 1)

    def test_are_not_those_of_an_optimizer_that_steps_now_and_then(self):
        """At every 20th step."""
        assert names(untrained(math.nan, *[*[12.0] * 4, 0.0] * 5)) == set()


def updated(*ratios):
    """In a zoom: samples 4 steps apart. The second block becomes unusual in step 40."""
    return [
        View(4 * sample, {}, {"update_norm": np.array([1e-3, ratio]), "param_norm": np.ones(2)})
        for sample, ratio in enumerate([*[2e-3] * 10, *ratios])
    ]


class TestUpdatesThatAreTooLarge:
    def test_are_told_before_the_weights_have_grown_as_large(self):
        """At sixty times the rate, the weights grow fivefold in a few steps, and the updates look small beside them."""
        views = updated(0.25, 0.1, 0.05, 0.03, 0.018)
        assert [(rule.name, step) for rule, step in fired(views)] == [("updates-too-large", 44)]
        assert blocks_told(views, "updates-too-large") == (1, 1)

    def test_are_not_a_single_step(self):
        assert names(updated(0.25, 0.02, 0.01, 2e-3, 2e-3)) == set()


def still(rates):
    """A block that follows the learning rate."""
    for sample, rate in enumerate(rates):
        layers = {"update_norm": np.array([rate, rate]), "param_norm": np.array([1.0, 1.0])}
        yield View(5 * sample, {"learning_rate": rate}, layers)


class TestABlockThatDoesNotMove:
    def test_is_told_when_the_rate_falls_to_nothing_at_once(self):
        assert names(still([1e-3] * 20 + [0.0] * 10)) == {"block-does-not-move"}

    def test_is_told_where_the_rate_is_not(self):
        views = [View(view.step, {}, view.layers) for view in still([0.0] * 10)]
        assert names(views) == {"block-does-not-move"}

    def test_is_told_where_the_rate_is_nothing_from_the_start(self):
        assert names(still([0.0] * 10)) == {"block-does-not-move"}

    def test_is_not_a_schedule_that_ends_at_nothing(self):
        assert names(still([1e-3 * (1 - sample / 50) for sample in range(50)] + [0.0] * 20)) == set()

    def test_is_not_even_pending_if_the_rate_starts_at_nothing(self):
        evaluator = Evaluator([rule for rule in PACK if rule.name == "block-does-not-move"])
        state = evaluator.start()
        states = []
        for view in still([0.0, 1e-4, 2e-4]):
            evaluator.advance(state, view)
            states.append(evaluator.statuses(state)[0].state)
        assert set(states) == {"quiet"}

    def test_is_not_one_that_is_frozen_on_purpose(self):
        moving = np.array([0.0, 1e-3])
        views = [
            View(
                5 * sample,
                {"learning_rate": 1e-3},
                {"update_norm": moving, "param_norm": np.ones(2)},
                {},
                frozenset({0}),
            )
            for sample in range(10)
        ]
        assert names(views) == set()


def watched(**seconds):
    """One look of the service at a run that it knows well."""
    usual = {"silent_seconds": 1.0, "stuck_seconds": 1.0, "usual_heard_seconds": 5.0, "usual_step_seconds": 2.0}
    pace = {"step_seconds": 2.0, "longest_pause_seconds": 20.0}
    return [View(0, usual | pace | seconds)]


class TestOnTheClock:
    @pytest.mark.parametrize(
        ("seconds", "told"),
        [
            ({}, set()),
            ({"silent_seconds": 94}, set()),
            ({"silent_seconds": 95}, {"process-silent"}),
            ({"silent_seconds": 95, "usual_heard_seconds": 45}, {"process-silent"}),
            ({"silent_seconds": 599, "usual_heard_seconds": 60}, set()),
            ({"silent_seconds": 600, "usual_heard_seconds": 60}, {"process-silent"}),
            ({"silent_seconds": 95, "usual_heard_seconds": float("nan")}, {"process-silent"}),
            ({"silent_seconds": 1800}, {"process-silent", "process-lost"}),
            ({"stuck_seconds": 299}, set()),
            ({"stuck_seconds": 300}, {"training-stuck"}),
            ({"stuck_seconds": 300, "longest_pause_seconds": 200}, set()),
            ({"stuck_seconds": 300, "longest_pause_seconds": float("nan")}, {"training-stuck"}),
            ({"stuck_seconds": 300, "usual_step_seconds": 40}, set()),
            ({"stuck_seconds": 1800}, {"training-stuck", "training-hangs"}),
        ],
    )
    def test_a_run_is_silent_or_stuck_by_its_own_measure(self, seconds, told):
        assert names(watched(**seconds), on="clock") == told


class TestALossThatIsNotFinite:
    @staticmethod
    def alert(*layers, **scalars):
        evaluator = Evaluator(PACK)
        state = evaluator.start()
        views = [
            View(0, {"loss": 2.0}, layers[0]),
            View(5, {"loss": 2.0}, layers[1]),
            View(10, {"loss": np.nan} | scalars, layers[2]),
        ]
        events = [event for view in views for event in evaluator.advance(state, view)]
        return next(event for event in events if event.rule.name == "loss-not-finite")

    @pytest.mark.parametrize(("before", "steps"), [([0, 0, 0, 0], 0), ([0, 0, 0.5, 0.5], 5)])
    def test_names_the_block_where_it_begins_and_since_when(self, before, steps):
        shares = ([0, 0, 0, 0], before, [0, 0, 0.5, 1])
        alert = self.alert(*({"nonfinite": np.array(share)} for share in shares))
        found = {name: number for name, number in alert.evidence["numbers"].items() if number is not None}
        assert found == {"nonfinite_steps": steps}
        assert "The first block that is not finite is block 1, " in alert.advice["text"]

    def test_says_where_it_begins_if_the_frame_is_of_the_step_before_it_spread(self):
        alert = self.alert({}, {}, {"nonfinite": np.array([0, 0, 0.5, 1])}, nonfinite_parameters=1.0)
        found = {name: number for name, number in alert.evidence["numbers"].items() if number is not None}
        assert found == {"nonfinite_parameters": 1}
        assert "NaN or infinity begins in block 1, " in alert.advice["text"]
        assert "The input of the first block" not in alert.advice["text"]
        assert "hidden states" not in alert.advice["text"]
        assert "it may have begun in another one" not in alert.advice["text"]

    @pytest.mark.parametrize("last", [{"nonfinite": np.zeros(4)}, {}])
    def test_says_where_else_to_look_if_all_hidden_states_were_finite(self, last):
        seen = {"nonfinite": np.zeros(4)}
        alert = self.alert(seen, seen, last, nonfinite_parameters=1.0)
        found = {name: number for name, number in alert.evidence["numbers"].items() if number is not None}
        assert found["parameters_not_finite"] == 1
        assert "nonfinite_parameters" not in found
        assert "were finite: look at the batch of this step" in alert.advice["text"]
        assert "layer" not in alert.advice["text"]

    def test_says_nothing_of_layers_where_they_are_not_measured(self):
        text = self.alert({}, {}, {}).advice["text"]
        assert "layer" not in text
        assert text.startswith("Go back to the last checkpoint")


def jumping(before, after):
    """Samples 5 steps apart of a loss that jumps after the 20th of them, without noise."""
    for sample, loss in enumerate([before] * 20 + [after] * 20):
        noise = abs(after - before) / 2 if 21 <= sample < 28 else 0.0
        scalars = {"loss": loss, "loss_mean": loss, "loss_recent": loss, "loss_noise": noise, "loss_start": before}
        scalars["loss_before"] = before + (after - before) * min(max((sample - 20) / 8, 0), 1)
        yield View(5 * sample, scalars)


class TestALossWithoutNoise:
    @pytest.mark.parametrize(("before", "after"), [(2.0, 3.0), (0.0, 1.0), (0.0, 0.01), (-1.0, 1.0)])
    def test_that_jumps_is_told(self, before, after):
        assert names(jumping(before, after)) == {"loss-spike", "loss-regressed"}

    @pytest.mark.parametrize(("before", "after"), [(0.0, 1e-9), (2.0, 2.01), (0.0, 0.0)])
    def test_that_hardly_rises_is_judged_and_is_no_jump(self, before, after):
        evaluator = Evaluator(PACK)
        state = evaluator.start()
        for view in jumping(before, after):
            assert [e for e in evaluator.advance(state, view) if e.rule.severity != "info"] == []
        states = {status.rule.name: status.state for status in evaluator.statuses(state)}
        assert (states["loss-spike"], states["loss-regressed"]) == ("quiet", "quiet")


def losing(steps, lasting):
    """A loss that falls by 2 and is higher by 35 % of that after step 1,010, for some steps."""
    draw = np.random.default_rng(0)
    losses = 1 + 2 * np.exp(-np.arange(3000) / 300) + draw.normal(0, 0.05, 3000)
    losses[1011 : 1011 + lasting] += 0.7
    return views_of_losses(losses, steps)


def fine_tuning(steps, seed, noise=0.3):
    """A loss that hardly falls and is very noisy."""
    draw, deviation = np.random.default_rng(seed), math.log(1 + noise**2) ** 0.5
    base = 1 + 0.15 * np.exp(-np.arange(20_001) / 300)
    return views_of_losses(base * np.exp(draw.normal(-(deviation**2) / 2, deviation, len(base))), steps)


def views_of_losses(losses, steps):
    last_step = -1
    for step in steps:
        known = [float(loss) for loss in losses[: step + 1]]
        yield View(step, {"loss": known[-1], **loss_scalars(known[last_step + 1 :], known[-40:], known)})
        last_step = step


class TestALossThatJumpsFarFromTheLastSample:
    RULE = tuple(rule for rule in PACK if rule.name == "loss-spike")
    STEPS = (0, 10, 89, 403, 408, 413, 417, 460)

    def losses(self, seed, jump):
        """A loss that falls from 4.9 to 2.6, and from step 400 on is higher."""
        draw = np.random.default_rng(seed)
        losses = 2.5 + 2.4 * np.exp(-np.arange(800) / 100) + draw.normal(0, 0.12, 800)
        losses[400:] += jump
        return losses

    def test_is_told_though_no_sample_was_as_low(self):
        for seed in range(5):
            ((_, step),) = fired(views_of_losses(self.losses(seed, jump=0.75), self.STEPS), self.RULE)
            assert step == 408

    def test_is_not_told_where_it_does_not_jump(self):
        for seed in range(50):
            assert fired(views_of_losses(self.losses(seed, jump=0.0), self.STEPS), self.RULE) == []

    def test_stays_told_while_the_loss_is_high(self):
        evaluator = Evaluator(self.RULE)
        state = evaluator.start()
        for view in views_of_losses(self.losses(0, jump=0.75), (*self.STEPS, 700)):
            evaluator.advance(state, view)
        (status,) = evaluator.statuses(state)
        assert status.state == "firing"

    @pytest.mark.parametrize(("level", "noise", "state"), [(2.3, 1.0, "firing"), (0.3, 0.1, "quiet")])
    def test_is_over_when_the_loss_is_low_beside_the_first_one_and_not_beside_the_jump(self, level, noise, state):
        """Shuffled labels: the loss rises to 40, and then stays where the model guesses, within its new noise."""
        draw = np.random.default_rng(0)
        losses = 0.25 + 2.1 * np.exp(-np.arange(1500) / 100) + draw.normal(0, 0.03, 1500)
        losses[800:820], losses[820:] = np.linspace(2, 40, 20), level + draw.normal(0, noise, 680)
        evaluator = Evaluator(self.RULE)
        kept = evaluator.start()
        for view in views_of_losses(losses, (*range(0, 800, 100), 803, 808, 813, 818, 860, *range(900, 1500, 100))):
            evaluator.advance(kept, view)
        assert [status.state for status in evaluator.statuses(kept)] == [state]

    def test_is_told_though_an_earlier_jump_was_ten_times_as_high(self):
        draw = np.random.default_rng(0)
        losses = 0.25 + 2.1 * np.exp(-np.arange(1500) / 100) + draw.normal(0, 0.03, 1500)
        losses[300:310] = 20.0
        losses[1000:] = 2.0 + draw.normal(0, 0.1, 500)
        steps = (*range(0, 301, 50), 304, 309, *range(350, 1000, 50), 1003, 1008, 1012, 1100)
        assert [step for _, step in fired(views_of_losses(losses, steps), self.RULE)] == [304, 1008]


class TestALossWithAHighFirstValue:
    RULES = tuple(rule for rule in PACK if rule.name in ("loss-spike", "loss-regressed"))

    @pytest.mark.parametrize("first", [20.0, 300.0])
    @pytest.mark.parametrize(
        "steps", [range(0, 600, 10), (0, 10, 20, *range(110, 400, 90), 403, 408, 412, 417, 460, 550)]
    )
    def test_is_told_when_it_jumps(self, first, steps):
        losses = 2 + first * np.exp(-np.arange(600) / 3) + 0.1 * np.sin(1.7 * np.arange(600))
        assert fired(views_of_losses(losses, steps), self.RULES) == []
        losses[400:] += 4
        assert [rule.name for rule, _ in fired(views_of_losses(losses, steps), self.RULES)] == [
            "loss-spike",
            "loss-regressed",
        ]


class TestALossThatFallsFast:
    """From 1 to 0.02 in 20 steps. What counts as learned must not depend on how far apart the first samples are."""

    RULES = tuple(rule for rule in PACK if rule.name in ("loss-spike", "loss-regressed"))

    @pytest.mark.parametrize("every", [5, 13, 50, 100])
    @pytest.mark.parametrize(("jump", "is_told"), [(0.004, False), (0.03, True), (0.3, True)])
    def test_is_told_at_each_distance_of_samples_or_at_none(self, every, jump, is_told):
        losses = np.exp(-np.arange(2000) / 5) + 0.005 * np.sin(1.7 * np.arange(2000))
        losses[1000:] += jump
        told = [rule.name for rule, _ in fired(views_of_losses(losses, range(0, 2000, every)), self.RULES)]
        assert told == (["loss-spike", "loss-regressed"] if is_told else [])


class TestALossThatStaysHigh:
    RULE = tuple(rule for rule in PACK if rule.name == "loss-regressed")

    @pytest.mark.parametrize(
        ("steps", "within"), [*zip(CADENCES.values(), (30, 160, 1000, 64), strict=True)], ids=CADENCES
    )
    def test_is_told_while_it_is_high(self, steps, within):
        ((_, step),) = fired(losing(steps, lasting=1000), self.RULE)
        assert 1010 < step <= 1010 + within

    @pytest.mark.parametrize("steps", [*CADENCES.values()][1:], ids=[*CADENCES][1:])
    def test_is_not_one_that_has_come_back(self, steps):
        assert fired(losing(steps, lasting=50), self.RULE) == []

    @at_each_cadence
    def test_is_not_noise(self, steps):
        assert fired(losing(steps, lasting=0), self.RULE) == []

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("every", [5, 50, 200])
    def test_is_not_the_noise_of_fine_tuning(self, every, seed):
        num_samples = min(20_000 // every, 400)
        assert fired(fine_tuning(range(0, num_samples * every, every), seed), self.RULE) == []


class TestWhatIsNoLongerMeasured:
    def test_is_told(self):
        measured = {"nonfinite": np.zeros(3), "grad_norm": np.ones(2)}
        views = [
            View(5 * sample, {"loss": 2.0}, measured if sample < 5 else {"grad_norm": np.ones(2)})
            for sample in range(10)
        ]
        assert names(views) == {"dead-probes"}

    def test_is_not_a_gradient_of_states_that_are_not_finite(self):
        healthy = {"nonfinite": np.zeros(3), "grad_norm": np.ones(2)}
        broken = {"nonfinite": np.ones(3), "grad_norm": np.full(2, np.nan)}
        views = [View(5 * sample, {}, broken if sample > 5 else healthy) for sample in range(10)]
        assert names(views) == {"non-finite-activations"}

    def test_is_not_a_gradient_of_blocks_that_were_frozen(self):
        def of(update):
            trained = {"nonfinite": np.zeros(3), "grad_norm": np.ones(2), "update_norm": np.ones(2)}
            frozen = {"nonfinite": np.zeros(3), "update_norm": np.full(2, update)}
            return names([View(5 * i, {"loss": 2.0}, frozen if i > 5 else trained) for i in range(12)])

        assert of(0.0) == set()
        assert of(1.0) == {"dead-probes"}

    def test_is_not_what_a_loop_leaves_out_that_skips_steps_with_a_gradient_that_is_not_finite(self):
        measured = {"nonfinite": np.zeros(3), "grad_norm": np.ones(2)}

        def of(norms):
            return names(
                View(
                    5 * i,
                    {"loss": 2.0} | (norms if i >= 5 else {"grad_norm_recent": 1.0}),
                    measured if i < 5 else {"nonfinite": np.zeros(3)},
                )
                for i in range(10)
            )

        assert of({"grad_norm_recent": math.nan, "grad_norm_nonfinite": 5.0}) == {"non-finite-gradient"}
        assert of({"grad_norm_recent": 1.0, "grad_norm_nonfinite": 0.0}) == {"dead-probes"}
        assert of({"grad_norm_recent": 1.0, "grad_norm_nonfinite": 5.0}) == set(), "every second one was skipped"
        # Among ranks, the mean of norms that no rank has is NaN.
        assert of({"grad_norm_recent": math.nan, "grad_norm_nonfinite": math.nan}) == {"dead-probes"}

    def test_is_not_a_gradient_scaler_that_looks_for_its_scale(self):
        norms = [{"grad_norm_recent": math.nan, "grad_norm_nonfinite": 1.0}] * 17
        norms += [{"grad_norm_recent": 1.0, "grad_norm_nonfinite": 0.0}] * 20
        assert names([View(i, {"loss": 2.0} | norm, {}) for i, norm in enumerate(norms)]) == set()
        assert names([View(i, {"loss": 2.0} | norms[0], {}) for i in range(30)]) == {"non-finite-gradient"}

    def test_is_not_what_the_last_frame_of_a_run_leaves_out(self):
        measured = {"nonfinite": np.zeros(3), "grad_norm": np.ones(2)}
        scalars = {"loss": 2.0, "loss_mean": 2.0, "contained_faults": 0.0}
        views = [View(5 * i, scalars, measured if i < 8 else {}) for i in range(10)]
        evaluator = Evaluator(PACK)
        state = evaluator.start()
        for view in [*views, View(99, {"loss": 2.0, "loss_mean": 2.0}, {})]:
            evaluator.advance(state, view)
        standing = {status.rule.name: status.state for status in evaluator.statuses(state)}
        assert standing["dead-probes"] == "pending", "two samples, and a frame that does not count"

    def test_is_not_what_never_was(self):
        assert names([View(5 * sample, {"loss": 2.0}, {}) for sample in range(10)]) == set()


def norms_of(norm, steps):
    return [View(step, {"total_param_norm": norm(step)}) for step in steps]


class TestTheNormOfAllParameters:
    @at_each_cadence
    @pytest.mark.parametrize(
        ("factor", "name"), [(3.0, "parameter-norm-jump"), (0.5, "parameter-norm-shrinks")], ids=["grows", "shrinks"]
    )
    def test_that_is_another_all_at_once_is_told_with_the_first_sample(self, factor, name, steps):
        views = norms_of(lambda step: 100 * factor if step > 1010 else 100.0, steps)
        assert [(rule.name, step) for rule, step in fired(views)] == [(name, first_after(1011, steps))]

    @at_each_cadence
    def test_that_grows_exponentially_is_told(self, steps):
        assert "parameter-norm-runaway" in names(norms_of(lambda step: 100 * 10 ** (0.002 * step), steps))

    @at_each_cadence
    @pytest.mark.parametrize(
        "norm",
        [
            lambda step: 100 * 10 ** (-0.0004 * step),
            lambda step: 100 * 10 ** (0.0009 * step),
            lambda step: 20 + 2 * step**0.5,
            lambda step: 100 * (1 if step < 1000 else 1.3),
            lambda step: 10 * (2 - 0.9**step),
        ],
        ids=["grokking", "steady growth", "the square root of steps", "a step of 30 %", "a small initialisation"],
    )
    def test_that_changes_as_in_health_is_not_told(self, norm, steps):
        assert names(norms_of(norm, steps)) == set()

    @pytest.mark.parametrize("steps", [*CADENCES.values(), [0, *range(10, 60, 10), 116, 300]])
    def test_that_grows_in_the_warm_up_of_a_small_initialisation_did_not_jump(self, steps):
        jump = [one for one in PACK if one.name == "parameter-norm-jump"]
        assert fired(norms_of(lambda step: 1 + (min(step, 200) / 100) ** 2, steps), jump) == []


def blocks_of(norms, steps=range(0, 200, 5)):
    for step in steps:
        each = np.array(norms(step), np.float32)
        yield View(step, {"loss": 2.0, "total_param_norm": float(np.linalg.norm(each))}, {"param_norm": each})


class TestTheNormOfOneBlock:
    def test_that_jumps_is_told_with_the_block(self):
        views = [*blocks_of(lambda step: [10, 10, 30 if step >= 100 else 10, 10, 11, 12])]
        assert ("block-norm-jump", 100) in [(rule.name, step) for rule, step in fired(views)]
        assert blocks_told(views, "block-norm-jump") == (2, 2)

    @at_each_cadence
    def test_that_jumps_is_told_with_the_first_sample(self, steps):
        views = blocks_of(lambda step: [30 if step > 1010 else 10, *[10] * 19], steps)
        assert [(rule.name, step) for rule, step in fired(views)] == [("block-norm-jump", first_after(1011, steps))]

    def test_that_grows_with_all_others_is_not_told(self):
        assert "block-norm-jump" not in names(blocks_of(lambda step: [10 * 1.01**step] * 6))

    @at_each_cadence
    def test_that_outgrows_the_others_slowly_is_not_told(self, steps):
        assert names(blocks_of(lambda step: [10, 10, 10 * 10 ** (0.0008 * step), 10, 10, 10], steps)) == set()


def states_of(size, steps):
    """Hidden states whose largest layer has this root mean square."""
    for step in steps:
        yield View(step, {}, {"hidden_rms": np.array([0.03, 0.02 * size(step), 0.03 * size(step)], np.float32)})


class TestHiddenStates:
    RULE = tuple(rule for rule in PACK if rule.name == "hidden-state-blow-up")

    @at_each_cadence
    @pytest.mark.parametrize(
        "size",
        [lambda step: 100.0 if step > 1010 else 1.0, lambda step: 10 ** (0.005 * step)],
        ids=["at once", "exponentially"],
    )
    def test_that_grow_fast_are_told(self, size, steps):
        ((_, step),) = fired(states_of(size, steps), self.RULE)
        first = first_after(1011 if size(0) == size(100) else 357, steps)
        assert step <= [*steps][[*steps].index(first) + 3]

    @at_each_cadence
    @pytest.mark.parametrize(
        "size",
        [lambda step: 1 + 100 * step / 2000, lambda step: 1 + 8 * step**0.5, lambda step: 10 ** (0.001 * step)],
        ids=["linearly", "as the square root of steps", "exponentially"],
    )
    def test_that_grow_slowly_are_not_told(self, size, steps):
        """As in a healthy GPT-2: they become 60 times as large in 6,000 steps."""
        assert size(2999) > 60
        assert fired(states_of(size, steps), self.RULE) == []


def blocks_told(views, name):
    evaluator = Evaluator(PACK)
    state = evaluator.start()
    events = [event for view in views for event in evaluator.advance(state, view)]
    return next(e.evidence["blocks"] for e in events if e.kind == "firing" and e.rule.name == name)


def gradients(*norms):
    return [View(5 * sample, {"total_grad_norm": norm}) for sample, norm in enumerate(norms)]


class TestAGradientThatExplodes:
    def test_is_told_though_it_was_infinite_once(self):
        views = gradients(3.0, math.inf, *[0.1] * 8, 40.0, 20.0)
        assert [(rule.name, step) for rule, step in fired(views)] == [("exploding-gradient", 55)]

    def test_is_not_one_that_was_as_large_before_the_loss_was_near_zero(self):
        assert fired(gradients(3.0, 25.0, *[0.003] * 8, 22.0, 20.0)) == []


class TestAZoom:
    @pytest.mark.parametrize("built_in", [one for one in PACK if one.on == "frame"], ids=lambda one: one.name)
    def test_and_the_sample_after_it_are_as_many_as_a_rule_holds_for(self, built_in):
        hold = {"samples": built_in.hold.samples, "steps": built_in.hold.steps}
        steps = zoomed(200, 1010, 1100)
        views = [View(step, {"loss": 10.0 if step > 1010 else 1.0}) for step in steps]
        told = fired(views, [own_rule("loss > 5", **{"for": hold})])
        takes_longer = built_in.name == "loss-stall"  # 240 steps
        assert bool(told) is not takes_longer


def saturated(saturation, steps, slow_every):
    """Samples of which some include the slow tier."""
    for num, step in enumerate(steps):
        layers = {"saturation": np.array([0.5, 0.99, saturation(step)])} if num % slow_every == 0 else {}
        yield View(step, {"loss": 2.0}, layers)


class TestSaturation:
    GAPS = pytest.mark.parametrize(("gap", "slow_every"), [(5, 1), (40, 3), (200, 10)])

    @GAPS
    def test_that_jumps_is_told_with_the_second_high_sample(self, gap, slow_every):
        views = [*saturated(lambda step: 0.97 if step >= 12_000 else 0.5, range(0, 20_000, gap), slow_every)]
        high = [view.step for view in views if view.layers and view.step >= 12_000]
        assert [(rule.name, step) for rule, step in fired(views)] == [("saturation-jump", high[1])]
        assert blocks_told(views, "saturation-jump") == (0, 1)

    @GAPS
    def test_that_rises_over_thousands_of_steps_is_not_told(self, gap, slow_every):
        def rising(step):
            return min(0.5 + 0.46 * max(step - 4000, 0) / 6000, 0.97)

        assert names(saturated(rising, range(0, 20_000, gap), slow_every)) == set()


class TestDeadUnits:
    def test_are_told_within_one_zoom(self):
        every, later = ZOOM_GAP, ZOOM_GAP + 1
        steps = [0, 100, 200, 200 + every, 200 + every + later, 200 + 2 * every + later]
        slow = (0, 200, 200 + every + later)  # every second sample of a zoom
        views = [
            View(step, {}, {"dead_units": np.array([0.95 * (step >= 200)])} if step in slow else {}) for step in steps
        ]
        assert [(rule.name, step) for rule, step in fired(views)] == [("dead-units", 209)]


def slow(rate, loss, steps=range(0, 400, 10)):
    for step in steps:
        scalars = {"step_size": 1e3 * rate(step), "total_param_norm": 100.0, "learning_rate": rate(step)}
        yield View(
            step, scalars | {"loss": loss(step), "loss_mean": loss(step), "loss_before": loss(max(step - 24, 0))}
        )


class TestUpdates:
    def test_that_are_too_small_to_learn_from_are_told(self):
        assert names(slow(lambda step: 1e-6, lambda step: 3 - 1e-5 * step)) == {"updates-too-small"}

    def test_that_are_too_small_are_told_though_means_of_a_few_losses_vary(self):
        """In a zoom, `loss_mean` is of some 5 losses, and the lowest of several means is lower than the loss."""
        views = [*slow(lambda step: 1e-6, lambda step: 3 - 1e-4 * step, [0, 20, 300, 600, *range(605, 640, 5)])]
        for view in views:
            view.scalars["loss_mean"] *= 0.95 if view.step > 600 else 1.0
        assert names(views) == {"updates-too-small"}

    def test_that_have_gained_a_tenth_in_hundreds_of_steps_are_told(self):
        assert names(slow(lambda step: 1e-6, lambda step: 3 - 5e-4 * step, [0, 10, 90, *range(600, 640, 5)])) == {
            "updates-too-small"
        }

    @pytest.mark.parametrize("gap", [10, 130, 200, 270])
    def test_that_shrink_by_a_tenth_each_step_are_told(self, gap):
        """A scheduler that was meant for epochs."""
        steps = [0, 10, 90, *range(90 + gap, 90 + 40 * gap, gap)]
        views = slow(lambda step: max(1e-3 * 0.9**step, 1e-9), lambda step: 3 - 0.05 * (1 - 0.9**step), steps)
        ((rule, step),) = fired(views)
        assert rule.name == "updates-too-small"
        assert step <= max(100 + 3 * gap, 210)  # 90 steps before the rate was seen to be tiny, and as many since

    def test_that_are_too_small_are_told_if_no_rate_is_known(self):
        views = [*slow(lambda step: 1e-6, lambda step: 3 - 1e-5 * step)]
        for view in views:
            del view.scalars["learning_rate"]
        assert names(views) == {"updates-too-small"}

    def test_that_are_too_small_are_over_when_the_rate_is_repaired(self):
        views = slow(lambda step: 4e-4 if step >= 600 or step < 50 else 1e-7, lambda step: 3.0, range(0, 900, 10))
        assert [kind for kind, _ in kinds(views, "updates-too-small")] == ["pending", "firing", "resolved"]

    def test_that_are_too_small_are_not_over_after_a_larger_one(self):
        views = slow(lambda step: 3e-6 if step == 500 else 1e-7, lambda step: 3.0, range(0, 900, 10))
        assert kinds(views, "updates-too-small") == [("pending", 100), ("firing", 120)]

    def test_that_are_small_are_not_told_if_the_loss_was_below_zero(self):
        assert names(slow(lambda step: 1e-6, lambda step: -1 + step / 300)) == set()

    @pytest.mark.parametrize("num_steps", [100, 150, 200, 250, 290, 300, 1000])
    def test_that_are_small_at_the_end_of_a_fine_tuning_are_not(self, num_steps):
        def rate(step):
            return 1e-3 * max(1 - step / num_steps, 1e-3)

        assert names(slow(rate, lambda step: 3 - 0.1 * min(step / num_steps, 1), range(0, num_steps + 50, 5))) == set()

    def test_that_are_small_at_the_end_of_a_schedule_are_not(self):
        assert names(slow(lambda step: 1e-6 if step > 200 else 1e-3, lambda step: 1 + 2 / (1 + step / 10))) == set()

    def test_that_are_small_in_a_warm_up_are_not(self):
        assert names(slow(lambda step: 1e-8 * step, lambda step: 3.0)) == set()


def with_losses(losses, every):
    for step in range(every, len(losses), every):
        yield View(step, loss_scalars(losses[step - every + 1 : step + 1], losses[: step + 1], losses[: step + 1]))


class TestALossThatChangesItsSign:
    @pytest.mark.parametrize("every", [3, 4, 5])
    def test_is_told_if_it_jumps(self, every):
        losses = [(2.0 if step < 200 else -2.0) + 0.1 * math.sin(1.7 * step) for step in range(300)]
        ((rule, step),) = fired(with_losses(losses, every))
        assert rule.name == "loss-changes-sign"
        assert 200 <= step <= 208

    @pytest.mark.parametrize("slope", [1e-3, 0.01, 0.1, 1.0, 10.0])
    @pytest.mark.parametrize("noise", [0.0, 0.1, 1.0])
    def test_is_not_told_if_it_falls_evenly(self, slope, noise):
        losses = [slope * (200 - step) + noise * math.sin(1.7 * step) for step in range(400)]
        assert "loss-changes-sign" not in names(with_losses(losses, 4))

    @pytest.mark.parametrize("every", [4, 5, 20, 50])
    @pytest.mark.parametrize("width", [10, 15, 40])
    @pytest.mark.parametrize(
        "fallen",
        [lambda x: 1 - math.exp(-max(x, 0)), lambda x: 1 / (1 + math.exp(-x))],
        ids=["exponential", "sigmoid"],
    )
    def test_is_not_told_if_a_plateau_ends(self, fallen, width, every):
        """A negative log-density, once the model has found the structure of the data."""
        draw = np.random.default_rng(0).normal(0, 0.02, 900)
        losses = [1.4 - 2.9 * fallen((step - 450) / width) + draw[step] for step in range(900)]
        assert "loss-changes-sign" not in names(with_losses(losses, every))

    def test_is_not_told_of_a_loss_around_zero(self):
        losses = [math.sin(1.7 * step) for step in range(400)]
        assert "loss-changes-sign" not in names(with_losses(losses, 4))


def answering(variation, **layers):
    """Answers that depend on the input, and no longer from step 100 on."""
    for step in range(0, 200, 5):
        scalars = {"output_variation": variation if step >= 100 else 0.5}
        yield View(step, scalars, {name: np.array(values) for name, values in layers.items()})


class TestAnswersThatNoLongerDependOnTheInput:
    def test_are_told_as_the_head_s_or_the_data_s_fault_if_hidden_states_differ(self):
        views = list(answering(1e-6, global_diversity=[0.6, 0.3, 0.05]))
        assert [(rule.name, rule.family, step) for rule, step in fired(views)] == [
            ("output-ignores-states", "diverge", 110)
        ]

    @pytest.mark.parametrize(
        "layers", [{"global_diversity": [0.6, 0.3, 0.01]}, {"global_diversity": [0.6, 0.3, math.nan]}, {}]
    )
    def test_are_told_as_the_blocks_fault_if_they_do_not_or_if_it_is_not_known(self, layers):
        assert names(answering(1e-6, **layers)) == {"output-ignores-input"}

    @pytest.mark.parametrize(("rises_at", "is_told"), [(90, True), (95, True), (100, False), (150, False)])
    def test_are_told_as_the_fault_of_data_or_loss_if_the_loss_rose_before(self, rises_at, is_told):
        views = list(answering(1e-6, global_diversity=[0.6, 0.3, 0.01]))
        for view in views:
            recent = 3.0 if view.step >= rises_at else 2.0 + 0.02 * math.sin(view.step)
            view.scalars.update(loss_recent=recent, loss_before=2.0, loss_noise=0.1)
        told = {rule.name: step for rule, step in fired(views)}
        assert told["output-ignores-input"] == 110
        assert told.get("output-ignores-input-after-loss") == (110 if is_told else None)

    @pytest.mark.parametrize(("level", "is_told"), [(2.15, True), (2.05, False), (1.9, False)])
    def test_are_told_early_if_the_loss_also_stays_above_its_lowest_level(self, level, is_told):
        """A loss that only jumps for a few steps, or falls further, is that of a model that learns."""
        views = list(answering(5e-3, global_diversity=[0.6, 0.3, 0.05]))
        for view in views:
            recent = 2.0 if view.step < 90 else 2.3 if view.step < 100 else level
            view.scalars.update(loss_recent=recent, loss_before=2.0 if view.step < 100 else level, loss_noise=0.1)
        assert names(views) == ({"output-ignores-input-after-loss"} if is_told else set())

    def test_are_told_as_the_fault_of_data_or_loss_if_the_loss_is_far_above_the_first_one(self):
        views = list(answering(1e-6, global_diversity=[0.6, 0.3, 0.01]))
        for view in views:
            view.scalars.update(loss_mean=3.0, loss_recent=9.0 if view.step >= 100 else 2.0)
        assert names(views) == {"output-ignores-input", "output-ignores-input-after-loss"}

    @pytest.mark.parametrize(("first", "then"), [(-1.0, -1.2), (-1.0, -0.4), (0.0, 0.1)])
    def test_say_nothing_of_a_loss_that_was_not_positive(self, first, then):
        views = list(answering(1e-6, global_diversity=[0.6, 0.3, 0.01]))
        for view in views:
            view.scalars.update(loss_mean=first, loss_recent=then)
        assert names(views) == {"output-ignores-input"}

    def test_are_not_told_if_some_of_them_still_do(self):
        assert names(answering(1e-3, global_diversity=[0.6, 0.3, 0.05])) == set()


@pytest.mark.parametrize(
    ("diversity", "variation", "is_told"),
    [
        pytest.param(7e-5, 5e-5, True, id="collapsed"),
        pytest.param(1e-3, 1e-6, True, id="answers collapsed more than states"),
        pytest.param(7e-4, 5e-5, False, id="first steps of a healthy model with random biases"),
        pytest.param(7e-5, 0.1, False, id="one massive dimension"),
    ],
)
def test_collapsed_states_are_told_by_the_states_and_the_answers(diversity, variation, is_told):
    layers = {"global_diversity": np.array([0.6, 0.3, diversity])}
    told = names(View(step, {"output_variation": variation}, layers) for step in range(0, 50, 5))
    assert ("states-collapse" in told) == is_told


def decaying(alignment, ratio, blocks=()):
    scalars = {"step_size": ratio, "total_param_norm": 1.0, "update_alignment": alignment}
    layers = {"update_alignment": np.array(blocks or [alignment]), "param_norm": np.ones(len(blocks) or 1)}
    return [View(step, scalars, layers) for step in range(0, 50, 5)]


class TestWeightDecay:
    @pytest.mark.parametrize(
        ("alignment", "ratio", "is_told"),
        [
            pytest.param(-0.95, 6e-4, True, id="nothing else is left"),
            pytest.param(-0.95, 4e-4, False, id="of updates that hardly count"),
            pytest.param(-0.7, 8e-3, True, id="half a percent of the norm goes in a step"),
            pytest.param(-0.7, 4e-3, False, id="a quarter of a percent"),
            pytest.param(-0.3, 5e-2, False, id="large updates that mainly turn the weights"),
        ],
    )
    def test_is_told_by_what_it_takes_away(self, alignment, ratio, is_told):
        assert ("weight-decay-outweighs-gradient" in names(decaying(alignment, ratio))) is is_told

    def test_is_told_of_the_blocks_whose_updates_point_against_their_weights(self):
        told = next(rule for rule in PACK if rule.name == "weight-decay-outweighs-gradient")
        evaluator = Evaluator([told])
        state = evaluator.start()
        views = decaying(-0.7, 8e-3, blocks=[0.1, -0.9, -0.8, -0.2])
        events = [event for view in views for event in evaluator.advance(state, view)]
        assert {event.evidence["blocks"] for event in events if event.kind == "firing"} == {(1, 2)}
