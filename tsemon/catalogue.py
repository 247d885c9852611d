"""Every metric once: its name on the wire, in SQL, in Prometheus and on the page, and what it means.

`docs/measures.md` is this table with the traps beside it; a test holds the two together.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

Axis = Literal["activation", "block", "run"]
"""`activation`: depth + 1 entries, entry 0 is the first block's input. `block`: one per block. `run`: one number."""

TSE = "Classic Transformers (arXiv 2312.06182)"
ZHAI = "Stabilizing Transformer Training by Preventing Attention Entropy Collapse (arXiv 2303.06296)"
MERRILL = "Effects of Parameter Norm Growth (arXiv 2010.09697)"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One measured quantity."""

    name: str
    axis: Axis
    title: str
    """What it says, in a few words, for a chart."""
    equation: str
    source: str
    low: float | None = None
    """The smallest value it can take; None where there is no bound."""
    high: float | None = None
    unit: str = "1"
    per_head: bool = False
    """Whether the frame also carries it under `heads`."""
    log_scale: bool = False
    """Whether charts should use a logarithmic scale."""


CATALOGUE: tuple[Metric, ...] = (
    # Activations: X is (T tokens, D width), m its mean token, P = 11'/T. Mean over the samples of the batch.
    Metric(
        name="token_similarity",
        axis="activation",
        title="energy that tokens share",
        equation="|P X|^2 / |X|^2, before a de-escalation step where the block has one",
        source=f"{TSE}, Definition 1",
        low=0.0,
        high=1.0,
    ),
    Metric(
        name="token_diversity",
        axis="activation",
        title="energy that tokens do not share",
        equation="|X - P X|^2 / |X|^2",
        source=f"{TSE}, Definition 1",
        low=0.0,
        high=1.0,
        log_scale=True,
    ),
    Metric(
        name="centred_token_similarity",
        axis="activation",
        title="shared energy without the batch's common mean",
        equation="token_similarity of X - c, where c is the mean over all tokens of all samples",
        source="tsemon: tells a harmless shared direction from collapse",
        low=0.0,
        high=1.0,
    ),
    Metric(
        name="deescalated_token_similarity",
        axis="block",
        title="token similarity after de-escalation",
        equation="token_similarity of (I - tau P) X; blocks without the step give NaN",
        source=f"{TSE}, Eq. 21",
        low=0.0,
        high=1.0,
    ),
    Metric(
        name="cosine_similarity",
        axis="activation",
        title="mean cosine between two tokens",
        equation="mean over i != j of x_i . x_j / (|x_i| |x_j|)",
        source=f"{TSE}, Section 1",
        low=-1.0,
        high=1.0,
    ),
    Metric(
        name="hidden_rms",
        axis="activation",
        title="root mean square of the hidden state",
        equation="sqrt(mean of x^2 over tokens and width)",
        source="tsemon",
        low=0.0,
    ),
    Metric(
        name="nonfinite",
        axis="activation",
        title="share of sequences that hold a NaN or an infinity",
        equation="mean over samples of [X is not finite]",
        source="tsemon",
        low=0.0,
        high=1.0,
    ),
    # Attention: A is (T queries, T keys), rows sum to 1.
    Metric(
        name="attention_entropy",
        axis="block",
        title="row entropy of attention, 1 uniform, 0 one-hot",
        equation="mean over rows i of -sum_j A_ij log A_ij / log(visible keys of i)",
        source=f"{ZHAI}, Section 3, divided by its largest value",
        low=0.0,
        high=1.0,
        per_head=True,
    ),
    Metric(
        name="attention_entropy_min",
        axis="block",
        title="attention entropy of the lowest head",
        equation="min over heads of attention_entropy",
        source=f"{ZHAI}, Section 3",
        low=0.0,
        high=1.0,
    ),
    # Parameters: w are those of the block, g their gradient, d their change in this optimizer step.
    Metric(
        name="param_norm",
        axis="block",
        title="norm of the block's parameters",
        equation="|w|",
        source=f"{MERRILL}, Section 3",
        low=0.0,
    ),
    Metric(
        name="grad_norm",
        axis="block",
        title="norm of the block's gradient",
        equation="|g|",
        source="tsemon",
        low=0.0,
        log_scale=True,
    ),
    Metric(
        name="update_norm",
        axis="block",
        title="norm of the block's update",
        equation="|d|",
        source=f"{MERRILL}, Section 5.5",
        low=0.0,
        log_scale=True,
    ),
    Metric(
        name="update_ratio",
        axis="block",
        title="update against parameters",
        equation="|d| / |w|",
        source="tsemon",
        low=0.0,
        log_scale=True,
    ),
    Metric(
        name="update_alignment",
        axis="block",
        title="cosine of the update with the parameters",
        equation="d . w / (|d| |w|)",
        source=f"{MERRILL}, Section 5.5",
        low=-1.0,
        high=1.0,
    ),
    # The run: all parameters but embeddings and scalars.
    Metric(name="loss", axis="run", title="training loss", equation="as passed to monitor.step", source="the user"),
    Metric(
        name="total_param_norm",
        axis="run",
        title="norm of all parameters",
        equation="|w| without embeddings and scalars",
        source=f"{MERRILL}, Appendix A",
        low=0.0,
    ),
    Metric(
        name="total_grad_norm",
        axis="run",
        title="norm of the whole gradient",
        equation="|g| without embeddings and scalars",
        source="tsemon",
        low=0.0,
        log_scale=True,
    ),
    Metric(
        name="step_size",
        axis="run",
        title="norm of the whole update",
        equation="|d| without embeddings and scalars",
        source=f"{MERRILL}, Section 5.5",
        low=0.0,
        log_scale=True,
    ),
    Metric(
        name="update_alignment",
        axis="run",
        title="cosine of the whole update with the parameters",
        equation="d . w / (|d| |w|) without embeddings and scalars",
        source=f"{MERRILL}, Section 5.5",
        low=-1.0,
        high=1.0,
    ),
    Metric(
        name="learning_rate",
        axis="run",
        title="learning rate of the first parameter group",
        equation="as the optimizer used it",
        source="the user",
        low=0.0,
    ),
    Metric(
        name="overhead_ratio",
        axis="run",
        title="tsemon's own share of wall time",
        equation="seconds in tsemon on the training thread / seconds since attach",
        source="tsemon",
        low=0.0,
        high=1.0,
    ),
    Metric(
        name="contained_faults",
        axis="run",
        title="faults inside tsemon so far",
        equation="number of exceptions caught",
        source="tsemon",
        low=0.0,
    ),
)

SCALARS = {metric.name: metric for metric in CATALOGUE if metric.axis == "run"}
"""Metrics of a run as a whole, by name."""

LAYERED = {metric.name: metric for metric in CATALOGUE if metric.axis != "run"}
"""Metrics with a value per layer, by name."""


def num_entries(metric: Metric, num_blocks: int) -> int:
    """How many entries the metric has in a model of `num_blocks` blocks."""
    return {"activation": num_blocks + 1, "block": num_blocks, "run": 1}[metric.axis]


def nearest(name: str, known: list[str]) -> str:
    """A hint for an error message: the most alike of the known names, or all of them where none is alike."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known)) or 'none'}"
