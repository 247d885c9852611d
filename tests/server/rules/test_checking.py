"""All mistakes of a rule, and the language as an editor offers it."""

import pytest

from tsemon_server.rules import PACK
from tsemon_server.rules.checking import mistakes, unmeasured
from tsemon_server.rules.functions import FUNCTIONS
from tsemon_server.rules.language import HELP, WORDS, language, signature
from tsemon_server.rules.line import KNOWN, MistakeInLine
from tsemon_server.rules.parts import Part
from tsemon_server.rules.rule import rule

GOOD = {"name": "mine", "when": "loss > 3"}


def fields(definition):
    return [mistake.path for mistake in mistakes(Part(definition))]


class TestTheMistakes:
    def test_are_none_in_the_pack(self):
        assert [fields(one.definition) for one in PACK] == [[] for _ in PACK]

    def test_are_found_in_each_key(self):
        wrong = {"name": "No", "when": "lss > 3", "clear": "loss <", "for": {"samples": 0}, "severity": "bad"}
        wrong |= {"evidence": {"x": "grad_norm"}, "advice": "{y}"}
        found = [("name",), ("when",), ("severity",), ("advice",), ("clear",), ("for", "samples"), ("evidence", "x")]
        assert sorted(fields(wrong)) == sorted([one for one in found if one != ("advice",)])
        assert fields(wrong | {"evidence": {"x": "loss"}})[-3:] == [("advice",), ("clear",), ("for", "samples")]

    @pytest.mark.parametrize(
        ("more", "field"),
        [
            ({"for": {"samples": 2}, "when": "loss > 3 for 3 samples"}, ("for",)),
            ({"advice": "lower it from {x}", "evidence": {"y": "loss"}}, ("advice",)),
            ({"wen": "loss > 3"}, ("wen",)),
        ],
    )
    def test_are_found_where_keys_do_not_fit_each_other(self, more, field):
        assert fields(GOOD | more) == [field]

    def test_are_found_in_what_is_no_rule(self):
        assert fields({}) == fields([]) == fields(3) == [()]

    def test_in_a_key_are_told_once(self):
        assert fields({"name": "mine", "when": "lss > 3"}) == [("when",)]


class TestTheWrongPart:
    @pytest.mark.parametrize(
        ("when", "wrong", "nearest"),
        [
            ("any(atention_entropy < 0.1)", "atention_entropy", "attention_entropy"),
            ("meen(loss, samples=3) > 1", "meen", "mean"),
            ("stdev(loss, samples=3) > 1", "stdev", "std"),
            ("pow(loss) > 1", "pow", ""),
            ("grad_norm > 1 and loss > 3", "grad_norm > 1", ""),
            ("loss > 3 and (loss > 4", "(", ""),
            ("größe > 3", "ö", ""),
            ('scalar("ö") + lss > 3', "lss", "loss"),
            ("loss = 3", "=", ""),
            ("loss > 3 and", "", ""),
            ("loss > 3 for 2 weeks", "2", ""),
            ("loss > 3" + " " * 4000, " " * 8, ""),
        ],
    )
    def test_is_marked_and_has_the_nearest_name(self, when, wrong, nearest):
        (mistake,) = mistakes(Part(GOOD | {"when": when}))
        assert isinstance(mistake, MistakeInLine)
        found, line = mistake.wrong, mistake.line
        assert line[found.place : found.place + found.length_in(line)] == wrong
        assert found.nearest == nearest


class TestNamesThatAreNotMeasured:
    def test_are_told_with_the_nearest(self):
        read = rule(Part(GOOD | {"when": 'any(layers("grad_nrm") > 1)'}))
        (note,) = unmeasured(read)
        assert "'grad_nrm', which tsemon does not measure; did you mean 'grad_norm'?" in note
        assert [*unmeasured(rule(Part(GOOD)))] == []


class TestTheLanguage:
    def test_has_every_name_and_every_function_with_its_help(self):
        assert language()["names"].keys() == KNOWN.keys()
        assert language()["functions"].keys() == FUNCTIONS.keys() == HELP.keys()
        assert WORDS.keys().isdisjoint(FUNCTIONS)
        assert language()["names"]["grad_norm"]["kind"] == "layers"
        assert all(one["help"] for one in language()["names"].values())

    @pytest.mark.parametrize(
        ("name", "shown"),
        [
            ("last", "last(x[, samples])"),
            ("std", "std(x, samples)"),
            ("min", "min(x[, y][, samples=])"),
            ("any", "any(x[, layers=][, share=], ...)"),
            ("quantile", "quantile(x, q[, samples])"),
        ],
    )
    def test_shows_how_a_function_is_called(self, name, shown):
        assert signature(name, FUNCTIONS[name]) == shown

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_has_an_example_of_each_function_that_can_be_read(self, name):
        example = FUNCTIONS[name].example
        if "<" in example or ">" in example or name in ("finite", "nonfinite", "measured", "between"):
            assert mistakes(Part(GOOD | {"when": example})) == []
