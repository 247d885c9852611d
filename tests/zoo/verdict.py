"""Compare what tsemon reports of a specimen with the expected values."""

import math
from collections import Counter

import torch

from tests.frames import values_of
from tests.setups.harness import values
from tests.setups.matrix import (
    ATTENTION,
    GRADIENTS,
    HIDDEN_STATES,
    PARAMETERS,
    SATURATION,
    UPDATES,
    family_cell,
)
from tsemon.probes import find_blocks

METRICS = {
    HIDDEN_STATES: ("token_similarity", "token_diversity", "effective_rank"),
    ATTENTION: ("attention_entropy", "attention_entropy_min", "max_attention_logit"),
    PARAMETERS: ("param_norm", "total_param_norm"),
    GRADIENTS: ("grad_norm", "total_grad_norm"),
    UPDATES: ("update_norm", "update_ratio"),
    SATURATION: ("saturation",),
}
OF_STATES = (*METRICS[HIDDEN_STATES], *METRICS[SATURATION])
TOLERANCE = {"rel_tol": 1e-5, "abs_tol": 1e-6}


def differences(trained):
    """Names of values that are not bit-equal with and without tsemon."""
    if not trained.has_blocks:
        return []
    return [name for name, value in trained.left.items() if not torch.equal(value, trained.left_by_tsemon[name])]


def wrong_values(family, trained):
    """Sentences about values that disagree with the definition, or are missing without a true reason."""
    found, status = [], trained.status
    for metric in METRICS[family]:
        seen = [(number, _read(frame, metric)) for number, frame in enumerate(trained.frames)]
        seen = [(number, got) for number, got in seen if got is not None]
        reason = status.not_measured.get(metric, "")
        missing = not seen
        for number, got in seen:
            views = [view[metric] for view in trained.expected[number] if metric in view]
            wrong = [_disagreements(metric, number, got, _laid_out(metric, view, trained)) for view in views]
            found += min(wrong, key=len, default=[])
            missing |= any(value is None or math.isnan(value) for value in got)
        if missing and not reason:
            found.append(f"{metric} is missing, and nothing says why")
        if missing and "compiled" in reason:
            found.append(f"{metric} is missing, and tsemon says of a model that is not compiled: {reason}")
    return found


def _read(frame, metric):
    if metric in frame["layers"]:
        return values_of(frame, metric)
    return [frame["scalars"][metric]] if metric in frame["scalars"] else None


def _laid_out(metric, expected, trained):
    """The values as a frame has them. In a stack that has become one depth with others, the input has no entry."""
    if metric not in OF_STATES:
        return expected if isinstance(expected, list) else [expected]
    first, *later = expected
    return [*first, *(x for one in later for x in (one if "+" in stacks_of(trained) else one[1:]))]


def _disagreements(metric, step, values, expected):
    if len(expected) != len(values):
        return [f"{metric} has {len(values)} entries, not {len(expected)}"]
    return [
        f"{metric}[{entry}] of step {step} is {got:.6g}, not {want:.6g}"
        for entry, (got, want) in enumerate(zip(values, expected, strict=True))
        if got is not None and not math.isnan(got) and not math.isclose(got, want, **TOLERANCE)
    ]


def stacks_of(trained):
    """The number of blocks that tsemon found in each stack."""
    if not trained.has_blocks:
        return "none"
    sizes = Counter(block.stack for block in find_blocks(trained.subject.model))
    if sum(sizes.values()) != len(trained.status.blocks):
        return str(len(trained.status.blocks))
    return " + ".join(str(size) for _, size in sorted(sizes.items()))


def answer(family, trained):
    """The cell of the table, if nothing is wrong. Every tenth sample has slow measures, and so has the first."""
    found = [
        next((x for frame in trained.frames if (x := values(frame, metric)) is not None), None)
        for metric in METRICS[family]
    ]
    return family_cell(found, METRICS[family], trained.status.not_measured)
