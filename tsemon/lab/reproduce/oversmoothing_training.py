"""Vision transformers whose attention is made to sharpen or to smooth, and what each of their sub-layers does.

Axes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tsemon.lab.reproduce.observing import Values, forward, observe
from tsemon.lab.reproduce.random_encoder import caught
from tsemon.lab.train.images import Images, image_batches
from tsemon.lab.train.loop import train_steps
from tsemon.lab.train.schedules import cosine
from tsemon.measures import cosine_similarity, effective_rank, hfc_lfc
from tsemon.models import VisionTransformer
from tsemon.models.reparameterised import Reparameterisation

KINDS: Mapping[str, Reparameterisation | None] = {
    "original": None,
    "sharpening": "sharpening",
    "smoothing": "smoothing",
}
MEASURES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "hfc_lfc": hfc_lfc,
    "cosine_similarity": cosine_similarity,
    "effective_rank": effective_rank,
}
SUBLAYERS = ("attention", "LayerNorm", "MLP")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    width: int = 96
    depth: int = 12
    steps: int = 300
    batch_size: int = 32
    num_pairs: int = 67
    """Of A and H, of each of the nine kinds."""
    repeating_seeds: int = 10


@dataclass(frozen=True, kw_only=True)
class Trained:
    shares: Mapping[tuple[str, str], float]
    """By measure and sub-layer: the share of layers that raise it."""
    curves: Mapping[str, Values]
    """By measure: after 0 to `depth` blocks."""
    accuracy: float


def train(kind: Reparameterisation | None, data: Images, sizes: Sizes, *, norm_affine: bool) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer.from_preset(
        "vit-ti",
        image_size=16,
        channels=1,
        num_classes=10,
        depth=sizes.depth,
        width=sizes.width,
        ffn=4 * sizes.width,
        reparameterisation=kind,
        norm_affine=norm_affine,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = cosine(optimizer, warmup=sizes.steps // 10, total=sizes.steps)
    batches = image_batches(data.train_images, data.train_labels, sizes.batch_size, seed=0)
    for _ in itertools.islice(train_steps(model, optimizer, batches, schedule), sizes.steps):
        pass
    return model.eval()


def measured(model: VisionTransformer, images: Tensor, labels: Tensor) -> Trained:
    passes = sublayer_passes(model, images)
    shares = {
        (name, sublayer): float(np.mean([is_raised(measure, *states) for states in passes[sublayer]]))
        for name, measure in MEASURES.items()
        for sublayer in SUBLAYERS
    }
    frame = observe(model, partial(forward, model, images), measures=list(MEASURES))
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == labels).double().mean().item()
    return Trained(shares=shares, curves={name: frame.layers[name] for name in MEASURES}, accuracy=accuracy)


def sublayer_passes(model: VisionTransformer, images: Tensor) -> Mapping[str, Sequence[tuple[Tensor, Tensor]]]:
    """Hidden states (B, T, D) before and after each sub-layer of pre-norm blocks: attention and MLP with their residual."""
    with torch.no_grad(), caught(model) as seen:
        model(images)
    passes: dict[str, list[tuple[Tensor, Tensor]]] = {sublayer: [] for sublayer in SUBLAYERS}
    for block in (f"blocks.{number}" for number in range(len(model.blocks))):
        (x, _), (y, _), (_, z) = norm1, norm2, _ = seen[f"{block}.norm1"], seen[f"{block}.norm2"], seen[block]
        passes["attention"].append((x, y))
        passes["LayerNorm"] += [norm1, norm2]
        passes["MLP"].append((y, z))
    return passes


def is_raised(measure: Callable[[Tensor], Tensor], before_BTD: Tensor, after_BTD: Tensor) -> bool:
    """Whether the mean over sequences is larger behind the sub-layer."""
    return bool(measure(after_BTD).mean() > measure(before_BTD).mean())
