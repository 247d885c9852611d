"""Losses of single sequences, from a model's logits and labels.

Axes: B sequences, T tokens, V classes, R ways to read the labels: of the logits in the same place, and one place before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

MAX_ELEMENTS, MAX_ON_CPU = 2**24, 2**20
"""Number of logits that are widened to float32 at a time: 64 MiB. On a CPU, 4 MiB stay in the cache."""
TOLERANCE = 0.01
"""Largest relative difference between the mean of the sequences' losses and the loss of the step."""
EXACT, FAR = 1e-4, 0.05
"""A mean within EXACT is the loss itself. A way to read the labels that is FAR off is not meant."""
ROUNDING = 2**-23
"""How inexact the logarithm of a sum near 1 is in float32: much, relative to a loss near 0."""


def sequence_loss_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum and number of the cross-entropies of each sequence: (R, 2, B) in float32.

    logits (B, T, V) and labels (B, T), or (B, V) and (B,). Labels that are no class, such as -100, do not count.
    """
    logits_BTV = logits.detach() if logits.ndim == 3 else logits.detach()[:, None]
    labels_BT = labels.detach().long().reshape(logits_BTV.shape[:2])
    num_tokens, num_classes = logits_BTV.shape[1:]
    labels_BTR = torch.stack([labels_BT, torch.nn.functional.pad(labels_BT[:, 1:], (0, 1), value=-100)], dim=-1)
    is_class_BTR = (labels_BTR >= 0) & (labels_BTR < num_classes)
    index_BTR = labels_BTR.clamp(0, num_classes - 1)
    max_elements = MAX_ON_CPU if logits.device.type == "cpu" else MAX_ELEMENTS
    rows = [
        torch.cat([_cross_entropy(*part) for part in _split(*of_sequences, max_elements // num_classes, dim=1)], dim=1)
        for of_sequences in _split(logits_BTV, index_BTR, max_elements // (num_tokens * num_classes), dim=0)
    ]
    losses_BTR = torch.where(is_class_BTR, torch.cat(rows).float(), 0.0)
    return torch.stack([losses_BTR.sum(dim=1), is_class_BTR.float().sum(dim=1)]).permute(2, 0, 1)


def _split(x: Tensor, index: Tensor, size: int, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(x, max(1, size), dim), torch.split(index, max(1, size), dim), strict=True)


def _cross_entropy(logits_BTV: Tensor, index_BTR: Tensor) -> Tensor:
    """As exact as log_softmax where the loss is small: no large number is added to the logarithm."""
    max_BT1 = logits_BTV.amax(dim=-1, keepdim=True).float()
    log_sum_BT1 = (logits_BTV - max_BT1).exp_().sum(dim=-1, keepdim=True).log_()
    return log_sum_BT1 + (max_BT1 - logits_BTV.gather(-1, index_BTR))


def sequence_losses(
    sums_R2B: Tensor, references: Sequence[float], num_items: float, usual: int = 0
) -> tuple[int, Tensor] | None:
    """The way to read the labels, and each sequence's mean loss (B,): NaN without labels. None unless a reference agrees.

    A reference is a loss of the step. It agrees if the mean over tokens or over sequences, or the sum divided by
    `num_items`, is within 1 %. The mean of the nearer way must also be exact, or the other way must be far off, because both
    have nearly the same mean in an untrained model. If all losses are NaN, the `usual` way counts.
    """
    ways = sorted(range(len(sums_R2B)), key=lambda way: way != usual)
    distances = [_distance(sums_R2B[way].double(), references, num_items) for way in ways]
    nearest, other = sorted(distances)
    if nearest > TOLERANCE or (nearest > EXACT and other < FAR):
        return None
    way = ways[distances.index(nearest)]
    sum_B, num_B = sums_R2B[way].double()
    return way, sum_B / num_B


def _distance(sums_2B: Tensor, references: Sequence[float], num_items: float) -> float:
    """The smallest relative difference between a mean of the losses and a reference."""
    sum_B, num_B = sums_2B
    if not num_B.any():
        return math.inf
    means = [sum_B.sum() / num_B.sum(), (sum_B / num_B)[num_B > 0].mean()]
    means += [sum_B.sum() / num_items] if num_items > 0 else []
    pairs = product(torch.stack(means).tolist(), references)
    return min((_relative(mean, reference) for mean, reference in pairs), default=math.inf)


def _relative(mean: float, reference: float) -> float:
    if mean == reference or (math.isnan(mean) and math.isnan(reference)):
        return 0.0
    difference = max(abs(mean - reference) - ROUNDING, 0.0) / max(abs(reference), 1e-12)
    return math.inf if math.isnan(mean - reference) else difference
