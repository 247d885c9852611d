"""A condition or a value as one line, and what is said of one that is wrong."""

import time
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tsemon_server.alerts.pulse import Pulse
from tsemon_server.rules import grammar, line, scanning
from tsemon_server.rules.functions import FUNCTIONS
from tsemon_server.rules.parts import Mistake, Part
from tsemon_server.rules.program import Program

LOSS, NORM, HEADS = {"scalar": "loss"}, {"layers": "grad_norm"}, {"heads": "attention_entropy"}
ABOVE = {"value": [LOSS], "above": 1}
LAYERS = {"value": [NORM], "above": 1}


def value(text):
    return line.value(Part(text)).tree


def condition(text):
    return line.condition(Part(text)).tree


def refused(text, read=line.condition, **options):
    with pytest.raises(Mistake) as error:
        read(Part(text, ("when",)), **options)
    assert error.value.path == ("when",)
    return str(error.value)


class TestAValue:
    @pytest.mark.parametrize(
        ("text", "tree"),
        [
            ("3", 3),
            ("-3.5", -3.5),
            ("1e-8", 1e-8),
            ("loss", [LOSS]),
            ("+loss", [LOSS]),
            ("grad_norm", [NORM]),
            ('scalar("val/loss")', [{"scalar": "val/loss"}]),
            ("scalar('update_alignment')", [{"scalar": "update_alignment"}]),
            ('scalar("größe")', [{"scalar": "größe"}]),
            ('layers("own_norm")', [{"layers": "own_norm"}]),
            ('heads("attention_entropy")', [HEADS]),
            ("silent_seconds", [{"scalar": "silent_seconds"}]),
            ("steps_in(loss > 1)", [{"steps_in": ABOVE}]),
            ("loss + 1", [LOSS, {"plus": 1}]),
            ("loss - 1 - 2", [LOSS, {"minus": 1}, {"minus": 2}]),
            ("1 - loss", [1, {"minus": [LOSS]}]),
            ("loss * (1 + loss)", [LOSS, {"times": [1, {"plus": [LOSS]}]}]),
            ("loss / lowest(own)", [LOSS, {"over": ["own", {"best": "lowest"}]}]),
            ("-loss", [LOSS, "negate"]),
            ("negate(3)", [3, "negate"]),
            ("abs(loss)", [LOSS, "abs"]),
            ("log_odds(grad_norm)", [NORM, "log_odds"]),
            ("min(loss, 0)", [LOSS, {"min_with": 0}]),
            ("max(loss, previous(own))", [LOSS, {"max_with": ["own", {"previous": 1}]}]),
            ("min(grad_norm)", [NORM, {"layers": "min"}]),
            ('min(heads("attention_entropy"))', [HEADS, {"heads": "min"}]),
            ("min(loss, samples=5)", [LOSS, {"window": "min", "samples": 5}]),
            ("min(grad_norm, samples=5)", [NORM, {"window": "min", "samples": 5}]),
            ("median(loss, 20)", [LOSS, {"window": "median", "samples": 20}]),
            ("last(grad_norm)", [NORM, {"layers": "last"}]),
            ("last(loss, samples=3)", [LOSS, {"window": "last", "samples": 3}]),
            ("slope(grad_norm)", [NORM, {"layers": "slope"}]),
            ("slope(loss, samples=3)", [LOSS, {"window": "slope", "samples": 3}]),
            ("ratio(loss, 10)", [LOSS, {"window": "ratio", "samples": 10}]),
            ("fall(grad_norm)", [NORM, {"layers": "fall"}]),
            ("fit(grad_norm)", [NORM, {"layers": "fall_r_squared"}]),
            ("r_squared(grad_norm)", [NORM, {"layers": "r_squared"}]),
            ("layer(grad_norm, -2)", [NORM, {"layers": {"index": -2}}]),
            ('head(heads("attention_entropy"), 0)', [HEADS, {"heads": {"index": 0}}]),
            ("quantile(grad_norm, 0.9)", [NORM, {"layers": {"quantile": 0.9}}]),
            ("quantile(loss, 0.9, samples=5)", [LOSS, {"window": {"quantile": 0.9}, "samples": 5}]),
            ("first_above(nonfinite, 0)", [{"layers": "nonfinite"}, {"layers": {"first_above": 0}}]),
            ("slice(grad_norm, 1)", [NORM, {"slice": [1, None]}]),
            ("slice(grad_norm, None, -1)", [NORM, {"slice": [None, -1]}]),
            ("skip_frozen(grad_norm)", [NORM, "skip_frozen"]),
            ("where(grad_norm, param_norm > 0)", [NORM, {"where": {"value": [{"layers": "param_norm"}], "above": 0}}]),
            ("start(loss)", [LOSS, {"start": "median"}]),
            ('start(loss, samples=1, take="mean")', [LOSS, {"start": "mean", "samples": 1}]),
            ("start(loss, quantile=0.5)", [LOSS, {"start": {"quantile": 0.5}}]),
            ("highest(loss)", [LOSS, {"best": "highest"}]),
            ("z_score(loss, 30)", [LOSS, {"z_score": 30}]),
            ("previous(loss, 5)", [LOSS, {"previous": 5}]),
            ("steps_since_lowest(loss, by=0.01)", [LOSS, {"steps_since": "lowest", "by": 0.01}]),
            ("steps_since_highest(loss)", [LOSS, {"steps_since": "highest"}]),
        ],
    )
    def test_is_the_tree_that_it_says(self, text, tree):
        assert value(text) == tree
        grammar.value(Part(tree), Program())


class TestACondition:
    @pytest.mark.parametrize(
        ("text", "tree"),
        [
            ("loss > 1", ABOVE),
            ("1 < loss", ABOVE),
            ("loss >= 1", {"value": [LOSS], "at_least": 1}),
            ("loss <= 1", {"value": [LOSS], "at_most": 1}),
            ("0 < loss <= 5", {"value": [LOSS], "above": 0, "at_most": 5}),
            ("5 > loss >= 1", {"value": [LOSS], "below": 5, "at_least": 1}),
            ("loss > learning_rate", {"value": [LOSS], "above": [{"scalar": "learning_rate"}]}),
            ("1 > 0", {"value": 1, "above": 0}),
            ("between(1, above=loss, below=9)", {"value": 1, "above": [LOSS], "below": 9}),
            ("any(grad_norm > 1)", LAYERS | {"in": "any"}),
            ("all(grad_norm > 1)", LAYERS | {"in": "all"}),
            ("first(grad_norm > 1)", LAYERS | {"in": "first"}),
            ("last(grad_norm > 1)", LAYERS | {"in": "last"}),
            ("any(grad_norm > 1, layers=3)", LAYERS | {"in": {"layers": 3}}),
            ("any(grad_norm > 1, share=0.5)", LAYERS | {"in": {"share": 0.5}}),
            ("any(loss < grad_norm)", {"value": [NORM], "above": [LOSS], "in": "any"}),
            ("nonfinite(loss)", {"value": [LOSS], "is": "nonfinite"}),
            ("measured(loss)", {"value": [LOSS], "is": "measured"}),
            ("any(finite(grad_norm))", {"value": [NORM], "is": "finite", "in": "any"}),
            ("held(loss > 1, 6, of=10)", {"condition": ABOVE, "in_last": 10, "at_least": 6}),
            ("not loss > 1", {"not": ABOVE}),
            ("loss > 1 and loss > 1", {"all": [ABOVE, ABOVE]}),
            ("loss > 1 or loss > 1 and loss > 1", {"any": [ABOVE, {"all": [ABOVE, ABOVE]}]}),
            ("any(loss > 1)", {"any": [ABOVE]}),
            ("all(loss > 1, not loss > 1)", {"all": [ABOVE, {"not": ABOVE}]}),
            ("\n loss\n\t> 1\n", ABOVE),
        ],
    )
    def test_is_the_tree_that_it_says(self, text, tree):
        assert condition(text) == tree
        grammar.condition(Part(tree), Program())

    def test_is_read_where_the_functions_show_an_example(self):
        for function in FUNCTIONS.values():
            grammar.condition(Part(condition(function.example)), Program())

    def test_knows_what_the_server_measures_of_a_run(self):
        assert sorted([*Pulse(0.0).scalars(1.0), "unevaluated_frames"]) == sorted(line.ON_CLOCK)


class TestAClauseAtTheEnd:
    @pytest.mark.parametrize(
        ("text", "clauses"),
        [
            ("loss > 1", {}),
            ("loss > 1 for 4 samples", {"for": {"samples": 4}}),
            ("loss > 1 for 1 sample", {"for": {"samples": 1}}),
            ("loss > 1 for 200 steps", {"for": {"steps": 200}}),
            ("loss > 1 for 4 samples, 20 steps", {"for": {"samples": 4, "steps": 20}}),
            ("(loss > 1)for 20 steps and 4 samples", {"for": {"samples": 4, "steps": 20}}),
            ("loss > 1 after 1000 steps", {"after": {"steps": 1000}}),
            ("loss > 1 for 3 samples after 0 samples", {"for": {"samples": 3}, "after": {"samples": 0}}),
            ("loss > 1 after 9 steps for 3 steps", {"for": {"steps": 3}, "after": {"steps": 9}}),
            ('scalar("wait for 3 samples") > 1', {}),
        ],
    )
    def test_says_how_long(self, text, clauses):
        assert line.condition(Part(text), ("for", "after")).clauses == clauses

    @pytest.mark.parametrize(
        ("text", "column", "said"),
        [
            ("loss > 1 for", 13, "expected a number of samples or steps after `for`, got ''"),
            ("loss > 1 for 4", 14, "expected a number of samples or steps after `for`, got '4'"),
            ("loss > 1 for 4 frames", 14, "got '4 frames'"),
            ("loss > 1 for 4 samples, 3 samples", 25, "two numbers of samples"),
            ("loss > 1 for 0 samples", 14, "expected a whole number from 1 to 10000, got 0 samples"),
            ("loss > 1 for 9999999999 steps", 14, "expected a whole number from 0 to 1000000000"),
            ("loss > 1 for 3 samples for 4 steps", 24, "a second `for`; expected one"),
            ("loss > 1 after warmup", 16, "expected a number of samples or steps after `after`, got 'warmup'"),
            ("any(grad_norm > 1 for 3 samples)", 19, "`for` must stand at the end, after all parentheses"),
            ("any(x > 1 for x in y)", 11, "`for` must stand at the end"),
        ],
    )
    def test_that_is_wrong_is_refused(self, text, column, said):
        found = refused(text, clauses=("for", "after"))
        assert found.startswith(f"column {column}: ")
        assert said in found

    def test_has_no_place_elsewhere(self):
        assert "only `when` and `clear` have it" in refused("loss > 1 for 3 samples")
        assert "only `when` has it" in refused("loss > 1 after 3 samples", clauses=("for",))


NESTED = "(" * 60 + "loss" + ")" * 60


class TestALineThatIsWrong:
    @pytest.mark.parametrize(
        ("text", "column", "said"),
        [
            ("last(token_divrsity) <= 5e-4", 6, "no metric is named 'token_divrsity'; did you mean 'token_diversity'?"),
            ("my_reward < 1", 1, 'A scalar that you log yourself is written scalar("my_reward")'),
            ("lst(grad_norm) > 1", 1, "no function is named 'lst'; did you mean 'last'?"),
            ("best(loss) > 1", 1, "write lowest(...) or highest(...)"),
            ("loss(3) > 1", 1, "loss is a metric, not a function"),
            ("max > 3", 1, "max is a function and needs arguments in parentheses"),
            ("grad_norm < 0.1", 1, "this comparison has an answer per layer; say in which it must hold: any(...)"),
            ("any(grad_norm < 1 and param_norm > 1)", 5, "this comparison has an answer per layer"),
            ("any(grad_norm)", 5, "expected a condition, got a value; compare it"),
            ("loss > any(grad_norm > 1)", 8, "expected a number, got a condition"),
            ('heads("attention_entropy") > 1', 1, "this comparison has an answer per head; reduce over heads first"),
            ("mean(loss) > 1", 6, "over time, say of how many samples: mean(..., samples=20)"),
            ("fall(loss) > 1", 6, "fall expects a value per layer, got one number"),
            ("mean() > 1", 1, "mean needs an argument"),
            ("held(loss > 1, 3) ", 1, "held needs the argument of"),
            ("mean(loss, 20, 30) > 1", 16, "mean takes at most 2 arguments without a name, got 3"),
            ("mean(loss, smples=3) > 1", 19, "mean has no argument 'smples'; expected samples="),
            ("mean(loss, samples=5000) > 1", 20, "samples: expected a whole number from 2 to 1000, got 5000"),
            ("mean(loss, samples=loss) > 1", 20, "expected a number that is written out for samples"),
            ("scalar(loss) > 1", 8, "expected a name in quotes"),
            ("held(loss > 1, 11, of=10)", 16, "expected at most the 10 samples"),
            ('grad_norm + heads("attention_entropy") > 1', 13, "expected two values of one shape"),
            ("loss > own", 8, "`own` stands for the left side of the nearest operator"),
            ("loss > 1.2 * lowest(own)", 21, "`own` would stand for 1.2, the left side of the nearest operator"),
            ("loss - max(0, own) > 1", 15, "`own` would stand for 0"),
            ("1 < loss > 3", 12, "twice held against the same kind of bound"),
            ("1 < loss < 2 < 3", 16, "expected at most two comparisons in a row"),
            ("loss == 3", 6, "`==` is not supported"),
            ("(loss) == 3", 8, "`==` is not supported"),
            ("loss = 3", 6, "`=` is not supported"),
            ("loss > 3 AND loss < 4", 10, "`AND` is not understood; write `and`"),
            ("loss above 3", 6, "`above` is not understood; write `>`"),
            ("loss > 3 For 3 samples", 10, "`For` is not understood; write `for`"),
            ("val/loss > 3", 1, 'written scalar("val/loss")'),
            ("loss - val/loss > 3", 8, 'written scalar("val/loss")'),
            ("update_nrm/param_norm > 3", 1, "did you mean 'update_norm'?"),
            ("-" * 55 + "loss > 3", 50, "expected at most 50 expressions inside one another"),
            ("loss ** 2 > 1", 6, "`**` is not supported"),
            ("9**9**9 > loss", 2, "`**` is not supported"),
            ("loss > 10%", 10, "write 20% as 0.2"),
            ("loss > 1 && loss < 3", 10, "write and"),
            ("lambda: loss", 1, "lambda is not supported"),
            ("loss.x > 1", 1, "a dot between names is not supported"),
            ("grad_norm[0] > 1", 10, "write layer(x, 3)"),
            ("(a := 3) > 1", 2, "`:=` is not supported"),
            ("f'{loss}' > 1", 1, "f-strings are not supported"),
            ("loss if loss else 3", 1, "`if` and `else` are not supported"),
            ("mean(*loss) > 1", 6, "`*` before an argument"),
            ("mean(loss, **loss) > 1", 14, "`**` before an argument"),
            ("'loss' > 1", 1, "expected a number or a name without quotes"),
            ("loss > True", 8, "expected a number, got True"),
            ("loss > 3j", 8, "expected a number such as 5, 0.5 or 5e-4, got '3j'"),
            ("loss > 1e999", 8, "this number is too large"),
            (f"loss > {'9' * 350}", 8, "this number is too large"),
            ("lоss > 1", 2, "CYRILLIC SMALL LETTER O"),
            ("loss ≥ 1", 6, "write >= instead"),
            ("loss\0 > 1", 5, "expected visible characters, got the character U+0000"),
            ("loss > 'a", 8, "no closing quote"),
            ("(loss > 1", 1, "this parenthesis is never closed"),
            ("loss > 1)", 9, "this parenthesis was never opened"),
            ("loss >", 7, "something is missing at the end"),
            ("loss loss > 1", 6, "this is not an expression"),
            ("", 1, "expected an expression, got nothing"),
            (f"{NESTED} > 1", 41, "expected at most 40 parentheses inside one another"),
            ("-" * 3000 + "loss > 1", 1, "nested too deeply"),
            ("not " * 900 + "loss > 1", 201, "expected at most 50 expressions inside one another"),
            ("loss" + "+1" * 1500 + " > 1", 1, "expected at most about 1,000 names"),
            ("loss" + " " * 4000 + "> 1", 4001, "expected at most 4,000 characters, got 4,007"),
        ],
    )
    def test_is_refused_with_the_column(self, text, column, said):
        found = refused(text)
        assert found.startswith(f"column {column}: ")
        assert said in found

    def test_is_shown_with_a_mark_below_the_place_and_an_example(self):
        assert refused("loss > mean(loss)").split("\n")[1:] == [
            "    loss > mean(loss)",
            "                ^",
            "    for example: mean(loss, samples=20) > 1",
        ]

    def test_is_marked_where_people_count_characters(self):
        _, shown, mark = refused('scalar("größe") > 1 + lss').split("\n")
        assert shown[mark.index("^") :] == "lss"

    def test_is_shown_in_part_if_it_is_long(self):
        _, shown, mark = refused("loss > 1 and " * 50 + "lss > 1 and " + "loss > 1 and " * 50 + "loss > 1").split("\n")
        assert len(shown) < 120
        assert shown[mark.index("^") :].startswith("lss > 1")

    def test_is_refused_as_a_value_too(self):
        assert "expected a number, got a condition" in refused("loss > 1", line.value)


WORDS = st.sampled_from(
    [
        *FUNCTIONS,
        *list(line.KNOWN)[:8],
        "own",
        "and",
        "or",
        "not",
        "for",
        "if",
        "lambda",
        "samples",
        "steps",
        "None",
        "True",
    ]
)
PIECES = st.one_of(
    WORDS,
    st.sampled_from(
        [*"()+-*/<>=!,.:[]{}%&|~^@#'\"\\ \n\t0123456789", "<=", ">=", "**", "1e999", "samples=", "9" * 400]
    ),
    st.text(max_size=3),
)


class TestAChain:
    def test_of_terms_is_not_nested(self):
        flat = "loss > 1" + " + 1" * 60
        grammar.condition(Part(condition(flat)), Program())
        assert condition(flat)["above"][1:] == [{"plus": 1}] * 60
        assert value("loss" + " - previous(own)" * 60)[1:] == [{"minus": ["own", {"previous": 1}]}] * 60

    def test_is_bounded_by_its_length(self):
        assert "at most about 1,000" in refused("loss > 1" + "+1" * 1_990)

    def test_may_be_long_in_what_is_refused(self):
        assert "any(grad_norm > 1)" in refused("grad_norm > 1" + "+1" * 300)


class TestAStatisticOverLayers:
    def test_may_be_meant_over_time(self):
        found = refused("grad_norm > 10 * median(grad_norm)")
        assert "median(grad_norm) is over layers; over time, say of how many samples: samples=20" in found
        assert found.endswith("for example: any(grad_norm > 10 * median(grad_norm, samples=20))")
        line.condition(Part("any(grad_norm > 10 * median(grad_norm, samples=20))"))
        assert "samples=" not in refused("grad_norm > 10 * median(grad_norm, samples=5)").split("\n")[0]


class TestAClause:
    def test_names_its_limit(self):
        said = "expected a whole number from 0 to 1000000000, got 99999999999999999999 steps"
        assert said in refused("loss > 3 for 99999999999999999999 steps", clauses=("for",))


class TestAnyText:
    """Whatever somebody writes is read, or refused with a reason, at once."""

    @settings(max_examples=400, deadline=None)
    @given(
        st.one_of(st.text(), st.lists(PIECES, max_size=60).map(" ".join), st.lists(PIECES, max_size=60).map("".join))
    )
    @example("9**9**9**9")
    @example("(" * 3999)
    @example("-" * 4000)
    @example("[" * 4000)
    @example("a." * 2000)
    @example("not " * 1000)
    @example('"' * 3999)
    @example("'\\" * 1999)
    @example("\ud800")
    @example("1if 1else 1")
    def test_is_read_or_refused_in_no_time(self, text):
        begin = time.process_time()
        for read, compiled in ((line.condition, grammar.condition), (line.value, grammar.value)):
            with suppress(Mistake):
                compiled(Part(read(Part(text)).tree), Program())
        assert time.process_time() - begin < 1  # the slowest takes 30 ms; a second is a machine that is busy

    def test_is_compiled_in_no_time_where_each_stage_says_all_before_it_twice(self):
        deep = "grad_norm" + " - previous(own)" * 45
        begin = time.process_time()
        term = grammar.value(Part(value(deep)), Program())
        assert time.process_time() - begin < 1
        assert len(term.key) <= 4200
        assert len(term.says) <= 1100

    def test_is_bounded(self):
        assert (scanning.MAX_CHARACTERS, line.MAX_DEPTH, line.MAX_NODES) == (4_000, 50, 1_000)
