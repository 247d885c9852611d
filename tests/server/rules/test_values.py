"""The numbers that a rule can speak of."""

import math

import numpy as np
import pytest

from tsemon_server.rules.program import View

from .definitions import answers, layers_view, loss_view, numbers

NAN = math.nan
X = {"layers": "x"}
LOSS = {"scalar": "loss"}


def of_layers(value, values):
    return numbers(value, [layers_view(0, x=values)])[0]


def over_time(stage, losses, every=1):
    return numbers([LOSS, stage], [loss_view(step * every, loss) for step, loss in enumerate(losses)])


class TestLayers:
    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ("min", 1),
            ("max", 9),
            ("mean", 4.25),
            ("sum", 17),
            ("median", 3.5),
            ("first", 4),
            ("last", 3),
            ({"index": -2}, 9),
            ({"quantile": 0.25}, 2.5),
            ({"first_above": 3}, 0),
            ({"first_above": 4}, 2),
            ({"first_above": 9}, None),
        ],
    )
    def test_become_a_number(self, how, expected):
        assert of_layers([X, {"layers": how}], [4, 1, 9, 3]) == (expected and pytest.approx(expected))

    @pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.77, 1])
    def test_have_the_quantiles_that_numpy_has(self, share):
        values = np.random.default_rng(0).normal(size=13).astype(np.float32)
        found = of_layers([X, {"layers": {"quantile": share}}], values)
        assert found == pytest.approx(np.quantile(values.astype(float), share))

    @pytest.mark.parametrize(
        ("how", "expected"), [("min", 1), ("mean", 2), ("median", 2), ("first", 1), ("last", None)]
    )
    def test_that_are_undefined_are_left_out_but_not_the_one_that_was_asked_for(self, how, expected):
        assert of_layers([X, {"layers": how}], [1, NAN, 3, NAN]) == expected

    def test_that_are_all_undefined_give_nothing(self):
        assert of_layers([X, {"layers": "max"}], [NAN, NAN]) is None

    def test_that_were_not_measured_give_nothing(self):
        assert numbers([{"layers": "other"}, {"layers": "max"}], [layers_view(0, x=[1])]) == [None]

    def test_that_are_infinite_count(self):
        assert of_layers([X, {"layers": "max"}], [1, math.inf]) == math.inf

    def test_have_a_slope_over_depth(self):
        assert of_layers([X, {"layers": "slope"}], [1, 3, 5, 7, 9]) == pytest.approx(2)
        assert of_layers([X, {"layers": "r_squared"}], [1, 3, 5, 7, 9]) == pytest.approx(1)
        assert of_layers([X, {"layers": "r_squared"}], [1, 1, 1, 1]) == 0

    def test_have_no_slope_where_they_are_fewer_than_four(self):
        assert of_layers([X, {"layers": "slope"}], [1, 2, 3]) is None
        assert of_layers([X, {"layers": "slope"}], [1, 2, 3, NAN]) is None

    def test_have_a_fall_that_ends_where_it_reaches_its_floor(self):
        falling_then_flat = [0, -2, -4, -6, -8, -8.5, -8.4, -8.6, -8.5, -8.5]
        assert of_layers([X, {"layers": "fall"}], falling_then_flat) == pytest.approx(-2)
        assert of_layers([X, {"layers": "fall_r_squared"}], falling_then_flat) == pytest.approx(1)
        assert of_layers([X, {"layers": "slope"}], falling_then_flat) > -1

    def test_can_be_cut(self):
        assert of_layers([X, {"slice": [1, None]}, {"layers": "max"}], [9, 2, 3]) == 3
        assert of_layers([X, {"slice": [0, -1]}, {"layers": "last"}], [9, 2, 3]) == 2

    def test_that_are_frozen_on_purpose_can_be_left_out(self):
        view = View(0, {}, {"x": np.array([0, 5, 6])}, frozen=frozenset([0, 7]))
        assert numbers([X, "skip_frozen", {"layers": "min"}], [view]) == [5]
        assert numbers([X, {"layers": "min"}], [view]) == [0]

    def test_can_be_left_out_by_another_measure(self):
        value = [X, {"where": {"value": [{"layers": "y"}], "above": 0}}, {"layers": "min"}]
        assert numbers(value, [layers_view(0, x=[1, 2, 3], y=[0, 1, 1])]) == [2]
        assert numbers(value, [layers_view(0, x=[1, 2, 3], y=[0, 0, NAN])]) == [None]


class TestHeads:
    def test_become_layers(self):
        view = View(0, heads={"entropy": np.array([[0.5, 0.1], [0.9, 0.8]])})
        value = [{"heads": "entropy"}, {"heads": "min"}, {"layers": "max"}]
        assert numbers(value, [view]) == [0.8]


class TestArithmetic:
    @pytest.mark.parametrize(
        ("stages", "expected"),
        [
            (["abs"], 4),
            (["negate"], 4),
            (["abs", "sqrt"], 2),
            (["sqrt"], None),
            ([{"plus": 1}], -3),
            ([{"minus": [LOSS]}], 0),
            ([{"times": 3}], -12),
            ([{"over": 8}], -0.5),
            ([{"over": 0}], None),
            ([{"max_with": 0}], 0),
            ([{"min_with": -9}], -9),
            (["exp10"], 1e-4),
            (["exp10", "log10"], -4),
        ],
    )
    def test_is_that_of_numbers(self, stages, expected):
        (found,) = numbers([LOSS, *stages], [loss_view(0, -4.0)])
        assert found == pytest.approx(expected)

    def test_goes_layer_by_layer(self):
        value = [X, {"over": [{"layers": "y"}]}, {"layers": "max"}]
        assert numbers(value, [layers_view(0, x=[1, 6, 5], y=[1, 2, 0])]) == [3]
        view = View(0, {"loss": 2.0}, {"x": np.array([1, 3])})
        assert numbers([X, {"times": [{"scalar": "loss"}]}, {"layers": "max"}], [view]) == [6]

    def test_may_be_with_itself_at_another_time(self):
        losses = [loss_view(step, loss) for step, loss in enumerate([2.0, 8.0, 4.0])]
        assert numbers([LOSS, {"over": ["own", {"best": "highest"}]}], losses) == [1, 1, 0.5]
        long = [[LOSS, {"times": 3}], {"minus": [[LOSS, {"times": 3}], {"previous": 1}]}]
        assert numbers([LOSS, {"times": 3}, {"minus": ["own", {"previous": 1}]}], losses) == numbers(long, losses)

    def test_finds_nothing_where_depths_differ(self):
        value = [X, {"over": [{"layers": "y"}]}, {"layers": "max"}]
        assert numbers(value, [layers_view(0, x=[1, 2, 3], y=[1, 2])]) == [None]

    def test_has_log_odds_that_are_clipped(self):
        assert of_layers([X, "log_odds", {"layers": "first"}], [0.5]) == pytest.approx(0)
        assert of_layers([X, "log_odds", {"layers": "first"}], [0]) == pytest.approx(-13)


class TestTime:
    def test_has_windows_that_are_undefined_until_they_are_full(self):
        assert over_time({"window": "mean", "samples": 3}, [1, 2, 3, 7]) == [None, None, 2, 4]

    @pytest.mark.parametrize(
        ("take", "expected"),
        [
            ("min", 1),
            ("max", 7),
            ("median", 2),
            ("std", math.sqrt(62 / 9)),
            ("first", 2),
            ("last", 7),
            ("change", 5),
            ("ratio", 3.5),
            ("slope", 0.5),
            ({"quantile": 0.5}, 2),
        ],
    )
    def test_has_statistics_of_windows(self, take, expected):
        assert over_time({"window": take, "samples": 3}, [9, 2, 1, 7], every=5)[-1] == pytest.approx(expected)

    def test_does_not_count_what_is_undefined(self):
        assert over_time({"window": "mean", "samples": 2}, [1, NAN, 3, None]) == [None, None, 2, None]

    def test_has_the_start_of_the_run(self):
        assert over_time({"start": "median", "samples": 3}, [1, 9, 2, 100, NAN]) == [None, None, 2, 2, 2]

    def test_has_no_baseline_without_bound(self):
        """The first gradients of a training in float16 are infinite."""
        assert over_time({"start": "mean", "samples": 1}, [math.inf, 3, 4]) == [None, 3, 3]
        assert over_time({"best": "highest"}, [math.inf, 3, 4]) == [None, 3, 4]

    def test_has_the_best_so_far(self):
        assert over_time({"best": "lowest"}, [3, 5, 2, NAN, 4]) == [3, 3, 2, 2, 2]
        assert over_time({"best": "highest"}, [3, 5, 2]) == [3, 5, 5]

    def test_has_a_robust_z_score_against_the_samples_before(self):
        losses = [1, 2, 3, 4, 1000, 3]
        assert over_time({"z_score": 4}, losses)[:5] == [*[None] * 4, pytest.approx((1000 - 2.5) / 1.4826)]
        assert over_time({"z_score": 4}, losses)[5] == pytest.approx((3 - 3.5) / 1.4826)

    def test_has_a_z_score_that_is_finite_where_nothing_moved(self):
        assert over_time({"z_score": 3}, [2, 2, 2, 2.02])[-1] == pytest.approx(10)

    def test_has_what_was_before(self):
        assert over_time({"previous": 2}, [1, 2, 3, 4]) == [None, None, 1, 2]

    @pytest.mark.parametrize("every", [1, 2, 5, 10])
    def test_has_what_was_so_many_steps_before_however_far_samples_are_apart(self, every):
        steps = range(0, 60, every)
        ago = over_time({"previous": {"steps": 20}}, steps, every=every)
        assert ago == [step - 20 if step >= 20 else None for step in steps]

    def test_has_the_next_older_sample_if_there_was_none_so_many_steps_before(self):
        assert over_time({"previous": {"steps": 10}}, [0, 1, NAN, 3, 4, 5], every=4) == [None, None, None, 0, 1, 1]

    def test_has_the_steps_since_it_was_last_better(self):
        since = over_time({"steps_since": "lowest", "by": 0.1}, [10, 9.5, 8.9, 8.9, 8.8, 1], every=5)
        assert since == [0, 5, 0, 5, 10, 0]

    def test_has_the_steps_in_which_a_condition_has_held(self):
        value = [{"steps_in": {"value": [LOSS], "above": 5}}]
        views = [loss_view(5 * i, loss) for i, loss in enumerate([9, 9, NAN, 9, 1, 9])]
        assert numbers(value, views) == [0, 5, 10, 15, 0, 0]

    def test_goes_layer_by_layer(self):
        value = [X, {"over": [X, {"start": "first", "samples": 1}]}, {"layers": "max"}]
        assert numbers(value, [layers_view(0, x=[1, 2]), layers_view(1, x=[4, 2])]) == [1, 4]

    def test_starts_anew_where_the_depth_changes(self):
        value = [X, {"best": "highest"}, {"layers": "max"}]
        assert numbers(value, [layers_view(0, x=[5, 9]), layers_view(1, x=[1, 2, 3])]) == [9, 3]


class TestAComparisonOfLayers:
    @pytest.mark.parametrize(
        ("where", "expected"),
        [
            ("any", True),
            ("all", False),
            ("first", False),
            ("last", True),
            ({"layers": 2}, True),
            ({"layers": 3}, False),
            ({"share": 0.6}, True),
            ({"share": 0.7}, False),
        ],
    )
    def test_says_in_which(self, where, expected):
        assert answers({"value": [X], "above": 1, "in": where}, [layers_view(0, x=[1, 2, NAN, 3])]) == [expected]

    @pytest.mark.parametrize("where", ["any", "all", "last", {"layers": 1}, {"share": 0.5}])
    def test_is_unknown_where_none_is_known(self, where):
        condition = {"value": [X], "above": 1, "in": where}
        assert answers(condition, [layers_view(0, x=[NAN, NAN]), layers_view(1, y=[1])]) == [None, None]

    def test_may_be_with_other_layers(self):
        condition = {"value": [X], "above": [{"layers": "y"}], "in": "all"}
        assert answers(condition, [layers_view(0, x=[2, 3], y=[1, 2]), layers_view(1, x=[2, 3], y=[1, 4])]) == [
            True,
            False,
        ]

    def test_that_was_not_measured_leaves_the_answer_unknown(self):
        condition = {"value": [X], "above": [{"layers": "y"}], "below": 9, "in": "any"}
        views = [layers_view(0, x=[2, 3]), layers_view(1, x=[2, 3], y=[1]), layers_view(2, x=[2, 3], y=[1, 1])]
        assert answers(condition, views) == [None, None, True]


UNKNOWN = {"value": [{"scalar": "missing"}], "above": 0}
YES = {"value": [{"scalar": "loss"}], "above": 0}
NO = {"value": [{"scalar": "zero"}], "below": 0}


class TestACondition:
    @pytest.mark.parametrize(
        ("condition", "expected"),
        [
            ({"all": [YES, YES]}, True),
            ({"all": [YES, NO]}, False),
            ({"all": [UNKNOWN, NO]}, False),
            ({"all": [UNKNOWN, YES]}, None),
            ({"any": [NO, NO]}, False),
            ({"any": [NO, YES]}, True),
            ({"any": [UNKNOWN, YES]}, True),
            ({"any": [UNKNOWN, NO]}, None),
            ({"not": YES}, False),
            ({"not": NO}, True),
            ({"not": UNKNOWN}, None),
            ({"value": [{"scalar": "loss"}], "above": 1, "below": 9}, True),
            ({"value": [{"scalar": "loss"}], "above": 1, "below": 3}, False),
            ({"value": [{"scalar": "loss"}], "at_least": 5, "at_most": 5}, True),
        ],
    )
    def test_has_three_answers(self, condition, expected):
        assert answers(condition, [View(0, {"loss": 5.0, "zero": 0.0})]) == [expected]

    def test_may_be_about_what_is_not_finite(self):
        views = [loss_view(0, 1.0), loss_view(1, NAN), loss_view(2, math.inf), loss_view(3, None)]
        assert answers({"value": [LOSS], "is": "nonfinite"}, views) == [False, True, True, None]
        assert answers({"value": [LOSS], "is": "finite"}, views) == [True, False, False, None]
        assert answers({"value": [LOSS], "is": "measured"}, views) == [True, True, True, False]

    def test_may_have_to_hold_in_k_of_n_samples(self):
        condition = {"condition": {"value": [LOSS], "above": 5}, "in_last": 4, "at_least": 2}
        views = [loss_view(step, loss) for step, loss in enumerate([9, 1, 9, NAN, 1, 1, 1])]
        assert answers(condition, views) == [False, False, True, True, True, False, False]


STAGES = [
    *({"window": how, "samples": 2} for how in ("mean", "std", "slope", "ratio", "change", "median")),
    {"z_score": 3},
    {"steps_since": "lowest", "by": 0.1},
    {"times": [LOSS]},
    {"over": [LOSS]},
    "exp10",
    "log10",
    "log_odds",
]


@pytest.mark.parametrize("huge", [1e308, math.inf, -math.inf])
class TestNumbersWithoutBound:
    @pytest.mark.parametrize("stage", STAGES, ids=str)
    def test_are_no_error(self, stage, huge):
        over_time(stage, [1.0, 2.0, huge, 3.0, huge, -huge, 0.0])


class TestADefinition:
    def test_may_have_its_keys_in_any_order(self):
        assert over_time({"samples": 2, "window": "mean"}, [1, 3]) == [None, 2]
        assert over_time({"by": 0.1, "steps_since": "lowest"}, [3, 3]) == [0, 1]

    def test_means_the_same_for_the_numbers_of_numpy(self):
        high = {"all": [{"value": [LOSS], "above": 5}, {"value": [LOSS], "below": 50}]}
        views = [View(step, {"loss": np.float64(loss)}) for step, loss in enumerate([1.0, 9.0, 90.0])]
        assert answers(high, views) == [False, True, False]
