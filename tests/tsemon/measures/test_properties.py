"""What must hold of the measures for any input, and where they are undefined. The numbers themselves: test_vectors.py."""

import functools
import inspect
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tsemon import measures as m
from tsemon.catalogue import CATALOGUE, NOT_OF_TENSORS
from tsemon.errors import InvalidArgument, ShapeError
from tsemon.measures import linear

ROOT = Path(__file__).parents[3]
NAN = math.nan
FUNCTIONS = sorted(name for name, value in vars(m).items() if inspect.isfunction(value))
few = settings(max_examples=12)
seeds = st.integers(0, 2**16)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def softmax(*shape, seed=0, spread=1.0, dtype=torch.float64):
    return torch.softmax(spread * normal(*shape, seed=seed, dtype=dtype), dim=-1)


def close(got, want, rtol=1e-9, atol=1e-12):
    want = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, want.expand_as(got), rtol=rtol, atol=atol, equal_nan=True)


TOKENS = {
    "token_similarity": m.token_similarity,
    "token_diversity": m.token_diversity,
    "cosine_similarity": m.cosine_similarity,
    "hfc_lfc": m.hfc_lfc,
    "hfc_lfc_spectral": functools.partial(m.hfc_lfc, norm="spectral"),
    "effective_rank": m.effective_rank,
}
LAYERS = {
    "escalation_rate": m.escalation_rate,
    "xi_1": lambda x, y: m.xi(x, y)[0],
    "xi_2": lambda x, y: m.xi(x, y)[1],
}
STEPS = {
    "mu_1_squared": lambda x, p: m.mu_squared(x, p)[0],
    "mu_2_squared": lambda x, p: m.mu_squared(x, p)[1],
    "omega": m.omega,
    "expected_rate": functools.partial(m.expected_rate, alpha=0.7),
    "estimate1_rate": functools.partial(m.estimate1_rate, alpha=0.7),
    "estimate2_rate": functools.partial(m.estimate2_rate, alpha=0.7),
}
ATTENTION = {
    "importance_entropy": m.importance_entropy,
    "first_token_importance": m.first_token_importance,
    "positions_attended": m.positions_attended,
    "row_entropy": m.row_entropy,
    "delta": m.delta,
    "second_eigenvalue": m.second_eigenvalue,
}
VALUES = {"value_spectrum": m.value_spectrum, "first_value_norm_ratio": m.first_value_norm_ratio}


def of(measures):
    return pytest.mark.parametrize("measure", measures.values(), ids=measures.keys())


class TestMeasuresOfTokens:
    @of(TOKENS)
    @given(seed=seeds, scale=st.sampled_from([1e-20, 1e-3, -7.0, 1e20]), num_tokens=st.integers(2, 9))
    @few
    def test_see_neither_scale_nor_order_nor_rotation(self, measure, seed, scale, num_tokens):
        x = normal(num_tokens, 5, seed=seed) + normal(5, seed=seed + 1)
        rotation = torch.linalg.qr(normal(5, 5, seed=seed + 2)).Q
        want = measure(x)
        for same in (scale * x, x[torch.randperm(num_tokens)], x @ rotation):
            close(measure(same), want, rtol=1e-6, atol=1e-9)

    @of(TOKENS)
    @pytest.mark.parametrize("scale", [1e-20, 1e20])
    def test_survive_float32_where_squares_do_not(self, measure, scale):
        x = normal(6, 4, dtype=torch.float32)
        close(measure(x * scale), measure(x.double()).float(), rtol=1e-4)

    @given(seed=seeds, num_tokens=st.integers(1, 9), width=st.integers(1, 9))
    @few
    def test_keep_their_bounds(self, seed, num_tokens, width):
        x = normal(num_tokens, width, seed=seed)
        assert 1 - 1e-9 <= m.effective_rank(x) <= min(num_tokens, width) + 1e-9
        assert 0 <= m.hfc_lfc(x, norm="spectral") <= m.hfc_lfc(x) * (1 + 1e-9)

    @given(seed=seeds, spread=st.sampled_from([1e-6, 1e-2, 1.0, 100.0]))
    @few
    def test_frobenius_ratio_is_the_root_of_diversity_over_similarity(self, seed, spread):
        x = spread * normal(7, 5, seed=seed) + normal(5, seed=seed + 1)
        close(m.hfc_lfc(x), (m.token_diversity(x) / m.token_similarity(x)).sqrt(), rtol=1e-6)

    @given(seed=seeds, tau=st.floats(0, 1))
    @few
    def test_deescalation_has_its_closed_form(self, seed, tau):
        x = normal(7, 5, seed=seed) + 2
        s = m.token_similarity(x)
        close(m.token_similarity(m.deescalate(x, tau)), (1 - tau) ** 2 * s / ((1 - tau) ** 2 * s + 1 - s))

    @pytest.mark.parametrize("num_tokens", range(2, 40, 3))
    def test_full_deescalation_leaves_nothing_of_equal_tokens(self, num_tokens):
        """In float32 their mean differs from them in the last digit, and the noise was taken for tokens."""
        x = normal(6, dtype=torch.float32).expand(num_tokens, 6)
        close(m.deescalate(x, 1.0), 0.0, atol=0)
        assert m.token_similarity(m.deescalate(x, 1.0)).isnan()

    def test_effective_rank_counts_equal_directions(self):
        close(m.effective_rank(torch.eye(5)[:, :3] * 1e-9), 3.0, rtol=1e-6)

    def test_effective_rank_of_a_large_matrix_comes_near_from_its_gram_matrix(self):
        """300 x 280 of rank 4: 276 singular values of 3e-8 instead of 0 add less than 1e-3."""
        x = torch.linalg.qr(normal(300, 4)).Q @ torch.linalg.qr(normal(280, 4, seed=1)).Q.T
        close(m.effective_rank(x), 4.0, rtol=1e-3)
        x = normal(300, 280)
        share = torch.linalg.svdvals(x) / torch.linalg.svdvals(x).sum()
        close(m.effective_rank(x), torch.special.entr(share).sum().exp(), rtol=1e-9)

    def test_another_norm_is_refused(self):
        with pytest.raises(InvalidArgument, match="'nuclear'"):
            m.hfc_lfc(torch.ones(2, 2), norm="nuclear")


class TestMeasuresOfALayer:
    @given(seed=seeds, spread=st.sampled_from([1e-7, 1e-3, 1.0, 30.0]))
    @few
    def test_rate_is_one_plus_xi_ratio_less_one_times_similarity(self, seed, spread):
        x = spread * normal(6, 4, seed=seed) + normal(4, seed=seed + 1)
        y = spread * normal(6, 4, seed=seed + 2) + normal(4, seed=seed + 3)
        xi_1, xi_2 = m.xi(x, y)
        close(m.escalation_rate(x, y), 1 + (xi_1 / xi_2 - 1) * m.token_similarity(x), rtol=1e-8)

    @of(LAYERS)
    @given(seed=seeds, scale=st.sampled_from([1e-20, 1e20]))
    @few
    def test_sees_neither_common_scale_nor_order_nor_rotation(self, measure, seed, scale):
        x, y = normal(6, 4, seed=seed), normal(6, 4, seed=seed + 1)
        rotation = torch.linalg.qr(normal(4, 4, seed=seed + 2)).Q
        for same in ((scale * x, scale * y), (x.flip(0), y.flip(0)), (x @ rotation, y @ rotation)):
            close(measure(*same), measure(x, y), rtol=1e-8)

    @pytest.mark.parametrize("scale", [1e-20, 1e20])
    def test_rate_and_xi_survive_float32_where_squares_do_not(self, scale):
        x, y = normal(6, 4, dtype=torch.float32), normal(6, 4, seed=1, dtype=torch.float32)
        for measure in LAYERS.values():
            close(measure(x * scale, y * scale), measure(x.double(), y.double()).float(), rtol=1e-4)

    def test_rate_keeps_its_digits_near_collapse_in_float32(self):
        """Tokens that differ in the last bit of one entry: 1 - t_sim is 0 there, and a plain mean leaves noise."""
        x = normal(7, dtype=torch.float32).expand(5, 7).clone()
        y = x.clone()
        x[0, 0] = torch.nextafter(x[0, 0], torch.tensor(9.0))
        y[0, 0], y[1, 1] = torch.nextafter(y[0, 0], torch.tensor(9.0)), torch.nextafter(y[1, 1], torch.tensor(9.0))
        close(m.escalation_rate(x, y), m.escalation_rate(x.double(), y.double()).float(), rtol=1e-5)

    @pytest.mark.parametrize("num_tokens", range(2, 40, 3))
    def test_growth_of_equal_tokens_is_undefined(self, num_tokens):
        x = normal(6, dtype=torch.float32).expand(num_tokens, 6)
        y = normal(num_tokens, 6, dtype=torch.float32)
        assert m.xi(x, y)[1].isnan()
        assert not m.xi(x, y)[0].isnan()
        assert m.escalation_rate(y, 3 * x).isnan()
        assert m.escalation_rate(x, y) == 0

    def test_growth_of_nothing_shared_is_undefined(self):
        x = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
        xi_1, xi_2 = m.xi(x, 2 * x + 1)
        assert xi_1.isnan()
        close(xi_2, 4.0)

    @given(seed=seeds, alpha=st.floats(0.1, 2))
    @few
    def test_expected_rate_is_met_by_the_mean_over_random_weights(self, seed, alpha):
        """Lemma 4 is exact for xi, so its mean over 2,000 draws of W must come within sampling error (0.1 is 4 sd)."""
        x, p = normal(6, 8, seed=seed) + 0.3, softmax(6, 6, seed=seed)
        weights = normal(2000, 8, 8, seed=seed + 1) / 8**0.5
        y = x + alpha * (p @ x @ weights)
        xi_1, xi_2 = (values.mean() for values in m.xi(x.expand_as(y), y))
        mu_1, mu_2 = m.mu_squared(x, p)
        close(xi_1, 1 + alpha**2 * mu_1, rtol=0.1)
        close(xi_2, 1 + alpha**2 * mu_2, rtol=0.1)
        close(m.expected_rate(x, p, alpha), 1 + (xi_1 / xi_2 - 1) * m.token_similarity(x), rtol=0.1)

    @of(STEPS)
    @given(seed=seeds, scale=st.sampled_from([1e-20, -1.0, 1e20]))
    @few
    def test_of_attention_sees_neither_scale_nor_order_nor_rotation(self, measure, seed, scale):
        x, p = normal(6, 4, seed=seed) + 0.5, softmax(6, 6, seed=seed, spread=2.0)
        order, rotation = torch.randperm(6), torch.linalg.qr(normal(4, 4, seed=seed + 2)).Q
        for same in ((scale * x, p), (x[order], p[order][:, order]), (x @ rotation, p)):
            close(measure(*same), measure(x, p), rtol=1e-7)

    @given(seed=seeds, spread=st.sampled_from([0.1, 1.0, 5.0]))
    @few
    def test_bounds_of_mu_hold(self, seed, spread):
        """Lemma 4, Eq. 11."""
        x, p = normal(7, 4, seed=seed) + 0.5, softmax(7, 7, seed=seed, spread=spread)
        mu_1, mu_2 = m.mu_squared(x, p)
        assert mu_1 >= (1 - m.omega(x, p)) ** 2 - 1e-9
        assert mu_2 <= m.delta(p) ** 2 + 1e-9

    def test_mu_and_omega_are_their_definitions_written_out(self):
        x, p = normal(6, 4) + 1, softmax(3, 6, 6)
        p = p * (1 + 0.01 * normal(3, 6, 1, seed=3))  # rows that do not sum to 1
        pi_1 = torch.full((6, 6), 1 / 6, dtype=torch.float64)
        pi_2 = torch.eye(6, dtype=torch.float64) - pi_1
        norm = torch.linalg.matrix_norm
        close(m.mu_squared(x, p)[0], ((norm(pi_1 @ p @ x) / norm(pi_1 @ x)) ** 2).mean())
        close(m.mu_squared(x, p)[1], ((norm(pi_2 @ p @ x) / norm(pi_2 @ x)) ** 2).mean())
        close(m.omega(x, p), norm(pi_1 @ p @ pi_2 @ x) / norm(pi_1 @ x))

    def test_mu_keeps_its_digits_near_collapse_in_float32(self):
        x = (1e-5 * normal(8, 6) + normal(6, seed=1)).float()
        p = softmax(8, 8, dtype=torch.float32)
        for got, want in zip(m.mu_squared(x, p), m.mu_squared(x.double(), p.double()), strict=True):
            close(got, want.float(), rtol=1e-4)

    @pytest.mark.parametrize("fit", [((4, 3), (5, 5)), ((2, 4, 3), (3, 2, 4, 4)), ((4, 3), (4, 5))])
    def test_shapes_that_do_not_fit_are_told(self, fit):
        with pytest.raises(ShapeError, match="got"):
            m.mu_squared(torch.ones(fit[0]), torch.ones(fit[1]))
        with pytest.raises(ShapeError, match=r"\(4, 3\) and \(4, 2\)"):
            m.xi(torch.ones(4, 3), torch.ones(4, 2))


class TestMeasuresOfAttention:
    @of(ATTENTION)
    @given(seed=seeds, num_tokens=st.integers(2, 8), spread=st.sampled_from([0.1, 1.0, 6.0]))
    @few
    def test_do_not_see_the_order_of_other_tokens(self, measure, seed, num_tokens, spread):
        p = softmax(num_tokens, num_tokens, seed=seed, spread=spread)
        order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(num_tokens - 1)])
        close(measure(p[order][:, order]), measure(p), rtol=1e-7, atol=1e-9)

    @given(seed=seeds, num_tokens=st.integers(2, 8), spread=st.sampled_from([0.1, 1.0, 6.0]))
    @few
    def test_keep_their_bounds(self, seed, num_tokens, spread):
        p = softmax(num_tokens, num_tokens, seed=seed, spread=spread)
        close(m.importance(p).sum(), 1.0)
        assert 0 <= m.importance_entropy(p) <= math.log(num_tokens) + 1e-9
        assert 0 <= m.first_token_importance(p) <= 1
        assert 1 <= m.positions_attended(p, threshold=1 / num_tokens - 1e-9) <= num_tokens
        assert 0 <= m.second_eigenvalue(p) <= min(1, m.delta(p)) + 1e-9

    def test_uniform_causal_attention_has_the_values_worked_by_hand(self):
        """Row i is 1/i, so the first token has the harmonic number over T, and P's eigenvalues are 1, 1/2, 1/3..."""
        p = torch.ones(64, 64, dtype=torch.float64).tril()
        p = p / p.sum(dim=-1, keepdim=True)
        close(m.importance_entropy(p), 3.754, atol=5e-4)
        close(m.first_token_importance(p), sum(1 / i for i in range(1, 65)) / 64)
        close(m.positions_attended(p), 32.5)
        close(m.second_eigenvalue(p), 0.5, rtol=0, atol=0)
        close(m.delta(p), 1.235, atol=5e-4)

    def test_second_eigenvalue_of_long_causal_attention_is_its_diagonal(self):
        """With the mean row taken off it is lost: the eigenvectors are parallel to the last digit."""
        p = softmax(600, 600).tril()
        p = p / p.sum(dim=-1, keepdim=True)
        close(m.second_eigenvalue(p), p.diagonal()[1:].max(), rtol=0, atol=0)

    def test_second_eigenvalue_of_a_batch_takes_each_as_it_is(self):
        causal, full = softmax(5, 5).tril(), softmax(5, 5, seed=1)
        causal = causal / causal.sum(dim=-1, keepdim=True)
        want = torch.stack([m.second_eigenvalue(causal), torch.linalg.eigvals(full).abs().sort().values[-2]])
        close(m.second_eigenvalue(torch.stack([causal, full])), want)

    @pytest.mark.parametrize("kind", ["noise", "sharp noise", "low rank", "neighbours"])
    def test_large_matrices_come_within_a_thousandth(self, kind):
        n = 320
        i = torch.arange(n, dtype=torch.float64)
        scores = {
            "noise": normal(n, n),
            "sharp noise": 4 * normal(n, n),
            "low rank": normal(n, 8) @ normal(8, n, seed=1) / 8**0.5,
            "neighbours": -(i[:, None] - i).abs() / 2,
        }[kind]
        p = torch.softmax(scores, dim=-1)
        close(m.second_eigenvalue(p), torch.linalg.eigvals(p).abs().sort().values[-2], rtol=1e-3)
        close(m.delta(p), torch.linalg.svdvals(p - p.mean(dim=0)).max(), rtol=1e-3)

    def test_large_and_degenerate_is_no_trouble(self):
        n = 300
        uniform, shift = torch.full((n, n), 1 / n), torch.eye(n).roll(1, 0)
        close(m.second_eigenvalue(torch.stack([uniform, torch.eye(n), shift])), [0.0, 1.0, 1.0], atol=5e-3)
        close(m.delta(torch.stack([uniform, torch.eye(n), shift])), [0.0, 1.0, 1.0], atol=1e-6)

    def test_same_answer_twice_and_the_random_state_is_left_alone(self):
        p, before = softmax(300, 300), torch.get_rng_state()
        assert m.second_eigenvalue(p) == m.second_eigenvalue(p)
        assert m.delta(p) == m.delta(p)
        assert torch.equal(torch.get_rng_state(), before)

    def test_one_infinity_makes_every_importance_undefined(self):
        p = softmax(4, 4)
        p[1, 2] = math.inf
        assert m.importance(p).isnan().all()
        assert m.first_token_importance(p).isnan()
        assert m.positions_attended(p).isnan()


class TestSaturatedAttention:
    @given(seed=seeds, causal=st.booleans())
    @few
    def test_is_the_limit_of_softmax(self, seed, causal):
        scores = normal(6, 6, seed=seed).mul(2).round()  # whole numbers tie often
        visible = torch.ones(6, 6).tril().bool() if causal else torch.ones(6, 6).bool()
        limit = torch.softmax((1e4 * scores).masked_fill(~visible, -torch.inf), dim=-1)
        close(m.saturated_attention(scores, causal), limit)

    def test_of_a_row_without_a_finite_maximum_is_undefined(self):
        scores = torch.tensor([[-math.inf] * 3, [0.0, math.inf, 1.0], [1.0, -math.inf, 0.0]])
        close(m.saturated_attention(scores, False), torch.tensor([[NAN] * 3, [NAN] * 3, [1.0, 0.0, 0.0]]))

    def test_needs_square_scores(self):
        with pytest.raises(ShapeError, match=r"\(2, 3\)"):
            m.saturated_attention(torch.ones(2, 3), True)


class TestMeasuresOfValues:
    @given(seed=seeds, num_tokens=st.integers(1, 8), width=st.integers(1, 8))
    @few
    def test_spectrum_is_that_of_the_mean_outer_product(self, seed, num_tokens, width):
        v = normal(num_tokens, width, seed=seed)
        want = torch.linalg.eigvalsh(v.T @ v / num_tokens).flip(0)
        close(m.value_spectrum(v), want, atol=1e-9)
        assert (m.value_spectrum(v) >= 0).all()

    def test_spectrum_of_huge_float32_values_is_finite(self):
        close(m.value_spectrum(torch.tensor([[1e20, 0.0], [0.0, 1e-20]])), [5e39, 5e-41], rtol=1e-6)

    @pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
    def test_ratio_compares_the_first_with_the_mean_of_the_others(self, scale):
        v = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 3.0]])
        close(m.first_value_norm_ratio(v * scale), 2.5, rtol=1e-6)

    def test_ratio_needs_others(self):
        close(m.first_value_norm_ratio(torch.tensor([[[1.0], [0.0]], [[NAN], [1.0]]])), [NAN, NAN])
        assert m.first_value_norm_ratio(torch.ones(1, 3)).isnan()


class TestDominatingEigenvalue:
    SWAP = torch.tensor([[0.25, 0.75], [0.75, 0.25]])  # eigenvalues 1 and -1/2

    @pytest.mark.parametrize(
        ("weight", "kind", "modulus"), [(1.0, "perron", 2.0), (-1.0, "lowest", 1.5), (-4.0, "tie", 3.0)]
    )
    def test_is_worked_by_hand(self, weight, kind, modulus):
        got = m.dominating_eigenvalue(self.SWAP, torch.tensor([[weight]]))
        assert got.kind == kind
        close(got.modulus, modulus, rtol=1e-6)
        close(got.lambda_1, -0.5, rtol=1e-6)
        assert got.spectrum_is_real

    def test_of_a_complex_pair_is_neither(self):
        turn = torch.tensor([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.8, 0.1, 0.1]])
        got = m.dominating_eigenvalue(turn, -0.5 * torch.eye(2))
        assert got.kind == "other"
        assert not got.spectrum_is_real

    def test_says_what_iteration_shows(self):
        """After 400 layers tokens agree where it says perron, and do not where it says another word."""
        kinds = set()
        for seed in range(12):
            a, h = softmax(4, 4, seed=seed, spread=3.0), normal(3, 3, seed=seed + 50)
            kind = m.dominating_eigenvalue(a, h).kind
            x = normal(4, 3, seed=seed + 99)
            for _ in range(400):
                x = x + a @ x @ h
                x = x / x.norm()
            assert (m.token_diversity(x) < 1e-6) == (kind == "perron"), (seed, kind)
            kinds.add(kind)
        assert len(kinds) >= 2

    def test_of_long_causal_attention_has_its_diagonal_for_a_spectrum(self):
        """1, 1/2, ..., 1/80, where a solver that does not balance first answers with complex numbers."""
        a = torch.ones(80, 80, dtype=torch.float64).tril()
        got = m.dominating_eigenvalue(a / a.sum(dim=-1, keepdim=True), torch.tensor([[-0.5]]))
        assert got.spectrum_is_real
        assert got.kind == "lowest"
        close(got.lambda_1, 1 / 80)

    def test_of_tokens_in_closed_groups_is_a_tie(self):
        assert m.dominating_eigenvalue(torch.eye(3), torch.eye(2)).kind == "tie"

    def test_of_a_batch_has_a_word_for_each_and_of_nan_is_undefined(self):
        h = torch.tensor([[[[1.0]], [[-1.0]]], [[[-4.0]], [[NAN]]]])
        got = m.dominating_eigenvalue(self.SWAP, h)
        assert got.kind == [["perron", "lowest"], ["tie", "undefined"]]
        close(got.modulus, torch.tensor([[2.0, 1.5], [3.0, NAN]]), rtol=1e-6)
        assert got.lambda_1[1, 1].isnan()

    def test_needs_square_matrices(self):
        with pytest.raises(ShapeError, match=r"H needs .* got \(2, 3\)"):
            m.dominating_eigenvalue(self.SWAP, torch.ones(2, 3))


class TestMeasuresOfGrowth:
    @given(seed=seeds, slope=st.floats(-3, 3), intercept=st.floats(-3, 3))
    @few
    def test_sqrt_fit_is_least_squares(self, seed, slope, intercept):
        t = torch.arange(1, 30, dtype=torch.float64)
        y = slope * t.sqrt() + intercept + normal(29, seed=seed)
        design = torch.stack([t.sqrt(), torch.ones_like(t)], dim=-1)
        want = torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
        got = m.sqrt_fit(t, y)
        close(torch.stack(got[:2]), want, rtol=1e-8, atol=1e-9)
        close(got.r2, torch.corrcoef(torch.stack([t.sqrt(), y]))[0, 1] ** 2, atol=1e-9)

    @given(exponent=st.floats(0.2, 2), log_c=st.floats(-3, 3))
    @few
    def test_power_law_is_found_again_whatever_has_no_logarithm(self, exponent, log_c):
        t = torch.arange(0, 40, dtype=torch.float64)
        y = math.exp(log_c) * t**exponent
        y[7] = -1.0
        got = m.power_law_fit(t, y)
        close(torch.stack(got), [exponent, log_c, 1.0], rtol=1e-8, atol=1e-9)

    def test_a_good_sqrt_fit_does_not_show_the_exponent_but_the_power_law_does(self):
        t = torch.arange(1, 400)
        for exponent in (0.4, 0.6):
            assert m.sqrt_fit(t, t**exponent).r2 > 0.99
            close(m.power_law_fit(t, t.double() ** exponent).exponent, exponent)

    def test_fits_are_undefined_where_there_is_no_line(self):
        t = torch.arange(1.0, 4.0)
        assert all(value.isnan() for value in m.sqrt_fit(t[:1], t[:1]))
        assert all(value.isnan() for value in m.sqrt_fit(torch.ones(3), t))
        assert all(value.isnan() for value in m.sqrt_fit(t, torch.tensor([1.0, NAN, 2.0])))
        assert all(value.isnan() for value in m.sqrt_fit(t, torch.tensor([1.0, math.inf, 2.0])))
        assert all(value.isnan() for value in m.power_law_fit(t, torch.tensor([1.0, NAN, 2.0])))
        assert all(value.isnan() for value in m.power_law_fit(t, -t))
        constant = m.sqrt_fit(t, torch.full((3,), 0.1))
        assert constant.slope == 0
        assert constant.r2.isnan()

    def test_curves_of_different_length_are_told(self):
        with pytest.raises(ShapeError, match=r"\(4,\) and \(3,\)"):
            m.sqrt_fit(torch.ones(3), torch.ones(4))

    @given(seed=seeds, scale=st.sampled_from([1e-20, 1.0, 1e20]))
    @few
    def test_saturation_sees_directions_only(self, seed, scale):
        f, g = normal(5, 4, seed=seed, dtype=torch.float32), normal(5, 4, seed=seed + 1, dtype=torch.float32)
        want = torch.nn.functional.cosine_similarity(f.double(), g.double(), dim=-1).mean().float()
        close(m.saturation(f, g * scale), want, rtol=1e-4, atol=1e-6)
        close(m.saturation(f, f * scale), 1.0, rtol=1e-6)
        assert m.saturation(f, torch.cat([g[:4], torch.zeros(1, 4)])).isnan()

    @given(seed=seeds, scale=st.sampled_from([1e-20, 1.0, 1e20]))
    @few
    def test_checkpoint_cosine_sees_directions_only_and_lists_as_one_vector(self, seed, scale):
        a, b = normal(10, seed=seed, dtype=torch.float32), normal(10, seed=seed + 1, dtype=torch.float32)
        want = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0).float()
        close(m.checkpoint_cosine(a * scale, b * scale), want, rtol=1e-4, atol=1e-6)
        close(m.checkpoint_cosine([a[:3], a[3:]], [b[:3], b[3:]]), want, rtol=1e-4, atol=1e-6)
        assert m.checkpoint_cosine(a, 0 * b).isnan()


# Every measure of tensors, and arguments with two leading axes.
CALLS = {
    **{name: (measure, lambda dtype: (normal(2, 3, 6, 4, dtype=dtype),)) for name, measure in TOKENS.items()},
    **{
        name: (measure, lambda dtype: (normal(2, 3, 6, 4, dtype=dtype), normal(2, 3, 6, 4, seed=1, dtype=dtype)))
        for name, measure in (LAYERS | {"saturation": m.saturation}).items()
    },
    **{
        name: (measure, lambda dtype: (normal(2, 3, 6, 4, dtype=dtype), softmax(2, 3, 5, 6, 6, dtype=dtype)))
        for name, measure in STEPS.items()
    },
    **{name: (measure, lambda dtype: (softmax(2, 3, 6, 6, dtype=dtype),)) for name, measure in ATTENTION.items()},
    **{name: (measure, lambda dtype: (normal(2, 3, 6, 4, dtype=dtype),)) for name, measure in VALUES.items()},
    "importance": (m.importance, lambda dtype: (softmax(2, 3, 6, 6, dtype=dtype),)),
    "saturated_attention": (
        functools.partial(m.saturated_attention, causal=True),
        lambda dtype: (normal(2, 3, 6, 6, dtype=dtype),),
    ),
    "sqrt_fit": (
        lambda y: torch.stack(m.sqrt_fit(torch.arange(6), y), dim=-1),
        lambda dtype: (normal(2, 3, 6, dtype=dtype),),
    ),
    "power_law_fit": (
        lambda y: torch.stack(m.power_law_fit(torch.arange(6), y), dim=-1),
        lambda dtype: (softmax(2, 3, 6, dtype=dtype),),
    ),
}


class TestEveryMeasure:
    """One matrix at a time or many at once, any width of float, and no gradient."""

    @pytest.mark.parametrize("name", CALLS)
    def test_batched_equals_looped(self, name):
        measure, inputs = CALLS[name]
        batched = measure(*inputs(torch.float64))
        assert batched.shape[:2] == (2, 3)
        for i in range(2):
            for j in range(3):
                close(measure(*(x[i, j] for x in inputs(torch.float64))), batched[i, j], rtol=1e-8)

    @pytest.mark.parametrize("name", CALLS)
    def test_float32_and_half_agree_with_float64_and_half_is_widened(self, name):
        measure, inputs = CALLS[name]
        close(
            measure(*inputs(torch.float32)).double(), measure(*(x.double() for x in inputs(torch.float32))), rtol=1e-3
        )
        halves = [x.bfloat16() for x in inputs(torch.float32)]
        close(measure(*halves), measure(*(x.float() for x in halves)), rtol=1e-6)

    @pytest.mark.parametrize("name", CALLS)
    def test_has_no_gradient(self, name):
        measure, inputs = CALLS[name]
        assert not measure(*(x.requires_grad_() for x in inputs(torch.float32))).requires_grad

    @pytest.mark.parametrize("name", sorted(CALLS.keys() - {"importance", "saturated_attention"}))
    @pytest.mark.parametrize("bad", [NAN, math.inf])
    def test_is_undefined_for_the_one_bad_matrix_alone(self, name, bad):
        measure, inputs = CALLS[name]
        arguments = inputs(torch.float32)
        for position in range(len(arguments)):
            poisoned = [x.clone() for x in arguments]
            poisoned[position][0, 1].view(-1)[1] = bad
            got, want = measure(*poisoned), measure(*arguments)
            if name == "omega" and position == 1:
                got, want = got[..., 0], want[..., 0]  # one head is bad, the others are not
            assert got[0, 1].isnan().all()
            assert torch.equal(got[1], want[1])

    def test_of_nothing_is_a_shape_error(self):
        for measure in (*TOKENS.values(), *ATTENTION.values(), *VALUES.values(), m.importance):
            with pytest.raises(ShapeError, match=r"got \(0, 4\)|got \(4,\)"):
                measure(torch.ones(0, 4))
            with pytest.raises(ShapeError, match=r"got \(4,\)"):
                measure(torch.ones(4))


class TestLinear:
    @pytest.mark.parametrize("value", [1.0, 3.0, 1e-20, 1e20, 1e-38, 3e38])
    def test_scale_is_a_power_of_two_that_brings_the_largest_between_one_and_two(self, value):
        scale = linear.power_of_two(torch.tensor([[value, -value / 3]]), (-2, -1))
        assert torch.frexp(scale).mantissa == 0.5
        assert 1 <= value / scale.item() < 2 + 1e-6

    def test_scale_of_nothing_and_of_infinity_is_one(self):
        for x in (torch.zeros(2, 2), torch.full((2, 2), math.inf), torch.full((2, 2), NAN)):
            assert linear.power_of_two(x, (-2, -1)).item() == 1


def test_every_function_has_a_row_in_the_documents():
    rows = re.findall(r"^\| (`\w+\(.*?) \|", (ROOT / "docs/measures.md").read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)\(", row)]
    assert sorted(named) == FUNCTIONS


class TestTheCatalogue:
    NAMES = frozenset(metric.name for metric in CATALOGUE)

    def test_has_a_function_for_every_metric_that_is_a_quantity_of_tensors(self):
        assert {name for name in self.NAMES - NOT_OF_TENSORS.keys() if name not in FUNCTIONS} == set()

    def test_says_of_every_other_metric_why_it_has_none(self):
        assert NOT_OF_TENSORS.keys() <= self.NAMES
        assert {name for name in NOT_OF_TENSORS if hasattr(m, name)} == set()
        assert all(NOT_OF_TENSORS.values())

    def test_has_functions_that_say_what_they_take_and_return_and_where_that_is_from(self):
        for name in self.NAMES - NOT_OF_TENSORS.keys():
            text = " ".join(getattr(m, name).__doc__.split())
            assert re.search(r"arXiv \d{4}\.\d{5}|Transformer Oversmoothing|\(tsemon\)|Cochran", text), name
            assert re.search(r"\(\.\.\.|scalar", text), f"{name} does not give its shapes"

    def test_has_functions_of_their_own_names(self):
        assert {name for name in self.NAMES - NOT_OF_TENSORS.keys() if getattr(m, name).__name__ != name} == set()

    @pytest.mark.parametrize("metric", [metric for metric in CATALOGUE if metric.name not in NOT_OF_TENSORS])
    def test_has_functions_that_give_its_equation(self, metric):
        """Word for word for norms and cosines of w, g and d; of other metrics the operators."""
        text = " ".join(getattr(m, metric.name).__doc__.split())
        equation = metric.equation
        if re.match(r"\|[wgd]\||[wgd] \.", equation):
            vectors = {r"\bd \.": "(theta' - theta) .", r"\bd\b": "theta' - theta", r"\bw\b": "theta"}
            equation = re.split(" without| of |,", equation)[0]
            for symbol, written in vectors.items():
                equation = re.sub(symbol, written, equation)
            assert equation in text
        else:
            signs = re.findall(
                r"\b(?:mean|max|min|sum|sqrt|exp|log|cos|softmax|lambda|number|hash)\b|#", equation.split(", ")[0]
            )
            assert [sign for sign in signs if sign not in text] == []
