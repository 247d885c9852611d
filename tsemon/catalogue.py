"""Every metric once: its name on the wire, in SQL, in Prometheus and on the page, what it means and what it costs.

`scripts/measures_page.py` writes this table into `docs/measures.md`; a test holds the two together.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Axis = Literal["activation", "block", "run"]
"""`activation`: one entry per block, and before them in each stack one for the input of its first block. `block`: one per
block. `run`: one number."""

Tier = Literal["every", "slow", "demand"]
"""`every`: measured at each sample. `slow`: at one in ten or more. `demand`: like `slow`, if in `measures=`."""

TSE = "Classic Transformers (arXiv 2312.06182)"
OVERSMOOTHING = "Setting the Record Straight on Transformer Oversmoothing"
VALUES = "Value Residual Learning (arXiv 2410.17897)"
ZHAI = "Stabilizing Transformer Training by Preventing Attention Entropy Collapse (arXiv 2303.06296)"
MERRILL = "Effects of Parameter Norm Growth (arXiv 2010.09697)"

NUM_RECENT = 5
"""Losses that `loss_recent` is the mean of, and norms that `grad_norm_recent` is."""
NUM_OF_NOISE, NOISE_ENDS_BEFORE = 32, 8
"""Number of losses of `loss_before` and `loss_noise`, and number of later ones."""
NUM_AT_START, NUM_SEARCHED, MOST_ABOVE_START = 48, 2048, 5.0
"""Number of finite losses whose median bounds `loss_start`, number of losses that they are among, and the factor."""
PLACES = ("largest", "second largest", "third largest", "fourth largest")
"""Losses of sequences in a frame, by their place."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One measured quantity."""

    name: str
    axis: Axis
    title: str
    """What it says, in a few words, for a chart."""
    equation: str
    source: str = "tsemon"
    flops: str = "0"
    """Floating point operations of one sample, per layer where there are layers; 0 where another's pass gives it."""
    traffic: str = "0"
    """Bytes read and written by the same. The letters of both are explained in `COST_LEGEND`."""
    tier: Tier = "every"
    low: float | None = 0.0
    """The smallest value it can take; None where there is no bound."""
    high: float | None = None
    unit: str = "1"
    per_head: bool = False
    """Whether the frame also carries it under `heads`."""
    log_scale: bool = False
    """Whether charts should use a logarithmic scale."""
    is_plotted: bool = True
    """False for numbers that only name something: charts, Prometheus and mirrors leave them out."""


_per_activation = partial(Metric, axis="activation")
_per_block = partial(Metric, axis="block")
_per_run = partial(Metric, axis="run")


COSINE: Mapping[str, Any] = {"low": -1.0, "high": 1.0}
COST_OF_STATE: Mapping[str, Any] = {"flops": "14 B T D", "traffic": "44 B T D"}
COST_OF_NORM: Mapping[str, Any] = {"flops": "2 N", "traffic": "4 N"}
COST_OF_UPDATE: Mapping[str, Any] = {"flops": "16 N", "traffic": "60 N"}


def _changes(step: str, what: str, before: str, after: str, where: str) -> tuple[Metric, ...]:
    """Changes of the three measures of oversmoothing by a sub-step of a block."""
    demanded = partial(_per_block, tier="demand")
    return (
        demanded(
            name=f"{step}_hfc_lfc_ratio",
            title=f"change of HFC/LFC by {what}, as a factor: above 1 sharpens",
            equation=f"(|{after} - P {after}| / |P {after}|) / (|{before} - P {before}| / |P {before}|), geometric mean "
            f"over samples, {where}",
            source=f"{OVERSMOOTHING}, Definition 1",
            log_scale=True,
        ),
        demanded(
            name=f"{step}_cosine_change",
            title=f"change of the mean cosine by {what}: above 0 smooths",
            equation=f"t_cos({after}) - t_cos({before}), {where}",
            source=f"{OVERSMOOTHING}, Definition 2",
            low=None,
        ),
        demanded(
            name=f"{step}_rank_ratio",
            title=f"change of the effective rank by {what}, as a factor: above 1 sharpens",
            equation=f"effective_rank({after}) / effective_rank({before}), of up to 256 tokens of one sequence, {where}",
            source=f"{OVERSMOOTHING}, Definition 3",
            flops="2 * 256^2 D + 10 * 256^3 on the host",
            traffic="40 * 256 D + 8 * 256^2",
            log_scale=True,
        ),
    )


COST_LEGEND = (
    "B sequences in the batch, T tokens in each, D width, F width of the feed-forward part, H heads, K width of a head, "
    "m query rows weighed (64 at most), b sequences of which they are (as many as 2^18 weights allow), "
    "S held sequences (4 at most), N parameters of the block (of all, for a run), c coordinates that are "
    "kept (65,536 at most), r predictions (256 at most), V classes, n losses; activations of 2 or 4 bytes, "
    "everything else of 4"
)


CATALOGUE: tuple[Metric, ...] = (
    # Activations: X is (T tokens, D width), m its mean token, P = 11'/T. Mean over the samples of the batch.
    _per_activation(
        name="token_similarity",
        title="energy that tokens share",
        equation="|P X|^2 / |X|^2, before a de-escalation step where the block has one",
        source=f"{TSE}, Definition 1",
        flops="14 B T D",
        traffic="44 B T D",
        high=1.0,
    ),
    _per_activation(
        name="token_diversity",
        title="energy that tokens do not share",
        equation="|X - P X|^2 / |X|^2",
        source=f"{TSE}, Definition 1",
        high=1.0,
        log_scale=True,
    ),
    _per_activation(
        name="centred_token_similarity",
        title="shared energy without the batch's common mean",
        equation="token_similarity of X - c, where c is the mean over all tokens of all samples",
        source="tsemon: tells a harmless shared direction from collapse",
        flops="4 B D",
        traffic="8 B D",
        high=1.0,
    ),
    _per_activation(
        name="global_diversity",
        title="energy that is not the mean of the whole batch",
        equation="sum of |x - c|^2 / sum of |x|^2 over all tokens of all samples, c their mean",
        source="tsemon: tells collapse over samples, too",
        high=1.0,
        log_scale=True,
    ),
    _per_block(
        name="deescalated_token_similarity",
        title="token similarity after de-escalation",
        equation="token_similarity of (I - tau P) X; blocks without the step give NaN",
        source=f"{TSE}, Eq. 21",
        flops="14 B T D",
        traffic="44 B T D",
        high=1.0,
    ),
    _per_block(
        name="escalation_rate",
        title="how much attention and residual escalate similarity",
        equation="t_div(X) / t_div(Y), X the block's input, Y = X + SA(X), what the next norm gets",
        source=f"{TSE}, Eq. 5",
        flops="14 B T D",
        traffic="44 B T D",
        log_scale=True,
    ),
    _per_block(
        name="residual_gain",
        title="growth of the hidden state by attention and residual",
        equation="|Y| / |X|, X the block's input, Y = X + SA(X)",
        tier="slow",
        log_scale=True,
    ),
    _per_block(
        name="attention_escalation_rate",
        title="how much attention alone escalates similarity",
        equation="t_div(X) / t_div(A), X the block's input, A the state that attention adds to it",
        source=f"{TSE}, Definition 2",
        **COST_OF_STATE,
        tier="slow",
        log_scale=True,
    ),
    _per_block(
        name="attention_gain",
        title="size of attention's output against the hidden state",
        equation="|A| / |X|, X the block's input, A the state that attention adds to it",
        tier="slow",
        log_scale=True,
    ),
    _per_block(
        name="feedforward_escalation_rate",
        title="how much feed-forward part and residual escalate similarity",
        equation="t_div(Y) / t_div(Z), Y the state before the feed-forward part, Z = Y + FF(Y), before a norm on it",
        source=f"{TSE}, Definition 2",
        **COST_OF_STATE,
        tier="slow",
        log_scale=True,
    ),
    _per_block(
        name="feedforward_gain",
        title="growth of the hidden state by feed-forward part and residual",
        equation="|Z| / |Y|, Y the state before the feed-forward part, Z = Y + FF(Y), before a norm on it",
        tier="slow",
        log_scale=True,
    ),
    _per_block(
        name="norm_escalation_rate",
        title="how much the block's norms escalate similarity",
        equation="t_div(U) / t_div(N(U)), U the input of a norm, product over the norms of the block",
        source=f"{TSE}, Definition 2",
        flops="28 B T D",
        traffic="88 B T D",
        tier="slow",
        log_scale=True,
    ),
    _per_block(
        name="norm_gain",
        title="root mean square of the outputs of the block's norms",
        equation="sqrt(mean of N(U)^2 over tokens and width), U the input of a norm, product over the norms of the block",
        tier="slow",
        log_scale=True,
    ),
    *_changes("residual", "attention with its residual", "X", "Y", "X the block's input, Y = X + SA(X)"),
    *_changes("feedforward", "the feed-forward part with its residual", "Y", "Z", "Z = Y + FF(Y), before a norm on it"),
    *_changes("norm1", "attention's norm", "U", "N(U)", "U the input of the norm before or after attention"),
    *_changes(
        "norm2", "the feed-forward part's norm", "U", "N(U)", "U the input of the norm before or after that part"
    ),
    _per_activation(
        name="cosine_similarity",
        title="mean cosine between two tokens",
        equation="mean over i != j of x_i . x_j / (|x_i| |x_j|)",
        source=f"{TSE}, Section 1",
        **COSINE,
    ),
    _per_activation(
        name="hfc_lfc",
        title="high- against low-frequency content",
        equation="|X - P X| / |P X|, Frobenius norms",
        source=f"{OVERSMOOTHING}, Definition 1",
        log_scale=True,
    ),
    _per_activation(
        name="effective_rank",
        title="directions that the tokens use",
        equation="exp(-sum_i p_i log p_i), p_i = sigma_i / sum_j sigma_j, of up to 256 evenly spread tokens of one sequence",
        source=f"{OVERSMOOTHING}, Definition 3",
        flops="2 * 256^2 D + 10 * 256^3 on the host",
        traffic="40 * 256 D + 8 * 256^2",
        tier="slow",
        low=1.0,
    ),
    _per_activation(
        name="batch_similarity",
        title="energy that sequences share",
        equation="token_similarity of the matrix of mean tokens, one per sequence",
        source="tsemon: tells collapse over samples",
        flops="6 B D",
        traffic="12 B D",
        high=1.0,
    ),
    _per_activation(
        name="batch_rank",
        title="directions that the sequences use",
        equation="effective_rank of the mean tokens, one per sequence, less their mean",
        source="tsemon: tells collapse over samples",
        flops="2 B^2 D + 10 B^3 on the host",
        traffic="40 B D + 8 B^2",
        tier="slow",
        low=1.0,
    ),
    _per_activation(
        name="hidden_rms",
        title="root mean square of the hidden state",
        equation="sqrt(mean of x^2 over tokens and width)",
    ),
    _per_activation(
        name="hidden_max",
        title="largest entry of the hidden state",
        equation="max of |x| over tokens, width and the samples that are finite",
    ),
    _per_activation(
        name="first_hidden_norm_ratio",
        title="length of the first token against the others'",
        equation="|x_1| / mean over i > 1 of |x_i|",
        source=f"{VALUES}, Figure 2",
    ),
    _per_activation(
        name="nonfinite",
        title="share of sequences that hold a NaN or an infinity",
        equation="mean over samples of [X is not finite]",
        high=1.0,
    ),
    _per_activation(
        name="saturation",
        title="how near the network is to its saturated limit",
        equation="mean over tokens of cos(f(x; theta), f(x; c theta)), c = 1024 or as large as the dtype allows",
        source=f"{MERRILL}, Section 4.1",
        flops="2 forward passes of S sequences",
        traffic="the same",
        tier="slow",
        **COSINE,
    ),
    # The feed-forward part: Z is what its last layer gets, (T tokens, F units).
    _per_block(
        name="dead_units",
        title="share of feed-forward units that never move",
        equation="mean over units of [max over tokens - min over tokens of z is 0]",
        flops="2 B T F",
        traffic="8 B T F",
        tier="slow",
        high=1.0,
    ),
    # Attention: A is (T queries, T keys), rows sum to 1; V is (T tokens, width of the values).
    _per_block(
        name="attention_entropy",
        title="row entropy of attention, 1 uniform, 0 one-hot",
        equation="mean over rows i of -sum_j A_ij log A_ij / log(visible keys of i)",
        source=f"{ZHAI}, Section 3, divided by its largest value",
        flops="2 b H m T K + 12 b H m T",
        traffic="4 b H T K + 60 b H m T",
        high=1.0,
        per_head=True,
    ),
    _per_block(
        name="attention_entropy_min",
        title="attention entropy of the lowest head",
        equation="min over heads of attention_entropy",
        source=f"{ZHAI}, Section 3",
        high=1.0,
    ),
    _per_block(
        name="attention_entropy_se",
        title="standard error of attention_entropy",
        equation="sqrt((1 - b/B) s_b^2 / b + b/B (1 - m/T) s_w^2 / (b m)), s_b between the weighed sequences' means, s_w "
        "between rows within one",
        source="tsemon: two-stage sampling; 0 where all rows were weighed",
    ),
    _per_block(
        name="importance_entropy",
        title="entropy of what each token receives of attention, 1 uniform",
        equation="-sum_j a_j log a_j / log T, a_j = mean over heads and weighed rows i of A_ij",
        source=f"{VALUES}, Eq. 11, divided by its largest value",
        flops="2 b H m T",
        traffic="8 b H m T",
        high=1.0,
    ),
    _per_block(
        name="sink_share",
        title="share of attention that the first token receives",
        equation="mean over rows i > 1 of A_i1",
        source=f"{VALUES}, Figure 2",
        high=1.0,
        per_head=True,
    ),
    _per_block(
        name="max_attention_logit",
        title="largest attention logit",
        equation="max over all rows of b sequences and visible keys of q_i . k_j * scale + bias",
        source=f"{ZHAI}, Section 3",
        flops="2 b H T^2 K, causal half",
        traffic="24 b H T^2, causal half",
        low=None,
        per_head=True,
    ),
    _per_block(
        name="positions_attended",
        title="tokens that a query attends to",
        equation="mean over rows i of #{j : A_ij > 1e-5}, in the network as it is; the paper counts in the saturated one",
        source=f"{MERRILL}, Section 4.3",
        flops="2 b H m T",
        traffic="5 b H m T",
        per_head=True,
    ),
    _per_block(
        name="spectral_gap",
        title="how fast attention alone would mix the tokens",
        equation="1 - |lambda_2(A)|, mean over heads, of one sequence",
        source=f"{TSE}, Section 2.2",
        flops="causal 4 H T K; else 32 passes of attention",
        traffic="causal 8 H T K; else 32 times 8 H T K",
        tier="demand",
        low=-1.0,
        high=1.0,
    ),
    _per_block(
        name="first_value_norm_ratio",
        title="length of the first token's value against the others'",
        equation="|v_1| / mean over i > 1 of |v_i|, heads side by side",
        source=f"{VALUES}, Figure 2",
        flops="2 B T D",
        traffic="8 B T D",
    ),
    _per_block(
        name="value_top_eigenvalue",
        title="largest eigenvalue of the values' second moment",
        equation="lambda_1 of 1/T sum_i v_i v_i', heads side by side, of up to 256 evenly spread tokens of one sequence",
        source=f"{VALUES}, Eq. 12",
        flops="2 * 256^2 D + 10 * 256^3 on the host",
        traffic="8 * 256 D",
        tier="slow",
        log_scale=True,
    ),
    _per_block(
        name="value_output_growth",
        title="whether the weights of attention smooth (above 1) or sharpen (below 1)",
        equation="max_j |1 + lambda_j(H)|, H = W_V W_O over all heads, without norms, gains and biases; at infinite depth",
        source=f"{OVERSMOOTHING}, Lemma 2",
        flops="128 D^2",
        traffic="256 D^2",
        tier="slow",
        log_scale=True,
    ),
    _per_block(
        name="value_output_negative_share",
        title="fraction of the value and output weights that sharpens",
        equation="#{j : Re lambda_j(W_V,h W_O,h) < 0} / K, mean over heads h",
        source=f"{OVERSMOOTHING}, Corollary 3",
        flops="6 D^2 K + 50 H K^3 on the host",
        traffic="16 D^2 + 24 D K",
        tier="demand",
        high=1.0,
        per_head=True,
    ),
    _per_block(
        name="value_output_norm",
        title="spectral norm of the value and output weights",
        equation="|W_V,h W_O,h|_2, largest of all heads h",
        source=f"{OVERSMOOTHING}, Eq. 2",
        tier="demand",
        per_head=True,
    ),
    # Parameters: w are those of the block, g their gradient, d their change in this optimizer step.
    _per_block(
        name="param_norm",
        title="norm of the block's parameters",
        equation="|w|, embeddings and scalars inside the block among them",
        source=f"{MERRILL}, Section 3",
        **COST_OF_NORM,
    ),
    _per_block(
        name="attention_param_norm",
        title="norm of the parameters of the block's attention",
        equation="|w| of attention, without norms",
        source=f"{MERRILL}, Section 3",
        tier="slow",
    ),
    _per_block(
        name="feedforward_param_norm",
        title="norm of the parameters of the block's feed-forward part",
        equation="|w| of the block without attention, other mixers of tokens, and norms",
        source=f"{MERRILL}, Section 3",
        tier="slow",
    ),
    _per_block(
        name="grad_norm",
        title="norm of the block's gradient before clipping",
        equation="|g|",
        **COST_OF_NORM,
        log_scale=True,
    ),
    _per_block(
        name="clipped_grad_norm",
        title="norm of the block's gradient after clipping",
        equation="|g|, as the optimizer gets it",
        **COST_OF_NORM,
        log_scale=True,
    ),
    _per_block(
        name="grad_norm_qk",
        title="norm of the gradient of queries and keys before clipping",
        equation="|g| of the weights and biases that make queries and keys",
        source="tsemon: the first to vanish under token similarity escalation",
        flops="2 N / 6",
        traffic="4 N / 6",
        log_scale=True,
    ),
    _per_block(
        name="update_norm",
        title="norm of the block's update",
        equation="|d|",
        source=f"{MERRILL}, Section 5.5",
        **COST_OF_UPDATE,
        log_scale=True,
    ),
    _per_block(
        name="update_ratio",
        title="update against parameters",
        equation="|d| / |w|",
        log_scale=True,
    ),
    _per_block(
        name="trained_update_ratio",
        title="update against the parameters that train",
        equation="|d| / |w| of the parameters that require a gradient: adapters against their own norm; update_ratio "
        "where all of a block trains",
        log_scale=True,
    ),
    _per_block(
        name="update_alignment",
        title="cosine of the update with the parameters",
        equation="d . w / (|d| |w|)",
        source=f"{MERRILL}, Section 5.5",
        flops="2 N",
        traffic="8 N",
        **COSINE,
    ),
    _per_block(
        name="gradient_alignment",
        title="cosine of the gradient with the parameters",
        equation="g . w / (|g| |w|)",
        source=f"{MERRILL}, Section 5.5",
        flops="2 N",
        traffic="8 N",
        **COSINE,
    ),
    _per_block(
        name="direction_cosine",
        title="cosine of the parameters with those of the sample before",
        equation="w . w' / (|w| |w'|), w' those of the sample before",
        source=f"{MERRILL}, Section 3",
        flops="6 c",
        traffic="12 c",
        **COSINE,
    ),
    # The run: all parameters but embeddings and scalars.
    _per_run(
        name="loss",
        title="training loss",
        equation="as passed to monitor.step",
        source="the user",
        low=None,
    ),
    _per_run(
        name="loss_mean",
        title="mean training loss since the last sample",
        equation="mean of the finite ones of the last n losses passed to monitor.step, n = min(steps since the last sample, "
        "4096), this step's among them",
        flops="n",
        traffic="30 n",
        low=None,
    ),
    _per_run(
        name="loss_min",
        title="lowest training loss since the last sample",
        equation="min over the same",
        low=None,
    ),
    _per_run(
        name="loss_max",
        title="highest training loss since the last sample",
        equation="max over the same",
        low=None,
    ),
    _per_run(
        name="loss_std",
        title="standard deviation of the training loss since the last sample",
        equation="sqrt(mean of squares - square of mean) over the same; 0 of one step",
        flops="n",
    ),
    _per_run(
        name="loss_nonfinite",
        title="steps since the last sample whose loss was not finite",
        equation="number of NaN and infinities among the n",
    ),
    _per_run(
        name="loss_recent",
        title="mean training loss of the last 5 steps",
        equation=f"mean of the finite ones of the last {NUM_RECENT} losses, however near the last sample is; NaN if few are",
        low=None,
    ),
    _per_run(
        name="loss_before",
        title="mean training loss before the last steps",
        equation=f"mean of the {NUM_OF_NOISE} losses that end {NOISE_ENDS_BEFORE} steps before this one; at least half of "
        "them must be there and finite",
        low=None,
    ),
    _per_run(
        name="loss_noise",
        title="how much the training loss varies from step to step",
        equation=f"standard deviation of the {NUM_OF_NOISE} losses that end {NOISE_ENDS_BEFORE} steps before this one; "
        "at least half of them must be there and finite",
    ),
    _per_run(
        name="loss_start",
        title="training loss that learning began at",
        equation=f"max(m, min(first one, {MOST_ABOVE_START:g} |m|)), m = median of the first {NUM_AT_START} so far; of the "
        f"finite ones among the first {NUM_SEARCHED} of the run or since attach, at least {NUM_AT_START // 2}; 0 or -1 from "
        "the first step on is no loss",
        low=None,
    ),
    _per_run(
        name="grad_norm_mean",
        title="mean gradient norm since the last sample",
        equation="mean of the finite ones of the last n norms before clipping, of all parameters clipped together, "
        "as torch.nn.utils.clip_grad_norm_ computed them or as passed to monitor.step(grad_norm=...), n = min(steps since "
        "the last sample, 4096), this step's among them",
        flops="n",
        traffic="30 n",
    ),
    _per_run(
        name="grad_norm_max",
        title="largest gradient norm since the last sample",
        equation="max over the same",
        log_scale=True,
    ),
    _per_run(
        name="grad_norm_nonfinite",
        title="steps since the last sample whose gradient norm was not finite",
        equation="number of NaN and infinities among the n",
    ),
    _per_run(
        name="grad_norm_recent",
        title="mean gradient norm of the last 5 steps",
        equation=f"mean of the finite ones of the last {NUM_RECENT} norms, however near the last sample is",
        log_scale=True,
    ),
    _per_run(
        name="untrained_parameters",
        title="parameters that no optimizer trains",
        equation="parameter tensors with a gradient that no optimizer given to attach() has and that have not changed since "
        "the last sample; without embeddings and half precision",
    ),
    _per_run(
        name="total_param_norm",
        title="norm of all parameters",
        equation="|w| without embeddings and scalars outside the blocks",
        source=f"{MERRILL}, Appendix A",
    ),
    _per_run(
        name="total_grad_norm",
        title="norm of the gradient before clipping, without embeddings",
        equation="|g| without embeddings and scalars outside the blocks",
        log_scale=True,
    ),
    _per_run(
        name="total_clipped_grad_norm",
        title="norm of the gradient after clipping, without embeddings",
        equation="|g|, as the optimizer gets it, without embeddings and scalars outside the blocks",
        log_scale=True,
    ),
    _per_run(
        name="step_size",
        title="norm of the whole update",
        equation="|d| without embeddings and scalars outside the blocks",
        source=f"{MERRILL}, Section 5.5",
        log_scale=True,
    ),
    _per_run(
        name="update_alignment",
        title="cosine of the whole update with the parameters",
        equation="d . w / (|d| |w|) without embeddings and scalars outside the blocks",
        source=f"{MERRILL}, Section 5.5",
        **COSINE,
    ),
    _per_run(
        name="gradient_alignment",
        title="cosine of the whole gradient with the parameters",
        equation="g . w / (|g| |w|) without embeddings and scalars outside the blocks",
        source=f"{MERRILL}, Section 5.5",
        **COSINE,
    ),
    _per_run(
        name="direction_cosine",
        title="cosine of all parameters with those of the sample before",
        equation="w . w' / (|w| |w'|) without embeddings and scalars outside the blocks",
        source=f"{MERRILL}, Section 3",
        **COSINE,
    ),
    _per_run(
        name="gradient_cosine",
        title="cosine of the gradient with that of the sample before",
        equation="g . g' / (|g| |g'|) without embeddings and scalars outside the blocks",
        flops="6 c",
        traffic="12 c",
        **COSINE,
    ),
    _per_run(
        name="embedding_param_norm",
        title="norm of the embeddings",
        equation="|w| of the embeddings",
        source=f"{MERRILL}, Appendix A: given apart",
        **COST_OF_NORM,
    ),
    _per_run(
        name="embedding_grad_norm",
        title="norm of the gradient of the embeddings before clipping",
        equation="|g| of the embeddings",
        **COST_OF_NORM,
        log_scale=True,
    ),
    _per_run(
        name="embedding_update_norm",
        title="norm of the update of the embeddings",
        equation="|d| of the embeddings",
        **COST_OF_UPDATE,
        log_scale=True,
    ),
    _per_run(
        name="head_param_norm",
        title="norm of the output head",
        equation="|w| of the output head where it is not tied to the embeddings",
        source=f"{MERRILL}, Appendix A: given apart",
        **COST_OF_NORM,
    ),
    _per_run(
        name="head_grad_norm",
        title="norm of the gradient of the output head before clipping",
        equation="|g| of the output head",
        **COST_OF_NORM,
        log_scale=True,
    ),
    _per_run(
        name="head_update_norm",
        title="norm of the update of the output head",
        equation="|d| of the output head",
        **COST_OF_UPDATE,
        log_scale=True,
    ),
    _per_run(
        name="norm_growth_exponent",
        title="exponent of the norm's growth",
        equation="p in |w_t| - |w_0| = c t^p, least squares on logarithms over the samples so far",
        source=f"{MERRILL}, Appendix E",
        flops="1 on the host, per sample so far",
        traffic="8 per sample so far",
        low=None,
    ),
    _per_run(
        name="norm_growth_r2",
        title="how well the power law fits",
        equation="share of the variance of the logarithm that it explains",
        low=None,
        high=1.0,
    ),
    _per_run(
        name="output_variation",
        title="how much the answer depends on the input",
        equation="token_diversity of the softmax outputs of up to 256 predictions; 0 when all inputs get the same answer",
        flops="16 r V",
        traffic="60 r V",
        high=1.0,
    ),
    _per_run(
        name="input_overlap",
        title="sequences of the batch that were in the batch of the sample before",
        equation="share of up to 256 sequences whose hash is among those of the sample before: about batch / data set where "
        "samples are drawn at random, 1 where a loader is stuck (and under full-batch training)",
        flops="2 B T",
        traffic="40 B T",
        high=1.0,
    ),
    _per_run(
        name="distinct_inputs",
        title="different sequences in the batch",
        equation="number of different hashes among up to 256 sequences; 1 where all are the same, undefined for one",
        flops="2 B T",
        traffic="40 B T",
        low=1.0,
    ),
    _per_run(
        name="learning_rate",
        title="learning rate of the first parameter group",
        equation="as the optimizer used it",
        source="the user",
    ),
    _per_run(
        name="saturation_scale",
        title="the c of saturation",
        equation="1024 where the dtype allows it",
        tier="slow",
        low=1.0,
    ),
    _per_run(
        name="overhead_ratio",
        title="tsemon's own share of wall time",
        equation="seconds in tsemon on the training thread / seconds since attach",
        high=1.0,
    ),
    _per_run(
        name="contained_faults",
        title="faults inside tsemon so far",
        equation="number of exceptions caught",
    ),
    _per_run(
        name="dropped_frames",
        title="frames given up so far",
        equation="samples and frames dropped unsent, because what holds them was full or was deleted",
    ),
    # The sequences of rank 0's batch with the largest losses.
    *(
        _per_run(
            name=f"sequence_loss_{place}",
            title=f"{words} loss of a sequence of the batch",
            equation="mean cross-entropy of the sequence's labels, or as passed in sequence_losses; NaN ranks first",
            flops="4 B T V" if place == 1 else "0",
            traffic="8 B T V" if place == 1 else "0",
            low=None,
        )
        for place, words in enumerate(PLACES, 1)
    ),
    *(
        _per_run(
            name=f"sequence_id_{place}",
            title=f"sequence with the {words} loss",
            equation="53 bits of a hash of its inputs, or as passed in sequence_ids",
            is_plotted=False,
        )
        for place, words in enumerate(PLACES, 1)
    ),
    *(
        _per_run(
            name=f"sequence_seen_{place}",
            title=f"earlier step with the sequence of the {words} loss",
            equation="newest earlier sampled step whose batch had this id, of the last 65,536 ids; NaN if it is new",
            is_plotted=False,
        )
        for place, words in enumerate(PLACES, 1)
    ),
    _per_run(
        name="sequence_loss_mean",
        title="mean loss of the sequences of the batch",
        equation="mean of the finite losses of its sequences; NaN if all are NaN or infinite",
        low=None,
    ),
)

NOT_OF_TENSORS = {
    "loss": "the number that the user passes to monitor.step",
    "learning_rate": "a setting of the optimizer",
    "untrained_parameters": "a count of tensors that did not change",
    "saturation_scale": "the factor that the probe chose for `saturation`",
    "overhead_ratio": "measured by clocks",
    "contained_faults": "a count of exceptions",
    "dropped_frames": "a count of frames",
    **{
        f"sequence_loss_{place}": "a loss of the user's, or a cross-entropy of the model's labels"
        for place in range(1, 5)
    },
    "sequence_loss_mean": "a mean of losses of the user's, or of cross-entropies of the model's labels",
    **{f"sequence_{kind}_{place}": "names a sequence or a step" for kind in ("id", "seen") for place in range(1, 5)},
}
"""Metrics that are not a quantity of tensors, and why. `tsemon.measures` has a function for every other metric."""

SCALARS = {metric.name: metric for metric in CATALOGUE if metric.axis == "run"}
"""Metrics of a run as a whole, by name."""

TIERS = {metric.name: metric.tier for metric in CATALOGUE}
"""The tier of each metric, by name; one that is layered and a run's has one tier."""

LAYERED = {metric.name: metric for metric in CATALOGUE if metric.axis != "run"}
"""Metrics with a value per layer, by name."""

NOT_PLOTTED = frozenset(metric.name for metric in CATALOGUE if not metric.is_plotted)
"""Numbers that only name something."""


OWN_FAMILY = "custom"
"""The family of a rule that names none."""


def most_alike(name: str, known: Collection[str]) -> str | None:
    """The known name that is most like `name`; None if none is alike."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def nearest(name: str, known: Collection[str]) -> str:
    """A hint for an error message: the most alike of the known names, or the first of them where none is alike."""
    close = most_alike(name, known)
    if close is not None:
        return f"did you mean {close!r}?"
    shown = ", ".join(repr(one) for one in sorted(known)[:MOST_NAMED])
    num_more = len(known) - MOST_NAMED
    return f"known are {shown or 'none'}" + (f" and {num_more} more" if num_more > 0 else "")


MOST_NAMED = 20
"""More names than these are no hint."""
