"""Every function of the catalogue against its definition in float64 NumPy (`oracle`), in both dtypes.

Inputs are exact in float32, so both dtypes and the oracle see the same numbers. The functions of the papers are also held
against the shared vectors, in `test_vectors`.
"""

import functools
import math
import operator
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.tsemon.measures import oracle
from tests.tsemon.measures.test_vectors import CASES, numbers
from tsemon import measures as m
from tsemon.catalogue import CATALOGUE, NOT_OF_TENSORS
from tsemon.errors import ShapeError

NAN = math.nan
DTYPES = {"float32": torch.float32, "float64": torch.float64}
TOLERANCE = {"float32": {"rtol": 5e-5, "atol": 2e-6}, "float64": {"rtol": 1e-9, "atol": 1e-12}}
"""Sums of at most a few hundred products: 100 roundings of 6e-8 each, and of 1e-16. The absolute part is for cosines, which
are near zero between tokens that have nothing in common."""
CLOSE = {"float32": {"rtol": 2e-4, "atol": 0.0}, "float64": {"rtol": 2e-4, "atol": 0.0}}
"""Ranks from a Gram matrix: singular values that are 0 come out as up to 3e-8 of the largest."""
TESTED = set()


def random(seed):
    return np.random.default_rng(seed)


def float32(x):
    return np.asarray(x, np.float32).astype(np.float64)


def squashed(x):
    """Another token matrix of the same shape, of a size near 1."""
    return float32(np.tanh(np.nan_to_num(x / np.nan_to_num(np.abs(x).max() or 1.0, nan=1.0))) + 0.1)


def assert_agrees(got, want, tolerance):
    want = torch.as_tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got.double(), want.expand_as(got), equal_nan=True, **tolerance)


CHANGES = {
    "hfc_lfc_ratio": (oracle.hfc_lfc, operator.truediv, operator.mul),
    "cosine_change": (oracle.cosine_similarity, operator.sub, operator.add),
    "rank_ratio": (oracle.effective_rank, operator.truediv, operator.mul),
}
"""By what a sub-step does: the measure, how two values are compared, and how the changes by two norms are one."""


def holds(*names):
    """Marks what a test is about; a test at the end finds what no test is about."""
    TESTED.update(names)
    return pytest.mark.parametrize("name", names)


# Hidden states: (samples, tokens, width), and which tokens count.


def noise():
    return random(0).normal(size=(4, 9, 6)), None


def shared_direction():
    return random(1).normal(size=(4, 9, 6)) + 3 * random(2).normal(size=6), None


def near_collapse():
    """Tokens agree to five digits."""
    return random(3).normal(size=(4, 1, 6)) + 1e-5 * random(4).normal(size=(4, 9, 6)), None


def equal_tokens():
    return np.broadcast_to(random(5).normal(size=(4, 1, 6)), (4, 9, 6)), None


def equal_samples():
    return np.broadcast_to(random(6).normal(size=(1, 9, 6)), (4, 9, 6)), None


def all_equal():
    return np.broadcast_to(random(7).normal(size=6), (4, 9, 6)), None


def zeros():
    return np.zeros((3, 5, 4)), None


def one_zero_sample():
    x = random(8).normal(size=(3, 5, 4))
    x[1] = 0
    return x, None


def one_zero_token():
    x = random(9).normal(size=(3, 5, 4))
    x[1, 2] = 0
    return x, None


def one_token():
    return random(10).normal(size=(4, 1, 6)), None


def one_sample():
    return random(11).normal(size=(1, 9, 6)), None


def one_feature():
    return random(12).normal(size=(4, 9, 1)), None


def massive_first_token():
    x = random(13).normal(size=(4, 9, 6))
    x[:, 0] *= 1000
    return x, None


def no_mean():
    x = random(14).integers(-8, 8, size=(4, 3, 6)).astype(float)
    return np.concatenate([x, -x], axis=1), None


def huge():
    return 1e18 * random(15).normal(size=(4, 9, 6)), None


def tiny():
    return 1e-18 * random(16).normal(size=(4, 9, 6)), None


def nan_in_one_sample():
    x = random(17).normal(size=(4, 9, 6))
    x[2, 3, 4] = NAN
    return x, None


def infinity_in_one_sample():
    x = random(18).normal(size=(4, 9, 6))
    x[0, 0, 0] = math.inf
    return x, None


def nothing_finite():
    return np.full((2, 3, 4), NAN), None


def padded(on_the_left):
    x, length = random(19).normal(size=(5, 9, 6)), np.array([9, 6, 2, 1, 0])
    valid = np.arange(9) < length[:, None]
    valid = valid[:, ::-1] if on_the_left else valid
    return np.where(valid[..., None], x, NAN), valid.copy()  # padding may hold anything


STATES = {
    make.__name__: make
    for make in (
        *(noise, shared_direction, near_collapse, equal_tokens, equal_samples, all_equal, zeros, one_zero_sample),
        *(one_zero_token, one_token, one_sample, one_feature, massive_first_token, no_mean, huge, tiny),
        *(nan_in_one_sample, infinity_in_one_sample, nothing_finite),
    )
} | {"padded_left": functools.partial(padded, True), "padded_right": functools.partial(padded, False)}


@pytest.fixture(params=STATES)
def state(request):
    """X as an array, which tokens count, and the samples without their padding."""
    x, valid = STATES[request.param]()
    x = float32(x)
    return x, valid, [sample if valid is None else sample[valid[i]] for i, sample in enumerate(x)]


@pytest.fixture(params=[name for name in STATES if "padded" not in name])
def x(request):
    """X of a measure that knows no padding."""
    return float32(STATES[request.param]()[0])


def inputs(dtype, x, valid=None):
    return torch.tensor(x, dtype=DTYPES[dtype]), None if valid is None else torch.tensor(valid)


OF_TOKENS = {
    "token_similarity": oracle.token_similarity,
    "token_diversity": oracle.token_diversity,
    "cosine_similarity": oracle.cosine_similarity,
    "first_hidden_norm_ratio": oracle.first_norm_ratio,
    "first_value_norm_ratio": oracle.first_norm_ratio,
}
OF_A_BATCH = {
    name: getattr(oracle, name)
    for name in (
        "centred_token_similarity",
        "global_diversity",
        "batch_similarity",
        "batch_rank",
        "hidden_rms",
        "hidden_max",
        "nonfinite",
        "dead_units",
    )
}


@pytest.mark.parametrize("dtype", DTYPES)
class TestHiddenStates:
    @holds(*OF_TOKENS)
    def test_of_one_sequence(self, name, state, dtype):
        x, valid, samples = state
        want = [OF_TOKENS[name](sample) if len(sample) else NAN for sample in samples]
        got = getattr(m, name)(*inputs(dtype, x, valid))
        # Of digits that agree only those of the tokens' differences are left.
        assert_agrees(got, want, TOLERANCE[dtype] | {"atol": 1e-12 if name == "token_diversity" else 2e-6})

    @holds("hfc_lfc", "effective_rank")
    def test_of_one_sequence_without_padding(self, name, x, dtype):
        got = getattr(m, name)(*inputs(dtype, x)[:1])
        assert_agrees(got, [getattr(oracle, name)(sample) for sample in x], TOLERANCE[dtype])

    @holds(*OF_A_BATCH)
    def test_of_a_batch(self, name, state, dtype):
        x, valid, samples = state
        got = getattr(m, name)(*inputs(dtype, x, valid))
        assert_agrees(got, OF_A_BATCH[name](samples), (CLOSE if name == "batch_rank" else TOLERANCE)[dtype])

    @holds("deescalated_token_similarity")
    @pytest.mark.parametrize("tau", [0.0, 0.4, 1.0])
    def test_after_deescalation(self, name, tau, x, dtype):
        got = getattr(m, name)(inputs(dtype, x)[0], tau)
        want = [oracle.deescalated_token_similarity(sample, tau) for sample in x]
        # With tau = 1 near collapse what is left has the size 1e-5, and each entry is off by a rounding of 6e-8.
        assert_agrees(got, want, TOLERANCE[dtype] | {"atol": 1e-4 if dtype == "float32" else 1e-12})

    @holds("escalation_rate", "attention_escalation_rate", "feedforward_escalation_rate")
    def test_from_a_layers_input_to_its_output(self, name, x, dtype):
        y = squashed(x)
        got = getattr(m, name)(inputs(dtype, x)[0], inputs(dtype, y)[0])
        want = [oracle.escalation_rate(a, b) for a, b in zip(x, y, strict=True)]
        assert_agrees(got, want, TOLERANCE[dtype])

    @holds("attention_gain", "residual_gain", "feedforward_gain")
    def test_of_sizes_from_a_layers_input_to_its_output(self, name, x, dtype):
        y = squashed(x)
        got = getattr(m, name)(inputs(dtype, x)[0], inputs(dtype, y)[0])
        assert_agrees(got, [oracle.gain(a, b) for a, b in zip(x, y, strict=True)], TOLERANCE[dtype])

    @holds("norm_escalation_rate", "norm_gain")
    def test_of_two_norms(self, name, x, dtype):
        y = squashed(x)
        x_BTD, y_BTD = inputs(dtype, x)[0], inputs(dtype, y)[0]
        pairs = zip(x, y, strict=True)
        if name == "norm_gain":
            got, want = m.norm_gain(x_BTD, y_BTD), [oracle.rms(a) * oracle.rms(b) for a, b in pairs]
        else:
            got = m.norm_escalation_rate((x_BTD, y_BTD), (x_BTD, y_BTD))
            want = [oracle.escalation_rate(a, b) ** 2 for a, b in pairs]
        assert_agrees(got, want, TOLERANCE[dtype])

    @holds(*(f"{step}_{what}" for step in ("residual", "feedforward", "norm1", "norm2") for what in CHANGES))
    def test_of_what_sub_steps_do_to_measures_of_oversmoothing(self, name, x, dtype):
        y = squashed(x)
        z = squashed(y[..., ::-1] ** 3)
        x_BTD, y_BTD, z_BTD = (inputs(dtype, states)[0] for states in (x, y, z))
        step, what = name.split("_", 1)
        measure, change, several = CHANGES[what]
        want = [change(measure(b), measure(a)) for a, b in zip(x, y, strict=True)]
        if step.startswith("norm"):
            others = [change(measure(b), measure(a)) for a, b in zip(y, z, strict=True)]
            got, want = getattr(m, name)((x_BTD, y_BTD), (y_BTD, z_BTD)), list(map(several, want, others))
        else:
            got = getattr(m, name)(x_BTD, y_BTD)
        assert_agrees(got, want, TOLERANCE[dtype] | {"atol": 5e-6})

    @holds("saturation")
    def test_against_the_saturated_network(self, name, x, dtype):
        f = float32(random(20).normal(size=x.shape))
        got = getattr(m, name)(inputs(dtype, f)[0], inputs(dtype, x)[0])
        assert_agrees(got, [oracle.saturation(a, b) for a, b in zip(f, x, strict=True)], TOLERANCE[dtype])

    @holds("value_top_eigenvalue")
    def test_of_values(self, name, x, dtype):
        got = getattr(m, name)(inputs(dtype, x)[0])
        assert_agrees(got, [oracle.value_top_eigenvalue(sample) for sample in x], TOLERANCE[dtype] | {"atol": 0.0})

    def test_of_feed_forward_units_of_which_some_never_move(self, dtype):
        z = float32(random(21).normal(size=(3, 5, 8)).clip(0))
        z[..., 2], z[..., 5] = 0, 1.5
        assert m.dead_units(inputs(dtype, z)[0]) == oracle.dead_units(list(z)) == 0.25


# Attention: scores (heads, queries, keys), and which keys each query sees.


def bidirectional():
    return random(30).normal(size=(3, 8, 8)), np.ones((3, 8, 8), bool)


def causal():
    return random(31).normal(size=(3, 8, 8)), np.broadcast_to(np.tri(8, dtype=bool), (3, 8, 8))


def peaked():
    """Weights from 1 down to far below the threshold of what is attended to."""
    return 30 * random(32).normal(size=(3, 8, 8)), np.broadcast_to(np.tri(8, dtype=bool), (3, 8, 8))


def uniform():
    return np.full((3, 8, 8), 0.7), np.ones((3, 8, 8), bool)


def one_hot():
    return 1e4 * np.broadcast_to(np.eye(8)[::-1], (3, 8, 8)), np.ones((3, 8, 8), bool)


def one_key():
    return random(33).normal(size=(3, 1, 1)), np.ones((3, 1, 1), bool)


def a_window():
    i = np.arange(8)
    return random(34).normal(size=(3, 8, 8)), np.broadcast_to(np.abs(i - i[:, None]) < 2, (3, 8, 8))


def nan_in_one_head():
    scores, visible = causal()
    scores = scores.copy()
    scores[1, 4, 2] = NAN
    return scores, visible


ATTENTIONS = {
    make.__name__: make
    for make in (bidirectional, causal, peaked, uniform, one_hot, one_key, a_window, nan_in_one_head)
}
OF_SCORES = ("attention_entropy", "max_attention_logit")
OF_WEIGHTS = ("sink_share", "positions_attended", "importance_entropy")


@pytest.fixture(params=ATTENTIONS)
def attention(request):
    scores, visible = ATTENTIONS[request.param]()
    return float32(scores), np.array(visible)


@pytest.mark.parametrize("dtype", DTYPES)
class TestAttention:
    @holds(*OF_SCORES)
    def test_of_scores(self, name, attention, dtype):
        scores, visible = attention
        got = getattr(m, name)(*inputs(dtype, scores, visible))
        assert_agrees(
            got, [getattr(oracle, name)(s, v) for s, v in zip(scores, visible, strict=True)], TOLERANCE[dtype]
        )

    @holds("attention_entropy_min")
    def test_of_the_lowest_head(self, name, attention, dtype):
        got = getattr(m, name)(*inputs(dtype, *attention))
        assert_agrees(got, getattr(oracle, name)(*attention), TOLERANCE[dtype])

    @holds(*OF_WEIGHTS)
    def test_of_weights(self, name, attention, dtype):
        scores, visible = attention
        a = float32([oracle.softmax(s, v) for s, v in zip(scores, visible, strict=True)])
        got = getattr(m, name)(inputs(dtype, a)[0])
        assert_agrees(got, [getattr(oracle, name)(head) for head in a], TOLERANCE[dtype])
        if name == "importance_entropy":
            got = m.importance_entropy(inputs(dtype, a)[0], normalize=True)
            assert_agrees(got, [oracle.normalized_importance_entropy(head) for head in a], TOLERANCE[dtype])

    @holds("spectral_gap")
    def test_of_the_second_eigenvalue(self, name, attention, dtype):
        scores, visible = attention
        a = float32([oracle.softmax(s, v) for s, v in zip(scores, visible, strict=True)])
        got = getattr(m, name)(inputs(dtype, a)[0])
        # Arnoldi's method is exact for 8 tokens; weights of float32 do not sum to 1 to the last digit, and a double
        # eigenvalue is known to the root of that.
        assert_agrees(got, oracle.spectral_gap(a), {"rtol": 0.0, "atol": 1e-5})

    @holds("attention_entropy_se")
    @pytest.mark.parametrize(("num_samples", "num_rows"), [(3, 8), (3, 64), (12, 8), (12, 64)])
    def test_of_what_was_left_out(self, name, num_samples, num_rows, dtype):
        scores, visible = random(35).normal(size=(3, 2, 8, 8)) * np.arange(1, 4)[:, None, None, None], causal()[1][:2]
        entropies = np.array([list(map(oracle.normalized_row_entropies, x, visible)) for x in scores])
        of_samples = [rows[~np.isnan(rows)] for rows in entropies.mean(axis=1)]
        got = getattr(m, name)(inputs(dtype, entropies)[0], num_samples=num_samples, num_rows=num_rows)
        # The first row sees one key and has no entropy: of 8 rows 7 count, so the share of rows is that of 8.
        want = oracle.attention_entropy_se(of_samples, num_samples, 7 * num_rows / 8)
        assert_agrees(got, want, {"rtol": 1e-6, "atol": 1e-9})


# Predictions, inputs, losses.


@pytest.mark.parametrize("dtype", DTYPES)
class TestPredictions:
    @holds("output_variation")
    @pytest.mark.parametrize("kind", ["noise", "the same", "peaked", "one", "nan"])
    def test_vary_with_the_input(self, name, kind, dtype):
        logits = float32(random(40).normal(size=(3, 5, 7)))
        logits = {"the same": logits[:1, :1].repeat(5, 1), "peaked": 50 * logits, "one": logits[:1, :1]}.get(
            kind, logits
        )
        if kind == "nan":
            logits[1, 2, 3] = NAN
        got = getattr(m, name)(inputs(dtype, logits)[0])
        # Always in float32.
        assert_agrees(got, oracle.output_variation(logits.reshape(-1, 7)), TOLERANCE["float32"])

    @holds(
        "loss_mean",
        "loss_min",
        "loss_max",
        "loss_std",
        "loss_nonfinite",
        "loss_recent",
        "loss_before",
        "loss_noise",
        "loss_start",
    )
    @pytest.mark.parametrize("kind", ["usual", "high at first", "with holes", "one", "none"])
    def test_of_losses(self, name, kind, dtype):
        losses = float32(4 + random(41).normal(size=50))
        if kind == "high at first":
            losses[:9] *= 256
        if kind == "with holes":
            losses[[0, 3, 7, 9]] = math.inf, NAN, math.inf, -math.inf
        losses = {"one": losses[:1], "none": np.array([NAN, math.inf])}.get(kind, losses)
        got = getattr(m, name)(inputs(dtype, losses)[0])
        assert_agrees(
            got,
            oracle.losses(losses)[name],
            {"rtol": 1e-9, "atol": 1e-6 if name in ("loss_std", "loss_noise") else 0.0},
        )

    @holds("grad_norm_mean", "grad_norm_max", "grad_norm_nonfinite", "grad_norm_recent")
    @pytest.mark.parametrize("kind", ["usual", "with holes", "one", "none"])
    def test_of_gradient_norms(self, name, kind, dtype):
        norms = float32(random(43).exponential(size=50))
        if kind == "with holes":
            norms[[3, 47, 49]] = NAN, math.inf, NAN
        norms = {"one": norms[:1], "none": np.array([NAN, math.inf])}.get(kind, norms)
        got = getattr(m, name)(inputs(dtype, norms)[0])
        assert_agrees(got, oracle.losses(norms)[name.replace("grad_norm", "loss")], {"rtol": 1e-9, "atol": 0.0})

    @holds("input_overlap")
    @pytest.mark.parametrize("kept", [0, 1, 4])
    def test_of_inputs(self, name, kept, dtype):
        batch, before = random(42).normal(size=(2, 4, 11))
        before[:kept] = batch[:kept]
        labels = np.arange(8).reshape(2, 4)
        labels[1, :kept] = labels[0, :kept]
        tensors = ([inputs(dtype, x)[0], torch.tensor(y)] for x, y in ((batch, labels[0]), (before, labels[1])))
        known = [(*x, y) for x, y in zip(before, labels[1], strict=True)]
        want = oracle.input_overlap([(*x, y) for x, y in zip(batch, labels[0], strict=True)], known)
        assert getattr(m, name)(*tensors) == want == kept / 4

    @holds("distinct_inputs")
    @pytest.mark.parametrize("same", [1, 2, 4])
    def test_of_equal_inputs(self, name, same, dtype):
        batch = random(42).normal(size=(4, 11))
        batch[:same] = batch[0]
        labels = [7] * 4
        want = oracle.distinct_inputs([(*x, y) for x, y in zip(batch, labels, strict=True)])
        assert getattr(m, name)([inputs(dtype, batch)[0], torch.tensor(labels)]) == want == 5 - same


# Parameters.


def value_and_output(kind):
    generator, size = random(52), (32, 32)
    value, output = 0.3 * generator.normal(size=(2, *size))
    if kind == "huge":
        value = 1e18 * value
    elif kind in ("sharpening", "undone"):
        value, _ = np.linalg.qr(value)
        output = -(1.0 if kind == "undone" else 0.6) * value.T
    elif kind == "complex pairs":
        value, _ = np.linalg.qr(value)
        output = np.diag(np.full(31, 0.5), 1) + 0.5 * np.eye(32)
    elif kind == "zero":
        value = 0 * value
    elif kind == "a nan":
        value[3, 4] = NAN
    return float32(value), float32(output)


@pytest.mark.parametrize("dtype", DTYPES)
class TestValueOutputGrowth:
    @holds("value_output_growth")
    @pytest.mark.parametrize("kind", ["noise", "huge", "sharpening", "undone", "complex pairs", "zero", "a nan"])
    def test_of_weights(self, name, kind, dtype):
        value, output = value_and_output(kind)
        got = getattr(m, name)(inputs(dtype, value)[0], inputs(dtype, output)[0])
        # 32 power iterations; what cancels out leaves rounding errors.
        assert_agrees(got, oracle.value_output_growth(value, output), {"rtol": 0.08, "atol": 1e-6})

    @holds("value_output_negative_share", "value_output_norm")
    @pytest.mark.parametrize("num_heads", [1, 4])
    @pytest.mark.parametrize("kind", ["noise", "sharpening", "undone", "zero", "a nan"])
    def test_of_each_head(self, name, kind, num_heads, dtype):
        value, output = value_and_output(kind)
        got = getattr(m, name)(inputs(dtype, value)[0], inputs(dtype, output)[0], num_heads)
        products = oracle.of_each_head(value, output, num_heads)
        if name == "value_output_norm":
            want = [oracle.value_output_norm(h) for h in products]
        else:
            want = [oracle.value_output_negative_share(h, 32 // num_heads) for h in products]
        assert_agrees(got, want, TOLERANCE[dtype] | {"atol": 1e-6})

    def test_of_heads_that_share_values(self, dtype):
        value, output = (inputs(dtype, x)[0] for x in value_and_output("noise"))
        by_head = value[:16].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
        for of in (m.value_output_norm, m.value_output_negative_share):
            torch.testing.assert_close(of(value[:16], output, 4, head_width=8), of(by_head, output, 4))

    def test_of_heads_that_do_not_divide_the_width_is_refused(self, dtype):
        value, output = (inputs(dtype, x)[0] for x in value_and_output("noise"))
        with pytest.raises(ShapeError, match="5 heads do not divide the output layer's input of width 32"):
            m.value_output_norm(value, output, 5)

    def test_of_infinities_and_overflow_is_unknown(self, dtype):
        eye = torch.eye(4, dtype=DTYPES[dtype])
        assert m.value_output_growth(eye * math.inf, eye).isnan()
        assert m.value_output_growth(eye * 1e250, eye * 1e250).isnan()

    def test_of_grouped_queries_repeats_the_values_of_each_head(self, dtype):
        value, output = (inputs(dtype, x)[0] for x in value_and_output("noise"))
        by_head = value[:16].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
        got = m.value_output_growth(value[:16], output, head_width=8)
        torch.testing.assert_close(got, m.value_output_growth(by_head, output))

    def test_of_some_rows_of_a_packed_projection(self, dtype):
        value, output = (inputs(dtype, x)[0] for x in value_and_output("noise"))
        rows = torch.arange(31, -1, -1)
        got = m.value_output_growth(torch.cat([output, value.flip(0)]), output, values_V=32 + rows)
        torch.testing.assert_close(got, m.value_output_growth(value, output))


def vectors(kind):
    """Parameters, and the same after an update."""
    generator = random(50)
    theta = [generator.normal(size=(7, 5)), generator.normal(size=3)]
    change = [0.01 * generator.normal(size=x.shape) for x in theta]
    if kind == "zero":
        theta = [0 * x for x in theta]
    if kind == "no update":
        change = [0 * x for x in theta]
    scale = {"huge": 1e18, "tiny": 1e-18}.get(kind, 1.0)
    before = [float32(scale * x) for x in theta]
    return before, [float32(x + scale * d) for x, d in zip(before, change, strict=True)]


OF_ONE = [
    *("param_norm", "total_param_norm", "embedding_param_norm", "head_param_norm"),
    *("attention_param_norm", "feedforward_param_norm"),
    *("grad_norm", "grad_norm_qk", "total_grad_norm", "embedding_grad_norm", "head_grad_norm"),
    *("clipped_grad_norm", "total_clipped_grad_norm"),
]
OF_TWO = {
    **dict.fromkeys(("update_norm", "step_size", "embedding_update_norm", "head_update_norm"), oracle.update_norm),
    **dict.fromkeys(("update_ratio", "trained_update_ratio"), oracle.update_ratio),
    "update_alignment": oracle.update_alignment,
    **dict.fromkeys(("direction_cosine", "gradient_cosine"), oracle.direction_cosine),
    "gradient_alignment": oracle.gradient_alignment,
}


@pytest.mark.parametrize("dtype", DTYPES)
class TestParameters:
    @holds(*OF_ONE)
    @pytest.mark.parametrize("kind", ["usual", "zero", "huge", "tiny"])
    def test_of_one_vector(self, name, kind, dtype):
        theta, _ = vectors(kind)
        got = getattr(m, name)([inputs(dtype, x)[0] for x in theta])
        assert_agrees(got, oracle.norm(theta), TOLERANCE[dtype] | {"atol": 0.0})

    @holds(*OF_TWO)
    @pytest.mark.parametrize("kind", ["usual", "no update", "huge", "tiny"])
    def test_of_two_vectors(self, name, kind, dtype):
        theta, theta_next = vectors(kind)
        got = getattr(m, name)(*([inputs(dtype, x)[0] for x in tensors] for tensors in (theta, theta_next)))
        # A difference of two float32 vectors that differ by a hundredth is exact to 1e-5 of itself.
        assert_agrees(got, OF_TWO[name](theta, theta_next), TOLERANCE[dtype])

    def test_of_zeros_have_no_angle(self, dtype):
        zero, other = ([inputs(dtype, x)[0] for x in vectors(kind)[1]] for kind in ("zero", "usual"))
        zero = [0 * x for x in zero]
        for name in ("update_alignment", "direction_cosine", "gradient_cosine", "gradient_alignment"):
            assert getattr(m, name)(zero, other).isnan(), name

    @holds("norm_growth_exponent", "norm_growth_r2")
    @pytest.mark.parametrize("kind", ["a law", "noisy", "falling", "seven points", "a nan"])
    def test_of_growth(self, name, kind, dtype):
        t = np.arange(8 if kind == "seven points" else 40) * 10.0 + 3
        norms = float32(100 + (t - t[0]) ** 0.5 * (-1 if kind == "falling" else 1))
        if kind == "noisy":
            norms = float32(norms + 2 * random(51).normal(size=40))
        if kind == "seven points":
            norms[3] = 99
        if kind == "a nan":
            norms[20] = NAN
        want = oracle.power_law(t, norms)[("norm_growth_exponent", "norm_growth_r2").index(name)]
        assert_agrees(getattr(m, name)(torch.tensor(t), inputs(dtype, norms)[0]), want, {"rtol": 1e-8, "atol": 1e-9})


SHARED = {
    ("tokens", "token_similarity"): lambda x: oracle.token_similarity(x["X"]),
    ("tokens", "token_diversity"): lambda x: oracle.token_diversity(x["X"]),
    ("tokens", "cosine_similarity"): lambda x: oracle.cosine_similarity(x["X"]),
    ("tokens", "hfc_lfc_frobenius"): lambda x: oracle.hfc_lfc(x["X"]),
    ("tokens", "effective_rank"): lambda x: oracle.effective_rank(x["X"]),
    ("update", "escalation_rate"): lambda x: oracle.escalation_rate(x["X"], x["Y"]),
    ("attention", "importance_entropy"): lambda x: oracle.importance_entropy(x["A"]),
    ("attention", "positions_attended"): lambda x: oracle.positions_attended(x["A"]),
    ("attention", "lambda2"): lambda x: oracle.second_eigenvalue(x["A"]),
    ("values", "first_value_norm_ratio"): lambda x: oracle.first_norm_ratio(x["V"]),
    ("params", "norm"): lambda x: [oracle.norm([theta]) for theta in x["thetas"]],
    ("params", "step_size"): lambda x: [oracle.update_norm([a], [b]) for a, b in pairwise(x["thetas"])],
    ("params", "alignment"): lambda x: [oracle.update_alignment([a], [b]) for a, b in pairwise(x["thetas"])],
    ("params", "checkpoint_cosine"): lambda x: [oracle.direction_cosine([a], [b]) for a, b in pairwise(x["thetas"])],
    ("saturation", "saturation"): lambda x: oracle.saturation(x["F"], x["Fc"]),
}
"""The definitions here that the shared vectors have, too, from somebody else's hand."""


@pytest.mark.parametrize(("kind", "quantity"), SHARED, ids=lambda word: word)
def test_the_oracle_itself_agrees_with_the_shared_vectors(kind, quantity):
    cases = [case for case in CASES if case["kind"] == kind]
    assert cases
    for case in cases:
        x = {name: np.array(numbers(value)) for name, value in case["inputs"].items() if isinstance(value, list)}
        rtol, atol = case["tol_by"].get(quantity, case["tol"])["float64"]
        np.testing.assert_allclose(
            SHARED[kind, quantity](x), numbers(case["expected"][quantity]), rtol=rtol, atol=atol, err_msg=case["id"]
        )


def test_every_metric_that_is_a_quantity_of_tensors_is_held_against_its_definition():
    assert {metric.name for metric in CATALOGUE} - NOT_OF_TENSORS.keys() - TESTED == set()
