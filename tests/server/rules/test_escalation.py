import json
import math

import numpy as np
import pytest

from tsemon_server.rules import RULES, TokenSimilarityEscalation, Track, View, advance, fall_over_depth

RULE = TokenSimilarityEscalation()

# Token diversity after so many blocks at initialisation, by the strength of de-escalation: tokens 64, width 512,
# alpha 1, 20 draws; a reproduction of Figure 5 of Classic Transformers (arXiv 2312.06182).
FIGURE_5 = {
    0.0: {
        1: 0.9534,
        5: 0.4912,
        10: 0.0287,
        15: 9.22e-4,
        20: 2.89e-5,
        25: 9.04e-7,
        30: 2.74e-8,
        35: 8.52e-10,
        40: 2.6e-11,
    },
    0.1: {1: 0.9619, 5: 0.7112, 10: 0.1723, 15: 0.0180, 20: 0.0016, 25: 1.46e-4, 30: 1.27e-5, 35: 1.14e-6, 40: 9.91e-8},
    0.3: {1: 0.9766, 5: 0.9473, 10: 0.9156, 15: 0.8859, 20: 0.8631, 25: 0.8418, 30: 0.8183, 35: 0.8043, 40: 0.7859},
    0.4: {1: 0.9827, 5: 0.9791, 10: 0.9784, 15: 0.9780, 20: 0.9784, 25: 0.9782, 30: 0.9774, 35: 0.9779, 40: 0.9770},
}


def figure_5(tau):
    at = FIGURE_5[tau]
    return 10 ** np.interp(np.arange(1, 41), list(at), np.log10(list(at.values())))


def escalating(ratio, blocks, similarity=0.2):
    """Diversity over depth where each block leaves `ratio` of the odds of diversity to similarity."""
    odds = (1 - similarity) / similarity * ratio ** np.arange(blocks + 1.0)
    return odds / (1 + odds)


def view(diversity, centred=0.99, step=7):
    centred = np.full(len(diversity), centred)
    return View(step, layers={"token_diversity": np.asarray(diversity), "centred_token_similarity": centred})


def verdict(*args, **kwargs):
    return RULE.read(view(*args, **kwargs)).verdict


class TestTheRuleIsMet:
    def test_by_the_papers_network_without_de_escalation(self):
        assert verdict(figure_5(0.0)) == "met"

    def test_where_de_escalation_is_below_the_critical_strength(self):
        assert verdict(figure_5(0.1)) == "met"

    def test_by_a_collapse_that_reaches_zero(self):
        assert verdict([0.7, 0.1, 1e-3, 1e-6, 1e-10, 0.0, 0.0, 0.0]) == "met"

    def test_by_a_collapse_onto_the_rounding_of_bfloat16(self):
        assert verdict([0.7 * 0.5**k if k < 16 else 1e-5 * (1 + k % 3) for k in range(81)]) == "met"

    def test_by_a_total_collapse_whatever_samples_share(self):
        assert verdict(np.geomspace(0.7, 9e-7, 13), centred=0.2) == "met"
        assert verdict(np.geomspace(0.7, 1.1e-6, 13), centred=0.2) == "between"

    def test_where_centring_leaves_nothing_to_compare(self):
        assert verdict([0.7, 0.05, 1e-3, 1e-5, 1e-8, 0.0], centred=math.nan) == "met"

    def test_by_the_slowest_escalation_known(self):
        """A BERT of 100 layers at random initialisation: similarity 0.348 at the input, 0.9997 at the end."""
        layers, similarity = (0, 31, 57, 87, 100), np.array([0.348, 0.9, 0.99, 0.999, 0.9997])
        odds = 10 ** np.interp(np.arange(101), layers, np.log10((1 - similarity) / similarity))
        assert verdict(odds / (1 + odds)) == "met"


class TestTheRuleIsNotMet:
    @pytest.mark.parametrize("tau", [0.3, 0.4])
    def test_above_the_critical_de_escalation(self, tau):
        assert verdict(figure_5(tau)) == "clear"

    @pytest.mark.parametrize("tau", [0.4, 1.0])
    def test_by_a_de_escalated_net_measured_before_its_operator(self, tau):
        odds, diversity = 0.02, []
        for _ in range(81):
            odds *= 2  # alpha 1
            diversity.append(1 / (1 + odds))
            odds = max(odds * (1 - tau) ** 2, 1e-3)  # what the next block's attention puts back
        assert verdict(diversity) == "clear"

    def test_by_a_direction_that_all_samples_share(self):
        assert verdict(np.geomspace(0.7, 1e-4, 13), centred=0.3) == "between"

    def test_by_tokens_that_are_alike_from_the_start(self):
        assert verdict(np.geomspace(2e-4, 1e-4, 13)) == "between"

    def test_by_tokens_that_are_equal_from_the_start(self):
        assert verdict(np.geomspace(2e-8, 1e-8, 13)) == "between"

    def test_by_a_single_block_that_drops_it_late(self):
        assert verdict([0.7] * 12 + [1e-4]) == "between"

    def test_by_a_deep_model_with_high_similarity(self):
        assert verdict(np.geomspace(0.6, 5e-3, 49)) == "between"

    def test_by_nan(self):
        diversity = np.geomspace(0.7, 1e-6, 13)
        diversity[-1] = math.nan
        assert verdict(diversity) == "unknown"

    def test_by_nan_after_blocks_that_stay_apart(self):
        assert verdict([0.7] * 12 + [math.nan]) == "unknown"

    def test_by_infinity(self):
        diversity = np.geomspace(0.7, 1e-6, 13)
        diversity[-1] = -math.inf
        assert verdict(diversity) == "unknown"


class TestWhatCannotBeJudgedIsSaid:
    def test_when_diversity_was_not_measured(self):
        reading = RULE.read(View(0, layers={}))
        assert reading.verdict == "unknown"
        assert "token_diversity was not measured" in reading.summary
        assert reading.evidence["not_measured"][0] == "token_diversity was not measured"

    def test_when_only_the_centred_similarity_is_missing(self):
        reading = RULE.read(View(0, layers={"token_diversity": np.geomspace(0.7, 1e-5, 13)}))
        assert (reading.verdict, reading.evidence["not_measured"]) == (
            "unknown",
            ["centred_token_similarity was not measured"],
        )

    def test_when_the_model_is_too_shallow_for_a_line(self):
        reading = RULE.read(view([0.7, 1e-3, 1e-5]))
        assert reading.verdict == "unknown"
        assert "needs 3 blocks, the model has 2" in reading.summary

    def test_when_a_block_in_the_middle_is_undefined_but_the_rest_decides(self):
        diversity = np.geomspace(0.7, 1e-5, 13)
        diversity[4] = math.nan
        reading = RULE.read(view(diversity))
        assert (reading.verdict, reading.evidence["not_measured"]) == (
            "met",
            ["token_diversity is undefined at layers 4"],
        )

    def test_but_high_diversity_is_clear_whatever_else_is_missing(self):
        assert RULE.read(View(0, layers={"token_diversity": np.full(13, 0.5)})).verdict == "clear"

    def test_and_an_empty_array_is_no_measure(self):
        assert RULE.read(view([])).verdict == "unknown"


class TestTheFallOverDepth:
    def test_is_the_ratio_of_a_geometric_escalation(self):
        fall = fall_over_depth(escalating(0.5, 12))
        assert fall.ratio_per_block == pytest.approx(0.5)
        assert fall.r_squared == pytest.approx(1.0)

    @pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
    def test_has_the_critical_tau_of_its_alpha(self, alpha):
        fall = fall_over_depth(escalating(1 / (1 + alpha**2), 12))
        assert fall.critical_tau == pytest.approx(1 - 1 / math.sqrt(1 + alpha**2))

    def test_of_the_papers_network_is_that_of_alpha_one(self):
        fall = fall_over_depth(figure_5(0.0))
        assert fall.critical_tau == pytest.approx(0.293, abs=0.003)  # 20 draws of random weights
        assert fall.r_squared > 0.999

    def test_leaves_the_plateau_of_rounding_out(self):
        fall = fall_over_depth(np.maximum(escalating(0.1, 80), 1e-14))
        assert fall.ratio_per_block == pytest.approx(0.1)
        assert fall.last_layer == 13  # 4e-13, the first within a decade of the floor

    def test_equals_the_least_squares_of_numpy(self):
        diversity = np.geomspace(0.7, 1e-6, 13) * np.random.default_rng(3).uniform(0.5, 1.4, 13)
        fall = fall_over_depth(diversity)
        x = np.arange(fall.first_layer, fall.last_layer + 1)
        y = np.log10(diversity[x] / (1 - diversity[x]))
        assert fall.slope == pytest.approx(np.polyfit(x, y, 1)[0])
        assert fall.r_squared == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)

    def test_of_a_flat_profile_is_none_at_all(self):
        fall = fall_over_depth(np.full(13, 0.5))
        assert (fall.slope, fall.r_squared, fall.critical_tau) == (0.0, 0.0, 0.0)

    def test_of_nothing_but_zeros_is_flat(self):
        assert fall_over_depth(np.zeros(13)).slope == 0.0

    def test_needs_four_finite_entries(self):
        assert fall_over_depth(np.array([0.7, 0.1, 0.01])) is None
        assert fall_over_depth(np.array([0.7, math.nan, 0.1, 0.01])) is None


class TestTheEvidence:
    def test_shows_first_middle_last_and_worst_layer(self):
        diversity = np.geomspace(0.7, 1e-5, 13)
        diversity[9] = 1e-7
        layers = RULE.read(view(diversity)).evidence["layers"]
        assert {name: at["layer"] for name, at in layers.items()} == {"first": 0, "middle": 6, "last": 12, "worst": 9}
        assert layers["worst"] == {"layer": 9, "token_diversity": 1e-7, "centred_token_similarity": 0.99}

    def test_names_every_threshold_it_was_held_against(self):
        assert RULE.read(view(figure_5(0.0))).evidence["thresholds"] == {
            "low_diversity": 5e-4,
            "clear_diversity": 1e-2,
            "max_slope": -0.03,
            "min_r_squared": 0.8,
            "high_centred": 0.5,
            "total_collapse_diversity": 1e-6,
            "hold_samples": 3,
            "hold_steps": 10,
        }

    def test_says_in_the_summary_how_much_a_block_leaves(self):
        reading = RULE.read(view(escalating(0.5, 14)))
        assert reading.summary == (
            "Tokens become the same over depth: after 14 blocks tokens differ in 0.00024 of their energy, and share "
            "0.99 of what is not common to the whole batch; each block leaves 0.5 of the difference (r² 1.00)."
        )

    @pytest.mark.parametrize(
        ("last", "centred", "conditions", "way"),
        [
            (1e-5, 0.9, (True, False), "energy, and share 0.90 of what is not common to the whole batch; each"),
            (1e-7, 0.2, (False, True), "energy, a total collapse (at most 1e-06); each"),
            (1e-7, math.nan, (None, True), "energy, a total collapse (at most 1e-06); each"),
            (
                1e-7,
                0.9,
                (True, True),
                "energy, a total collapse (at most 1e-06), and share 0.90 of what is not common to the whole batch; each",
            ),
        ],
        ids=["shared", "total", "total, centred unknown", "both"],
    )
    def test_shows_each_condition_as_it_is_and_says_which_way_the_rule_was_met(self, last, centred, conditions, way):
        reading = RULE.read(view(np.geomspace(0.7, last, 13), centred=centred))
        assert reading.verdict == "met"
        assert reading.evidence["conditions"] == {
            "low_diversity": True,
            "falls_over_depth": True,
            "shared_within_samples": conditions[0],
            "total_collapse": conditions[1],
        }
        assert way in reading.summary

    def test_names_what_is_not_met(self):
        reading = RULE.read(view(np.full(13, 1e-5), centred=0.2))
        assert reading.summary.endswith("not met: falls over depth, shared within samples or total collapse.")

    @pytest.mark.parametrize(
        "layers",
        [
            {},
            {"token_diversity": np.zeros(13)},
            {"token_diversity": np.full(13, np.nan)},
            {"token_diversity": np.array([])},
            {"token_diversity": np.full(13, np.inf), "centred_token_similarity": np.full(13, np.nan)},
            {"token_diversity": np.float32([0.7, 1e-3, 1e-6, 0, 0, 0]), "centred_token_similarity": np.zeros(2)},
        ],
        ids=["nothing", "zeros", "nan", "empty", "infinite", "other length"],
    )
    def test_is_plain_json_whatever_came(self, layers):
        reading = RULE.read(View(3, layers=layers))
        json.dumps(reading.evidence, allow_nan=False)
        json.dumps(dict(reading.sample), allow_nan=False)

    def test_does_not_change_what_it_was_given(self):
        given = view(np.geomspace(0.7, 0.0 + 1e-9, 13))
        before = {name: values.copy() for name, values in given.layers.items()}
        advance(RULE, Track(), given)
        assert all((given.layers[name] == values).all() for name, values in before.items())


class TestTheBuiltInPack:
    def test_names_each_rule_once(self):
        names = [rule.name for rule in RULES]
        assert len(set(names)) == len(names)
        assert "token-similarity-escalation" in names

    def test_gives_advice_with_its_source(self):
        for rule in RULES:
            assert set(rule.advice) == {"text", "source"}
            assert "arXiv" in rule.advice["source"]
