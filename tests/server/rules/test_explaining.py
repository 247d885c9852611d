"""A rule in words."""

import json

import pytest

from tsemon_server.alerts.explaining import explain
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load

X, Y = {"layers": "x"}, {"layers": "y"}
LOSS = {"scalar": "loss"}


def explained(when, **more):
    rule = {"name": "a-rule", "family": "loss", "severity": "info", "title": "A rule", "when": when}
    words = {"advice": "none", "source": "the tests", "origin": "convention"}
    return explain(*load(json.dumps({"rules": [rule | words | more]}), "here"))


def lines(when):
    return [f"{'  ' * line.depth}{line.text}" for line in explained(when).when]


def text_of(value):
    (line,) = lines({"value": value, "above": 1})
    return line.removesuffix(" above 1")


class TestACondition:
    def test_is_a_line_for_each_comparison_below_what_joins_them(self):
        high, low = {"value": [LOSS], "above": 2}, {"value": [X, {"layers": "last"}], "at_most": 0.5}
        assert lines({"all": [high, {"any": [low, {"not": {"value": [LOSS], "is": "finite"}}]}]}) == [
            "all of",
            "  loss above 2",
            "  any of",
            "    x of the last layer at most 0.5",
            "    not loss is finite",
        ]

    def test_says_in_how_many_samples(self):
        assert lines({"condition": {"value": [LOSS], "above": 2}, "in_last": 10, "at_least": 6}) == [
            "in at least 6 of the last 10 samples",
            "  loss above 2",
        ]


class TestAValue:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ([X, {"layers": "max"}, {"over": [Y, {"layers": "max"}]}], "x (max of layers) / y (max of layers)"),
            ([X, {"over": [Y]}, {"layers": "min"}], "(x / y) (min of layers)"),
            ([LOSS, {"minus": [LOSS, {"best": "lowest"}]}, {"over": [LOSS]}], "(loss - the lowest loss so far) / loss"),
            ([LOSS, {"minus": 1}, "abs", {"over": [LOSS]}], "|loss - 1| / loss"),
            ([LOSS, {"minus": 1}, {"best": "highest"}], "the highest (loss - 1) so far"),
            ([LOSS, {"minus": 1}, {"start": "median"}], "(loss - 1) at its start"),
            ([LOSS, {"start": "min"}], "min of the first 3 samples of loss"),
            ([LOSS, {"start": "median", "samples": 1}], "the first loss"),
            ([LOSS, {"plus": 1}, "log10"], "log10 (loss + 1)"),
            ([LOSS, {"previous": 1}], "loss 1 sample ago"),
            ([X, {"layers": {"first_above": 0}}], "first layer with x above 0"),
        ],
    )
    def test_is_read_with_all_that_belongs_to_it(self, value, expected):
        assert text_of(value) == expected


class TestARule:
    def test_watches_what_it_reads_to_be_met(self):
        alone = {"value": [X, {"layers": "last"}], "above": 1}
        assert explained(alone, evidence={"loss": [LOSS]}).watches == ["x"]

    def test_has_the_defaults_of_what_it_does_not_say(self):
        found = explained({"value": [LOSS], "above": 2})
        assert (found.hold.samples, found.hold.steps) == (3, 10)
        assert (found.after.samples, found.after.steps) == (0, 0)
        assert found.clear == found.only_while == []

    def test_of_the_pack_is_told_whole(self):
        for rule in PACK:
            found = explain(rule)
            assert found.watches
            told = [*found.when, *found.clear, *found.only_while]
            assert all(line.text.count("(") == line.text.count(")") for line in told)
