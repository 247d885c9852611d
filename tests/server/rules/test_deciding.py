"""Conditions that can never hold, or never change."""

import json

import pytest

from tsemon.errors import InvalidRules
from tsemon_server.rules.checking import mistakes
from tsemon_server.rules.documents import load
from tsemon_server.rules.parts import Part


def read(when, **more):
    return load(json.dumps({"rules": [{"name": "mine", "when": when, **more}]}))


class TestAConditionThatNeverChanges:
    @pytest.mark.parametrize(
        "when",
        [
            "3 > 2",
            "loss > 1 and 3 > 2",
            "not 3 > 2",
            "between(1 + 2, above=3)",
            "held(3 > 2, 1, of=2)",
            "steps_in(3 > 2) > 10",
            "finite(3)",
        ],
    )
    def test_is_refused(self, when):
        with pytest.raises(InvalidRules, match=r"rules\[0\]\.when: .*it reads no metric, so its answer never changes"):
            read(when)

    def test_is_refused_in_each_key(self):
        with pytest.raises(InvalidRules, match=r"rules\[0\]\.clear: 3 < 2: it reads no metric"):
            read("loss > 3", clear="3 < 2")


class TestAConditionThatNeverHolds:
    @pytest.mark.parametrize(
        ("when", "said"),
        [
            ("between(loss, above=3, below=1)", "no number is above 3 and below 1"),
            ("3 <= loss < 3", "no number is at least 3 and below 3"),
            ("loss > 3 and loss < 1", "no number is above 3 and below 1"),
            ("loss/0 > 3", "it divides by 0, which is undefined"),
            ("loss > 1 / 0", "it divides by 0, which is undefined"),
            ("loss > 2 * (loss / 0)", "it divides by 0, which is undefined"),
        ],
    )
    def test_is_refused(self, when, said):
        with pytest.raises(InvalidRules) as error:
            read(when)
        assert "it can never hold" in str(error.value)
        assert said in str(error.value)


class TestAConditionThatCanHold:
    @pytest.mark.parametrize(
        "when",
        [
            "3 <= loss <= 3",
            "loss > 3 or loss < 1",
            "any(grad_norm > 3) and any(grad_norm < 1)",
            "between(1, above=loss, below=9)",
            "3 < loss",
            "loss / (1 + loss) > 0",
        ],
    )
    def test_is_read(self, when):
        read(when)


class TestATimeBasedRule:
    def test_reads_only_what_the_clock_has(self):
        with pytest.raises(
            InvalidRules, match=r"when: a time-based rule \(`on: clock`\) cannot read 'loss'; it reads only"
        ):
            read("loss > 3", on="clock")
        read("silent_seconds > 300", on="clock")

    def test_is_meant_if_a_rule_reads_what_no_frame_has(self):
        with pytest.raises(InvalidRules, match=r"no frame has 'silent_seconds', .*; add `on: clock`"):
            read("silent_seconds > 300")

    def test_has_no_other_mistakes_in_the_editor_than_it_has(self):
        definition = {"name": "mine", "when": "silent_seconds > 300", "on": "clock", "severity": "bad"}
        assert [mistake.path for mistake in mistakes(Part(definition))] == [("severity",)]
        definition = {"name": "No", "when": "loss > 3", "on": "clock"}
        assert [mistake.path for mistake in mistakes(Part(definition))] == [("name",), ("when",)]
