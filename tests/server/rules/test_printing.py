"""A tree as the line that says the same: reading it gives the tree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsemon_server.rules import PACK, grammar, line, printing
from tsemon_server.rules.memory import OVER_TIME
from tsemon_server.rules.parts import Part
from tsemon_server.rules.program import Program

NUMBERS = st.one_of(
    st.integers(-1000, 1000),
    st.floats(-1e6, 1e6),
    st.floats(allow_nan=False, allow_infinity=False, max_value=1e299, min_value=-1e299),
)
SHARES = st.sampled_from([0, 0.1, 0.5, 1, 1.0])
PLACES = st.integers(-9, 9)
NAMES = {
    0: st.sampled_from(["loss", "val/loss", "update_alignment", "silent_seconds", "for", 'a "b" \\c', "größe", "own"]),
    1: st.sampled_from(["grad_norm", "token_diversity", "my norm", "loss"]),
    2: st.sampled_from(["attention_entropy", "h"]),
}
OF_ONE = "abs", "negate", "sqrt", "log10", "exp10", "log_odds"
OVER_LAYERS = "min", "max", "mean", "median", "sum", "first", "last", "slope", "r_squared", "fall", "fall_r_squared"
SAMPLES = st.integers(3, 1000)


@st.composite
def values(draw, axes, depth=3, *, own=None):
    """A value with so many axes; `own` has the axes of what stands before, if it may be named."""
    if axes == 0 and own is None and draw(st.integers(0, 5)) == 0:
        return draw(NUMBERS)
    num_stages = draw(st.integers(0, 2)) if depth > 0 else 0
    if own == axes and draw(st.booleans()):
        tree = ["own"]
    elif axes == 0 and num_stages and draw(st.integers(0, 4)) == 0:
        tree = [draw(NUMBERS)]
    elif axes == 0 and depth > 0 and draw(st.integers(0, 4)) == 0:
        tree = [{"steps_in": draw(conditions(depth - 1))}]
    elif axes < 2 and depth > 0 and draw(st.booleans()):
        tree = draw(reduced(axes, depth - 1))
    else:
        tree = [{("scalar", "layers", "heads")[axes]: draw(NAMES[axes])}]
    for _ in range(num_stages):
        is_number = isinstance(tree[-1], int | float)
        tree = [*tree, draw(stages(axes, depth - 1, own=None if is_number else axes))]
    return tree


@st.composite
def reduced(draw, axes, depth):
    before = draw(values(axes + 1, depth).filter(lambda tree: isinstance(tree, list)))
    if axes == 1:
        return [*before, {"heads": draw(st.one_of(st.sampled_from(OVER_LAYERS[:7]), hows()))}]
    above = st.builds(lambda bound: {"first_above": bound}, NUMBERS)
    return [*before, {"layers": draw(st.one_of(st.sampled_from(OVER_LAYERS), hows(), above))}]


def hows():
    return st.one_of(SHARES.map(lambda share: {"quantile": share}), PLACES.map(lambda place: {"index": place}))


@st.composite
def stages(draw, axes, depth, *, own):
    """A stage that leaves the axes as they are."""
    quantiles = SHARES.map(lambda share: {"quantile": share})
    over_time = st.one_of(st.sampled_from([*OVER_TIME]), quantiles)
    end = st.sampled_from(["lowest", "highest"])
    options = [
        st.sampled_from(OF_ONE),
        st.builds(lambda how, samples: {"window": how, "samples": samples}, over_time, SAMPLES),
        st.builds(lambda how: {"start": how}, over_time),
        st.builds(lambda how, samples: {"start": how, "samples": samples}, over_time, SAMPLES),
        st.builds(lambda end: {"best": end}, end),
        st.builds(lambda samples: {"z_score": samples}, SAMPLES),
        st.builds(lambda samples: {"previous": samples}, st.integers(1, 3)),
        st.builds(lambda steps: {"previous": {"steps": steps}}, st.integers(1, 30)),
        st.builds(lambda end: {"steps_since": end}, end),
        st.builds(lambda end, by: {"steps_since": end, "by": by}, end, SHARES),
    ]
    if axes:
        places = st.one_of(st.none(), PLACES)
        options += [
            st.just("skip_frozen"),
            st.builds(lambda start, end: {"slice": [start, end]}, places, places),
            st.builds(lambda mask: {"where": mask}, comparisons(axes, max(depth - 1, 0))),
        ]
    names = st.sampled_from(["plus", "minus", "times", "over", "min_with", "max_with"])
    other = st.one_of(values(axes, max(depth - 1, 0), own=own), values(0, max(depth - 1, 0)))
    options.append(st.builds(lambda name, right: {name: right}, names, other))
    return draw(st.one_of(options))


@st.composite
def comparisons(draw, axes, depth):
    names = draw(
        st.lists(st.sampled_from(["above", "below", "at_least", "at_most"]), min_size=1, max_size=4, unique=True)
    )
    bounds = {name: draw(values(draw(st.sampled_from([0, axes])), depth)) for name in names}
    return {"value": draw(values(axes, depth)), **bounds}


@st.composite
def conditions(draw, depth=2):
    kind = draw(
        st.sampled_from(
            ["number", "layers", "is", "held", "not", "all", "any"] if depth > 0 else ["number", "layers", "is"]
        )
    )
    below = max(depth - 1, 0)
    if kind == "number":
        return draw(comparisons(0, below))
    places = st.one_of(
        st.sampled_from(["any", "all", "first", "last"]),
        st.integers(1, 99).map(lambda least: {"layers": least}),
        SHARES.map(lambda share: {"share": share}),
    )
    if kind == "layers":
        return {**draw(comparisons(1, below)), "in": draw(places)}
    if kind == "is":
        what = draw(st.sampled_from(["finite", "nonfinite", "measured"]))
        axes = draw(st.sampled_from([0, 1]))
        tree = {"value": draw(values(axes, below)), "is": what}
        return {**tree, "in": draw(places)} if axes else tree
    if kind == "not":
        return {"not": draw(conditions(below))}
    if kind == "held":
        return {
            "condition": draw(conditions(below)),
            "in_last": draw(st.integers(5, 9)),
            "at_least": draw(st.integers(1, 5)),
        }
    return {kind: draw(st.lists(conditions(below), min_size=1, max_size=3))}


class TestALineThatWasPrinted:
    @settings(max_examples=300, deadline=None)
    @given(conditions())
    def test_is_read_as_the_condition_that_it_is_of(self, tree):
        grammar.condition(Part(tree), Program())
        assert line.condition(Part(printing.condition(tree))).tree == tree

    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from([0, 1, 2]).flatmap(values))
    def test_is_read_as_the_value_that_it_is_of(self, tree):
        grammar.value(Part(tree), Program())
        assert line.value(Part(printing.value(tree))).tree == tree

    @pytest.mark.parametrize(
        ("tree", "text"),
        [
            ([{"scalar": "loss"}, {"minus": 1e-8}], "loss - 1e-8"),
            ([{"scalar": "loss"}, {"minus": 0.0004}], "loss - 4e-4"),
            ([{"scalar": "loss"}, {"minus": -0.0125}], "loss - -0.0125"),
            ([{"scalar": "loss"}, {"times": 1e30}], "loss * 1e30"),
            ([[{"scalar": "loss"}, "log10"], {"plus": 3}], "log10(loss) + 3"),
            ([{"scalar": "loss"}, {"over": [{"scalar": "loss"}, {"plus": 1}]}], "loss / (loss + 1)"),
            ([2, {"times": ["own", {"plus": [{"scalar": "loss"}]}]}], "2 * (2 + loss)"),
        ],
    )
    def test_is_short(self, tree, text):
        assert printing.value(tree) == text

    def test_has_parentheses_where_and_stands_within_or(self):
        high = {"value": [{"scalar": "loss"}], "above": 1}
        assert printing.condition({"any": [high, {"all": [high, high]}]}) == "loss > 1 or (loss > 1 and loss > 1)"

    @pytest.mark.parametrize("lasting", [{"samples": 1, "steps": 20}, {"steps": 0}, {"samples": 3}])
    def test_says_how_long_as_a_line_does(self, lasting):
        text = f"loss > 1 for {printing.lasting(lasting)}"
        assert line.condition(Part(text), ("for",)).clauses == {"for": lasting}

    @pytest.mark.parametrize("rule", PACK, ids=lambda rule: rule.name)
    def test_is_what_the_built_in_rules_say(self, rule):
        for key in {"when", "clear", "only_while"} & {*rule.tree}:
            assert line.condition(Part(printing.condition(rule.tree[key]))).tree == rule.tree[key]
        for value in rule.tree.get("evidence", {}).values():
            assert line.value(Part(printing.value(value))).tree == value
