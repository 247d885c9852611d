"""Rule files, and what is said of one that is wrong."""

import pytest

from tsemon.errors import InvalidArgument, InvalidDocument, InvalidRules
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load, load_file
from tsemon_server.rules.program import Program
from tsemon_server.rules.rule import Hold, compile_rule

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
            ("above: 1e1", "abov: 1e1", 10, "unknown key 'abov'; did you mean above?"),
            ("above: 1e1", "above: high", 10, "expected a number, or a list that begins with"),
            ("above: 1e1", "in: any", 10, "the value is one number: expected no `in`"),
            ("          above: 1e1\n", "", 9, "nothing to hold the value against"),
            ("{layers: last}]", "{layers: lst}]", 11, "expected one of min, max"),
            ("{layers: last}]", "{heads: last}]", 11, "'heads' expects a value with heads, got layers"),
            (", {layers: last}]", "]", 11, "the value has layers: say in which"),
            ("[{layers: grad_norm}", "[{layer: grad_norm}", 11, "unknown key 'layer'; did you mean layers?"),
            ("{layers: last}]", "{window: mean}]", 11, "'samples' is missing"),
            ("{layers: last}]", "{slice: 3}, {layers: last}]", 11, "expected a list of at least 1, got 3"),
            ("samples: 4", "samples: 0", 13, "expected a whole number from 1"),
            ("samples: 4", "samples: 4.5", 13, "expected a whole number from 1"),
            ("samples: 4", "samples: .nan", 13, "expected a whole number from 1"),
            ("{start: mean}", "{start: mode}", 16, "expected one of mean, min"),
            ("It began at {start}", "It began at {begin}", 17, "{begin} is not in evidence"),
            ("The loss is high.", "High since {since}", 6, "{since} is not in evidence"),
            ("name: loss-is-high", "on: frame", 3, "'name' is missing; expected name, when"),
            ("for: {samples: 4}", "for: {samples: 4, step: 1}", 13, "unknown key 'step'; did you mean steps?"),
            ("family: loss", "zzz: loss", 4, "unknown key 'zzz'; expected name, when, family"),
            (
                "family: loss",
                "family:",
                4,
                "expected one of tse, entropy, rank, norm, dead, diverge, data, loss, liveness, custom, got nothing",
            ),
            ("severity: warning", "severity: true", 5, "expected one of info, warning, critical, got true"),
            ("all:", "every:", 7, "expected a mapping with value, or with condition"),
            ("rules:", "rule:", 2, "unknown key 'rule'; did you mean rules?"),
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

    def test_that_cannot_be_read_is_told_of_in_plain_words(self, tmp_path):
        file = tmp_path / "my.yaml"
        for content, said in (
            (None, f"{file}: the rule file cannot be read: No such file or directory"),
            (b"", f"{file}: expected rules, got an empty text"),
            (b"rules:\n\xff", f"{file} line 2: expected text in UTF-8; save the file in this encoding"),
        ):
            if content is not None:
                file.write_bytes(content)
            with pytest.raises(InvalidDocument) as error:
                load_file(file)
            assert str(error.value) == said

    @pytest.mark.parametrize("text", ["", "rules:", "rules: []", "rules: 3", "- 1", "a: [", "rules: [1]"])
    def test_that_is_none_is_refused(self, text):
        with pytest.raises(InvalidArgument, match=r"^my\.yaml"):
            load(text, "my.yaml")


class TestTheBuiltInRules:
    def test_have_each_name_and_alias_once(self):
        names = [name for rule in PACK for name in (rule.name, *rule.aliases)]
        assert len(set(names)) == len(names)


LINE = """
rules:
  - name: loss-is-high
    when: loss > 10 and last(grad_norm) < 0.5 for 4 samples
    clear: >-
      loss < 5
      for 2 samples, 7 steps
    only_while: learning_rate > 0
    evidence:
      start: start(loss, take="mean")
"""


class TestARuleInLines:
    def test_is_the_rule_that_its_trees_say(self):
        (rule,), (other,) = load(LINE), load(GOOD)
        assert rule.tree["when"]["all"] == [
            {"value": [{"scalar": "loss"}], "above": 10},
            {"value": [{"layers": "grad_norm"}, {"layers": "last"}], "below": 0.5},
        ]
        compiled, as_trees = compile_rule(rule, Program()), compile_rule(other, Program())
        assert compiled.when == as_trees.when
        assert compiled.evidence["start"].key == as_trees.evidence["start"].key
        assert (rule.hold, rule.clear_hold) == (Hold(samples=4, steps=0), Hold(samples=2, steps=7))

    def test_needs_a_name_and_a_condition(self):
        (rule,) = load("rules: [{name: loss-is-high, when: loss > 10}]")
        assert (rule.family, rule.severity, rule.title) == ("custom", "warning", "Loss is high")
        assert rule.advice == rule.source == rule.origin == ""
        assert (rule.hold, rule.on) == (Hold(samples=3, steps=10), "frame")

    def test_keeps_what_was_written(self):
        (rule,) = load(LINE)
        assert rule.definition["when"] == "loss > 10 and last(grad_norm) < 0.5 for 4 samples"
        assert rule.definition["clear"] == "loss < 5 for 2 samples, 7 steps"
        assert load(LINE.replace("> 10", "> 11"))[0].digest != rule.digest

    @pytest.mark.parametrize(
        ("old", "new", "line", "said"),
        [
            ("loss > 10", "lss > 10", 4, "rules[0].when: column 1: no metric is named 'lss'"),
            (
                "learning_rate > 0",
                "[learning_rate > 0]",
                8,
                "only_while: expected a line such as loss > 10, got ['learn",
            ),
            ("loss < 5", "los < 5", 5, "rules[0].clear: column 1: no metric is named 'los'; did you mean 'loss'?"),
            ("> 0", "> 0 for 3 samples", 8, "rules[0].only_while: column 19: `for` is not possible here"),
            ("start(loss, ", "start(grad_norm, ", 10, "evidence.start: expected one number, got layers"),
            ("start(loss, ", "start(loss > 1, ", 10, "evidence.start: column 7: expected a number, got a condition"),
            ("    only_while", "    for: {samples: 3}\n    only_while", 8, "the line of 'when' has `for`, too"),
            (
                "    only_while",
                "    clear_for: {samples: 3}\n    only_while",
                8,
                "the line of 'clear' has `for`, too",
            ),
        ],
    )
    def test_that_is_wrong_is_refused_with_the_line_and_the_column(self, old, new, line, said):
        assert old in LINE
        with pytest.raises(InvalidRules) as error:
            load(LINE.replace(old, new, 1), "my.yaml")
        assert str(error.value).startswith(f"my.yaml line {line}: ")
        assert said in str(error.value)

    def test_shows_the_place_below_what_is_wrong(self):
        with pytest.raises(InvalidRules) as error:
            load("rules: [{name: a, when: last(grad_nrm) > 1}]", "my.yaml")
        first, *below = str(error.value).splitlines()
        assert first.endswith(' is written scalar("grad_nrm") (rule a)')
        assert below == ["    last(grad_nrm) > 1", "         ^"]
