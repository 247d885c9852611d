import math

import pytest

from tsemon.tools.scanning.law import growth_law, in_words

STEPS = [*range(0, 2100, 100)]


def norms(exponent, start=30.0):
    return [start + 0.5 * t**exponent for t in STEPS]


class TestGrowthLaw:
    @pytest.mark.parametrize("exponent", [0.25, 0.5, 0.85, 1.5])
    def test_finds_the_exponent_that_is_there(self, exponent):
        law = growth_law(STEPS, norms(exponent))
        assert law.exponent == pytest.approx(exponent, abs=1e-9)
        assert law.r2 == pytest.approx(1.0)

    def test_counts_steps_from_the_first_checkpoint(self):
        assert growth_law([t + 5000 for t in STEPS], norms(0.5)).exponent == pytest.approx(0.5, abs=1e-9)

    def test_fits_the_square_root_to_the_norm_itself_as_the_paper_does(self):
        law = growth_law(STEPS, norms(0.5))
        assert (law.sqrt_slope, law.sqrt_r2) == (pytest.approx(0.5), pytest.approx(1.0))

    def test_is_not_known_of_few_checkpoints_or_of_a_norm_that_shrinks(self):
        assert growth_law(STEPS[:8], norms(0.5)[:8]) is None
        assert growth_law(STEPS[:9], norms(0.5)[:9]) is not None
        assert growth_law(STEPS, norms(0.5)[::-1]) is None
        assert growth_law(STEPS, [*norms(0.5)[:-1], math.nan]) is None


class TestInWords:
    @pytest.mark.parametrize(
        ("exponent", "says"),
        [(0.25, "slower than the square root"), (0.5, "as T5's in the paper"), (0.85, "at a constant learning rate"),
         (1.5, "nothing bounds")],
    )  # fmt: skip
    def test_says_what_the_exponent_means(self, exponent, says):
        text = in_words(growth_law(STEPS, norms(exponent)), norms(exponent))
        assert f"t^{exponent:.2f} (r2 1.000" in text
        assert says in text

    def test_says_that_no_power_fits(self):
        bent = [30 + t * math.exp(-t / 300) / 100 for t in STEPS]
        assert in_words(growth_law(STEPS, bent), bent).startswith("no power of steps fits")

    def test_says_why_there_is_none(self):
        assert in_words(None, norms(0.5)[:4]) == (
            "no growth law: of 3 checkpoints after the first, 3 have a larger norm than it; it takes 8, and most of them"
        )
        assert in_words(None, [1.0, math.inf]) == "no growth law: a norm is not finite"
