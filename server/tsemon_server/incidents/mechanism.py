"""Find the sub-step of a block that makes tokens alike or states explode, and report it with its numbers.

Each sub-step has signs: numbers that leave the range of an earlier healthy frame, or of the other blocks. The size of a sign
is the logarithm of the factor. The earliest block with a sign at least 0.6 times the largest one is the cause: the states
that a later block gets are not healthy. If the past of a block is unknown, it is compared with the other blocks. As healthy
blocks differ, too, such a sign counts only in the blocks of the incident, or if it is the largest.

Within the block, the order is the order of SIGNS: a norm's gain depends on no other sub-step, and a residual that is scaled
down makes the other sub-steps look large.

Axes: N blocks, E entries of hidden states (N and one for each stack), H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tsemon.stacks import Stacks
from tsemon_server.rules.heads import head_of

SubStep = Literal["norm", "residual", "attention", "feed-forward"]
Array = NDArray[np.float64]
Named = Mapping[str, Array | None]

DECISIVE = math.log(2.5)
"""Smallest sign that decides. Most healthy blocks differ from each other, and from an early sample, by less."""
EARLY = 0.6
"""The earliest block whose sign is at least this fraction of the largest one is the cause."""
SLACK = 2
"""Blocks before the first block of an alert that may be the cause: rules name blocks whose output is not healthy."""
LEAST = 0.02
"""Smallest weight of a residual that is distinguished from 0."""
SMALL = 0.2
"""An output this small, relative to the residual, changes nothing: growth up to there is no sign."""
FLAT_LOGIT = 1.0
"""Below this, logits make no difference: growth up to there is no sign."""
HALF = 0.5
"""A feed-forward part whose output is this large, relative to its input, is usual."""
ONE_HOT = 0.1
"""A head with an attention entropy below this attends to about a single token."""
FACTOR, FLAT = 2.0, 0.05
"""Weights explain what attention does if the distance of their growth from 1 is FACTOR times the usual one, and FLAT."""
LEVEL = 0.02
"""An escalation rate this near to 1 neither smooths nor sharpens."""
SHARED = 0.5
"""Inputs explain smoothing if tokens share at least this fraction of their energy, and its odds rose by DECISIVE."""
LARGEST = math.log(1e6)
OF_NO_SUB_STEP = frozenset(
    (
        *("block-does-not-move", "parameters-not-trained", "updates-too-small"),
        *("weight-decay-outweighs-gradient", "parameter-norm-shrinks"),
        *("batch-repeats", "batch-of-one-sample", "sequences-repeat"),
        *("output-ignores-states", "output-ignores-input-after-loss", "loss-changes-sign"),
    )
)
"""Rules on the optimizer, the data and the output head."""


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """The numbers of one frame, or the newest known value of each metric. Missing values are null, absent or NaN."""

    layers: Named
    """By metric: one value per block (N,), or per hidden state (E,)."""
    heads: Named = field(default_factory=dict)
    """By metric: one value per block and head (N, H)."""
    stacks: Stacks | None = None
    """None: all blocks are one stack."""
    step: int | None = None
    """Step of the newest frame."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Step of the value of each metric of `layers`, if it is known."""
    is_origin: bool = False
    """Whether this frame tells the origin of NaN, seen before an optimizer step could spread it to all parameters."""

    def name_of(self, block: int) -> str:
        """Such as "block 7" or "block 1 of the decoder"."""
        return (self.stacks or Stacks.of(0)).in_words(block, block)

    def step_of(self, metric: str | None) -> int | None:
        """The step at which the metric was measured; for None, the step of the newest frame."""
        return self.step if metric is None else self.steps.get(metric, self.step)


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """The cause within the step. `block` and `sub_step` are null if the numbers do not decide."""

    block: int | None = None
    """From 0."""
    sub_step: SubStep | None = None
    metric: str | None = None
    """The metric that shows it."""
    factor: float | None = None
    """Its value relative to the reference, such as 20 or 0.03."""
    head: int | None = None
    """From 0; None if no single head stands out."""
    text: str
    """One or two sentences."""


@dataclass(frozen=True)
class _Sign:
    sub_step: SubStep
    metric: str
    size_N: Array
    """0 in blocks without the sign."""
    says: str
    """Clause about the sub-step, with {value}, {usual}, and {factor} or {compared}. If it lacks {compared}, the reference
    follows."""
    of: Callable[[Array], Array] = np.asarray
    """Function of the metric that the clause is about."""


def mechanism_of(
    newest: Arrays, *, rule: str = "", blocks: tuple[int, int] | None = None, healthy: Arrays | None = None
) -> Mechanism:
    """Return the sub-step that stands out, given the rule of an incident's cause and its first and last block, from 0."""
    if rule in OF_NO_SUB_STEP:
        return Mechanism(text="The cause is not a sub-step: look at the optimizer, the data or the output head.")
    if rule.startswith("non-finite") or rule == "loss-not-finite" or _is_nonfinite(newest):
        return _first_nonfinite(newest)
    num_blocks = max((len(x) for name in NEEDED if (x := _known(newest, name)) is not None), default=0)
    if not num_blocks:
        return Mechanism(
            text=f"The sub-step is unknown: the stored samples of that time have none of {', '.join(NEEDED)}."
        )
    signs = [sign for of in SIGNS for sign in of(newest, healthy, num_blocks)]
    allowed_N = np.zeros(num_blocks, dtype=bool)
    first, last = (0, num_blocks - 1) if blocks is None else (max(blocks[0], 0), blocks[1])
    allowed_N[max(0, first - SLACK) : last + 1] = True
    size_SN = np.stack([np.where(allowed_N, sign.size_N, 0.0) for sign in signs])
    largest = size_SN.max()
    if healthy is not None:
        is_own_SN = np.stack([_has_past(sign, healthy) for sign in signs])
        is_own_SN[:, first : last + 1] |= blocks is not None
        size_SN = np.where(is_own_SN | (size_SN >= largest), size_SN, 0.0)
    if largest < DECISIVE:
        head = None if blocks is None or not rule.startswith("attention-") else head_of(newest.heads, first)
        told = f" In {newest.name_of(first)}, {of_head}." if (of_head := _of_head(head, first, newest)) else ""
        of_block = None if rule and blocks is None else first  # an incident that names no block is about none
        return Mechanism(head=head, text=_undecided(newest, healthy, math.exp(largest), of_block, num_blocks) + told)
    enough = max(DECISIVE, EARLY * largest)
    block = int(np.argmax(size_SN.max(axis=0) >= enough))
    sign = next(sign for sign, size_N in zip(signs, size_SN, strict=True) if size_N[block] >= enough)
    return _told(sign, block, newest, healthy)


SLOW = (
    "attention_gain",
    "residual_gain",
    "feedforward_gain",
    "feedforward_escalation_rate",
    "norm_gain",
    "attention_param_norm",
    "feedforward_param_norm",
)
"""Metrics that not every frame has."""
NEEDED = "escalation_rate", *SLOW


# Signs.


def _norms(newest: Arrays, healthy: Arrays | None, num_blocks: int) -> list[_Sign]:
    change_N = _change("norm_gain", newest, healthy, num_blocks)
    says = "the norms scale states by {value}, {factor} times the {usual}"
    return [_Sign("norm", "norm_gain", np.abs(change_N), says)]


def _residual(newest: Arrays, healthy: Arrays | None, num_blocks: int) -> list[_Sign]:
    """|Y|^2 = c^2 |X|^2 + |A|^2 gives the weight c of the residual, if X and A have no common direction."""
    weight_N = _weight(newest, num_blocks)
    usual_N = _usual_weight(healthy, num_blocks)
    size_N = np.nan_to_num(np.log(np.maximum(usual_N, LEAST) / np.maximum(weight_N, LEAST)))
    says = "the residual has a weight of about {value}, {factor} times the {usual}"
    return [_Sign("residual", "residual_gain", np.clip(size_N, 0, LARGEST), says)]


def _usual_weight(healthy: Arrays | None, num_blocks: int) -> Array:
    return np.ones(num_blocks) if healthy is None else np.fmin(_weight(healthy, num_blocks), 1.0)


def _weight(arrays: Arrays, num_blocks: int) -> Array:
    """NaN where attention is so large that the residual does not show."""
    whole_N, added_N = (_padded(arrays, name, num_blocks) for name in ("residual_gain", "attention_gain"))
    weight_N = np.sqrt(np.maximum(whole_N**2 - added_N**2, 0.0))
    return np.where(np.minimum(whole_N, added_N) < 1.0, weight_N, np.nan)


def _attention(newest: Arrays, healthy: Arrays | None, num_blocks: int) -> list[_Sign]:
    gain_N = _change("attention_gain", newest, healthy, num_blocks, of=lambda gain_N: np.maximum(gain_N, SMALL))
    # Logits are products of two states: a factor of the states counts twice.
    logit_N = (
        _change("max_attention_logit", newest, healthy, num_blocks, of=lambda logit_N: np.maximum(logit_N, FLAT_LOGIT))
        / 2
    )
    rate_N = _change("escalation_rate", newest, healthy, num_blocks)
    return [
        _weights("attention", "attention_param_norm", newest, healthy, num_blocks),
        _Sign(
            "attention",
            "max_attention_logit",
            np.fmax(logit_N, 0.0),
            "attention logits reach {value}, {factor} times the {usual}",
        ),
        _Sign(
            "attention",
            "attention_gain",
            np.fmax(gain_N, 0.0),
            "the output of attention is {value} times as large as the block's input, {factor} times the {usual}",
        ),
        _Sign(
            "attention",
            "escalation_rate",
            np.fmax(rate_N, 0.0),
            "attention with its residual has an escalation rate of {value}, {factor} times the {usual}",
        ),
    ]


def _feed_forward(newest: Arrays, healthy: Arrays | None, num_blocks: int) -> list[_Sign]:
    gain_N = _change("feedforward_gain", newest, healthy, num_blocks, of=_added)
    rate_N = _change("feedforward_escalation_rate", newest, healthy, num_blocks)
    return [
        _weights("feed-forward", "feedforward_param_norm", newest, healthy, num_blocks),
        _Sign(
            "feed-forward",
            "feedforward_escalation_rate",
            np.fmax(rate_N, 0.0),
            "the feed-forward part divides token diversity by {value}, {factor} times the {usual}",
        ),
        _Sign(
            "feed-forward",
            "feedforward_gain",
            np.fmax(gain_N, 0.0),
            "the feed-forward part adds about {value} times its input, in {compared} {usual} times",
            of=_added,
        ),
    ]


def _weights(sub_step: SubStep, metric: str, newest: Arrays, healthy: Arrays | None, num_blocks: int) -> _Sign:
    """Weights that grew tell the cause even after the model has adapted to them."""
    grown_N = _change(metric, newest, healthy, num_blocks)
    part = "attention" if sub_step == "attention" else "the feed-forward part"
    says = f"the weights of {part} have a norm of {{value}}, {{factor}} times the {{usual}}"
    return _Sign(sub_step, metric, np.fmax(grown_N, 0.0), says)


GROWTH = "value_output_growth"
SIGNS: tuple[Callable[[Arrays, Arrays | None, int], list[_Sign]], ...] = (_norms, _residual, _attention, _feed_forward)


def _known(arrays: Arrays | None, name: str) -> Array | None:
    found = None if arrays is None else arrays.layers.get(name)
    return None if found is None or not np.isfinite(found).any() else np.asarray(found, dtype=np.float64)


def _padded(arrays: Arrays | None, name: str, num_blocks: int) -> Array:
    found = _known(arrays, name)
    return np.full(num_blocks, np.nan) if found is None or len(found) != num_blocks else found


def _added(gain_N: Array) -> Array:
    """Size of the output that a sub-step adds to a residual of size 1, if the two have no common direction; from HALF on."""
    return np.sqrt(np.maximum(gain_N**2 - 1, HALF**2))


def _change(
    name: str,
    newest: Arrays,
    healthy: Arrays | None,
    num_blocks: int,
    of: Callable[[Array], Array] = lambda value_N: value_N,
) -> Array:
    """The logarithm of the value over the usual one, or of a function of both, less its median over the blocks: the change
    that all blocks have in common is no block's own. An unchanged block has none, even if all others changed.
    0 where one of the values is unknown."""
    value_N = np.abs(_padded(newest, name, num_blocks))
    with np.errstate(divide="ignore", invalid="ignore"):
        log_N = np.clip(np.log(of(value_N) / of(_usual(name, newest, healthy, num_blocks))), -LARGEST, LARGEST)
    own_N = log_N - (0.0 if math.isnan(common := _median(log_N)) else common)
    least_N = np.where(np.abs(own_N) < np.abs(log_N), own_N, log_N)
    return np.nan_to_num(np.where(own_N * log_N > 0, least_N, 0.0))


def _usual(name: str, newest: Arrays, healthy: Arrays | None, num_blocks: int) -> Array:
    """The value of each block in the healthy frame, or the median of the other blocks if the frame lacks it."""
    values_N, before_N = (np.abs(_padded(arrays, name, num_blocks)) for arrays in (newest, healthy))
    usual_N = np.where(np.isfinite(before_N) & (before_N > 0), before_N, np.nan)
    for block in np.flatnonzero(np.isnan(usual_N)):
        usual_N[block] = _median(np.delete(values_N, block))
    return usual_N


def _median(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan


# NaN and infinities.


def _is_nonfinite(arrays: Arrays) -> bool:
    found = _known(arrays, "nonfinite")
    return found is not None and bool(np.nanmax(found) > 0)


def _first_nonfinite(newest: Arrays) -> Mechanism:
    found_E = _known(newest, "nonfinite")
    if newest.is_origin and (found_E is None or not np.nanmax(found_E) > 0):
        return Mechanism(text=f"The sub-step is unknown: {NOT_SEEN}.")
    if found_E is None:
        return Mechanism(text="The sub-step is unknown: the frame does not tell which hidden states are finite.")
    if not np.nanmax(found_E) > 0:
        return Mechanism(text="The sub-step is unknown: all hidden states of the frame are finite.")
    number = int(np.argmax(np.nan_to_num(found_E) > 0))
    stacks = newest.stacks or Stacks.of(len(found_E) - 1)
    entry = stacks.entry(number, len(found_E))
    if entry is None or entry.block is None:
        stack = "" if entry is None or not stacks.each[entry.stack].name else f" of the {stacks.each[entry.stack].name}"
        why = "their cause is in the embeddings or in the data" if newest.is_origin else SPREAD
        return Mechanism(text=f"The first block{stack} already gets NaN or infinities: {why}.")
    block, share = entry.block, found_E[number]
    name = f"B{stacks.in_words(block, block)[1:]}"
    where = f"{name} is the first whose output holds NaN or infinities, in {_percent(share)} of the sequences"
    if not newest.is_origin:
        return Mechanism(block=block, text=f"{where}. The sub-step is unknown: {SPREAD}.")
    for name, sub_step, says in ORDER if share == 1 else ():
        values_N = newest.layers.get(name)
        if values_N is not None and block < len(values_N) and not np.isfinite(values_N[block]):
            return Mechanism(block=block, sub_step=sub_step, metric=name, text=f"{where}. {says} makes them.")
    hidden = "the sub-steps are measured on finite sequences alone"
    why = hidden if share < 1 else "the frame has no metrics of its sub-steps"
    return Mechanism(block=block, text=f"{where}. The sub-step is unknown: {why}.")


NOT_SEEN = (
    "all hidden states that tsemon saw before NaN or infinity spread were finite. Check the last batches, the output head, "
    "the loss function, the labels, the backward pass and half precision"
)
SPREAD = "they may have begun anywhere, because an optimizer step spreads them to all parameters"
ORDER: tuple[tuple[str, SubStep, str], ...] = (
    ("attention_gain", "attention", "Attention"),
    ("residual_gain", "residual", "The residual"),
    ("feedforward_gain", "feed-forward", "The feed-forward part"),
    ("norm_gain", "norm", "A norm"),
)
"""Sub-steps as the hidden state meets them, and the metric that lacks a value if the sub-step makes NaN."""


# Words.


def _told(sign: _Sign, block: int, newest: Arrays, healthy: Arrays | None) -> Mechanism:
    num_blocks = len(sign.size_N)
    if sign.sub_step == "residual":
        value = _weight(newest, num_blocks)[block]
        usual = _usual_weight(healthy, num_blocks)[block]
    else:
        value = sign.of(np.abs(_padded(newest, sign.metric, num_blocks)))[block]
        usual = sign.of(_usual(sign.metric, newest, healthy, num_blocks))[block]
    factor = value / usual
    head = head_of(newest.heads, block) if sign.sub_step == "attention" else None
    has_past = healthy is not None and _has_past(sign, healthy)[block]
    compared = "the other blocks" if healthy is None or not has_past else _named(healthy, sign)
    numbers = {"value": _number(value), "factor": _number(factor), "usual": _number(usual)}
    says = sign.says.format(**numbers, compared=compared) + ("" if "{compared}" in sign.says else f" of {compared}")
    of_head = _of_head(head, block, newest)
    text = f"In {newest.name_of(block)}, {says}{of_head and f', and {of_head}'}."
    if sign.sub_step in ("attention", "residual"):
        alpha = 1.0 if sign.sub_step == "attention" else 1 / value if value > LEAST else math.nan
        why = _Smoothing.of(block, num_blocks, newest, healthy, alpha)
        text += f" Attention {why.text()}." if why.is_known else ""
    else:
        text += _effect(sign.sub_step, block, num_blocks, newest, healthy)
    return Mechanism(
        block=block, sub_step=sign.sub_step, metric=sign.metric, factor=float(factor), head=head, text=text
    )


def _named(healthy: Arrays, sign: _Sign) -> str:
    """Training changes a model that is new, so readers must know if that is the reference."""
    return "the sample before training" if healthy.step_of(sign.metric) == 0 else "the healthy sample"


def _has_past(sign: _Sign, healthy: Arrays) -> NDArray[np.bool_]:
    """Whether the healthy frame has the value of each block."""
    return np.isfinite(_padded(healthy, sign.metric, len(sign.size_N)))


def _effect(sub_step: SubStep, block: int, num_blocks: int, newest: Arrays, healthy: Arrays | None) -> str:
    """Sentence on the effect of a norm or a feed-forward part on token similarity and on the size of states, or nothing."""
    if sub_step == "norm":
        subject, rates = "Normalization", "norm_escalation_rate"
        stacks = newest.stacks or Stacks.of(num_blocks)
        size, usual_size = (
            _padded(of, "hidden_rms", stacks.num_states)[stacks.output_of(block)] for of in (newest, healthy)
        )
        says = "the block's output has a root mean square of"
    else:
        subject, rates = "The feed-forward part", "feedforward_escalation_rate"
        size = _padded(newest, "feedforward_gain", num_blocks)[block]
        usual_size = _usual("feedforward_gain", newest, healthy, num_blocks)[block]
        says = "it multiplies the size of hidden states by"
    rate, usual = _padded(newest, rates, num_blocks)[block], _usual(rates, newest, healthy, num_blocks)[block]
    numbers = ("the escalation rate is", rate, usual), (says, size, usual_size)
    text = ", and ".join(f"{says} {_beside(x, usual)}" for says, x, usual in numbers if math.isfinite(x))
    if math.isfinite(rate):
        text = f"{subject} {_does(rate)}: {text}"
    return f" {text[0].upper()}{text[1:]}." if text else ""


def _does(rate: float) -> str:
    """Verb for a sub-step with this escalation rate."""
    if abs(rate - 1) <= LEVEL:
        return "hardly changes token similarity"
    return "smooths" if rate > 1 else "sharpens"


@dataclass(frozen=True, kw_only=True)
class _Smoothing:
    """Whether attention with its residual makes tokens alike, and whether by its weights or by its inputs."""

    rate: float
    """Escalation rate."""
    expected: float
    """The rate of Eq. 13 of Classic Transformers for random value weights (d sigma^2 = 1) and uniform attention (mu_1 = 1,
    mu_2 = 0): 1 + alpha^2 t_sim(X). A residual of weight c has alpha = 1 / c."""
    growth: float
    usual_growth: float
    shared: float
    usual_shared: float

    @classmethod
    def of(cls, block: int, num_blocks: int, newest: Arrays, healthy: Arrays | None, alpha: float = 1.0) -> _Smoothing:
        stacks = newest.stacks or Stacks.of(num_blocks)
        shared, usual_shared = (
            _padded(of, "token_similarity", stacks.num_states)[stacks.output_of(block) - 1] for of in (newest, healthy)
        )
        return cls(
            rate=_padded(newest, "escalation_rate", num_blocks)[block],
            expected=1 + alpha**2 * shared,
            growth=_padded(newest, GROWTH, num_blocks)[block],
            usual_growth=_usual(GROWTH, newest, healthy, num_blocks)[block],
            shared=shared,
            usual_shared=usual_shared,
        )

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.rate)

    @property
    def is_by_weights(self) -> bool | None:
        """None if it is unknown, or if the weights have changed the other way."""
        way = 1 if self.rate > 1 else -1
        distance, usual = (way * (growth - 1) for growth in (self.growth, self.usual_growth))
        if math.isnan(distance) or math.isnan(usual) or -distance > FACTOR * max(-usual, FLAT):
            return None
        return bool(distance > FACTOR * max(usual, FLAT))

    @property
    def is_by_inputs(self) -> bool | None:
        """None if it is unknown, or if the inputs have changed too little or the other way."""
        change = _log_odds(self.shared) - _log_odds(self.usual_shared)
        if math.isnan(change) or (abs(change) >= DECISIVE and not (change > 0 and self.shared >= SHARED)):
            return None
        return bool(self.rate > 1 and change >= DECISIVE)

    def text(self) -> str:
        """A clause whose subject is attention."""
        found = [f"the escalation rate is {_exact(self.rate)}"]
        if math.isfinite(self.expected):
            found[0] += f" (Eq. 13 gives {_exact(self.expected)} for random value weights and uniform attention)"
        if math.isfinite(self.growth):
            found.append(f"the weights multiply what tokens share by {_beside(self.growth, self.usual_growth)}")
        if math.isfinite(self.shared):
            usual = "" if math.isnan(self.usual_shared) else f" (usual {_percent(self.usual_shared)})"
            found.append(f"tokens share {_percent(self.shared)} of the input's energy{usual}")
        evidence = ", ".join(found[:-1]) + ", and " + found[-1] if len(found) > 1 else found[0]
        return f"{_does(self.rate)}{self._reason()}: {evidence}"

    def _reason(self) -> str:
        if abs(self.rate - 1) <= LEVEL:
            return ""
        match self.is_by_weights, self.is_by_inputs:
            case (True, True):
                return " by its weights and by its inputs"
            case (True, _):
                return " by its weights"
            case (False, True):
                return " by its inputs, not by its weights"
            case (None, True):
                return " by its inputs"
            case (False, False):
                return ", with the usual value and output weights and usual inputs"
            case (False, None):
                return ", with the usual value and output weights"
            case _:
                return ""


def _log_odds(share: float) -> float:
    share = float(np.clip(share, 1e-9, 1 - 1e-9))
    return math.log(share / (1 - share))


def _of_head(head: int | None, block: int, newest: Arrays) -> str:
    if head is None:
        return ""
    entropy_NH, logit_NH = (newest.heads.get(name) for name in ("attention_entropy", "max_attention_logit"))
    if entropy_NH is not None and entropy_NH[block][head] < ONE_HOT:
        return f"head {head} attends to about a single token (entropy {_number(entropy_NH[block][head])})"
    if logit_NH is not None:
        return f"head {head} has the largest logit ({_number(logit_NH[block][head])})"
    return ""


def _undecided(newest: Arrays, healthy: Arrays | None, factor: float, block: int | None, num_blocks: int) -> str:
    if _known(newest, "attention_gain") is None and _known(newest, "feedforward_gain") is None:
        return "The sub-step is unknown: the frame lacks the metrics of sub-steps, which come with the slow tier."
    reference = (
        "the other blocks"
        if healthy is None
        else "the healthy sample (beyond the change that all blocks have in common)"
    )
    text = (
        f"The sub-step is unknown: no block stands out, as the largest difference from {reference} is a factor of "
        f"{_number(factor)}."
    )
    if block is None:
        return text
    why = _Smoothing.of(block, num_blocks, newest, healthy)
    is_told = why.is_known and healthy is not None and (why.is_by_weights or why.is_by_inputs)
    return text + (f" In {newest.name_of(block)}, attention {why.text()}." if is_told else "")


def _number(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 10 else f"{value:,.0f}"


def _exact(value: float) -> str:
    """A factor that may be near 1."""
    return f"{value:.3g}" if abs(value) < 10 else _number(value)


def _beside(value: float, usual: float) -> str:
    return _exact(value) + (f" (usual {_exact(usual)})" if math.isfinite(usual) else "")


def _percent(share: float) -> str:
    return f"{_number(100 * share)} %"
