"""Rule files, and what is said of one that is wrong."""

import pytest

from tsemon.errors import InvalidArgument, InvalidRules
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load
from tsemon_server.rules.rule import Hold

GOOD = """
rules:
  - name: loss-is-high
    family: loss
    severity: warning
    title: The loss is high.
    when:
      all:
        - value: [{scalar: loss}]
          above: 1e1
        - value: [{layers: grad_norm}, {layers: last}]
          below: 0.5
    for: {samples: 4}
    clear_for: {steps: 7}
    evidence:
      start: [{scalar: loss}, {start: mean}]
    advice: It began at {start}.
    source: nowhere
    origin: convention
"""


class TestARuleFile:
    def test_is_read(self):
        (rule,) = load(GOOD)
        assert (rule.name, rule.title, rule.on) == ("loss-is-high", "The loss is high", "frame")
        assert (rule.hold, rule.clear_hold) == (Hold(samples=4, steps=0), Hold(samples=1, steps=7))

    def test_may_have_an_integer_with_a_decimal_point(self):
        (rule,) = load(GOOD.replace("samples: 4", "samples: 4.0"))
        assert repr(rule.hold.samples) == "4"

    def test_has_a_digest_of_what_it_says(self):
        (rule,) = load(GOOD)
        assert load("# a comment\n" + GOOD)[0].digest == rule.digest
        assert load(GOOD.replace("0.5", "0.6"))[0].digest != rule.digest

    @pytest.mark.parametrize(
        ("old", "new", "line", "said"),
        [
            ("name: loss-is-high", "name: Loss", 3, "rules[0].name: expected a name of small letters"),
            ("family: loss", "family: los", 4, "rules[0].family: expected one of tse, entropy"),
            ("severity: warning", "severity: bad", 5, "expected one of info, warning, critical, got 'bad'"),
            ("above: 1e1", "abov: 1e1", 10, "no 'abov' here; expected value, above"),
            ("above: 1e1", "above: high", 10, "expected a number, or a list that begins with"),
            ("above: 1e1", "in: any", 10, "the value is one number: expected no `in`"),
            ("          above: 1e1\n", "", 9, "nothing to hold the value against"),
            ("{layers: last}]", "{layers: lst}]", 11, "expected one of min, max"),
            ("{layers: last}]", "{heads: last}]", 11, "'heads' expects a value with heads, got layers"),
            (", {layers: last}]", "]", 11, "the value has layers: say in which"),
            ("[{layers: grad_norm}", "[{layer: grad_norm}", 11, "no 'layer' here; expected one of scalar, layers"),
            ("{layers: last}]", "{window: mean}]", 11, "'samples' is missing"),
            ("{layers: last}]", "{slice: 3}, {layers: last}]", 11, "expected a list of at least 1, got 3"),
            ("samples: 4", "samples: 0", 13, "expected a whole number from 1"),
            ("samples: 4", "samples: 4.5", 13, "expected a whole number from 1"),
            ("samples: 4", "samples: .nan", 13, "expected a whole number from 1"),
            ("{start: mean}", "{start: mode}", 16, "expected one of mean, min"),
            ("It began at {start}", "It began at {begin}", 17, "{begin} is not in evidence"),
            ("    origin: convention\n", "", 3, "'origin' is missing"),
            ("all:", "every:", 7, "expected a mapping with value, or with condition"),
            ("rules:", "rule:", 2, "no 'rule' here; expected rules"),
        ],
    )
    def test_that_is_wrong_is_refused_with_the_line_and_the_place(self, old, new, line, said):
        assert old in GOOD
        with pytest.raises(InvalidRules) as error:
            load(GOOD.replace(old, new, 1), "my.yaml")
        assert str(error.value).startswith(f"my.yaml line {line}: ")
        assert said in str(error.value)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("x \\ud800", "half of one"),
            *((text, "control characters") for text in ("x \\u0000", "x \\u202e", "x \\u0007")),
        ],
    )
    @pytest.mark.parametrize("key", ["title", "advice", "source", "origin"])
    def test_has_no_text_that_a_database_or_a_reader_chokes_on(self, key, text, said):
        lines = [f'    {key}: "{text}"' if line.startswith(f"    {key}:") else line for line in GOOD.splitlines()]
        with pytest.raises(InvalidArgument, match=said):
            load("\n".join(lines))

    @pytest.mark.parametrize("name", ["A", "a-b", "\u00e4", "a" * 65])
    def test_names_its_evidence_plainly(self, name):
        with pytest.raises(InvalidRules, match="expected small letters, digits and _"):
            load(GOOD.replace("start: [", f"{name}: [").replace("{start}", "x"))

    def test_is_of_bounded_size(self):
        with pytest.raises(InvalidRules, match=r"my\.yaml: expected at most 1,048,576 characters"):
            load(GOOD + "#" * 2**20, "my.yaml")

    def test_has_each_name_once(self):
        with pytest.raises(InvalidRules, match=r"line 20: .*a second rule 'loss-is-high'"):
            load(GOOD + GOOD.split("rules:\n")[1])

    @pytest.mark.parametrize("text", ["", "rules:", "rules: []", "rules: 3", "- 1", "a: [", "rules: [1]"])
    def test_that_is_none_is_refused(self, text):
        with pytest.raises(InvalidArgument, match=r"^my\.yaml"):
            load(text, "my.yaml")


class TestTheBuiltInRules:
    def test_have_each_name_and_alias_once(self):
        names = [name for rule in PACK for name in (rule.name, *rule.aliases)]
        assert len(set(names)) == len(names)
