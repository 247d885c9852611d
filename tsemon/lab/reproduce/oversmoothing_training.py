"""Vision and text encoders whose attention is made to sharpen or to smooth, and what each of their sub-layers does.

Axes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from tsemon.lab.reproduce.observing import forward, observe
from tsemon.lab.reproduce.random_encoder import caught
from tsemon.lab.reproduce.result import Numbers, Spread
from tsemon.lab.train.batches import Batch
from tsemon.lab.train.images import Images, digits, image_batches
from tsemon.lab.train.loop import train_steps
from tsemon.lab.train.schedules import cosine
from tsemon.lab.train.tasks import MaskedTask, Task
from tsemon.lab.train.text import standard_library_text, text_batches
from tsemon.measures import cosine_similarity, effective_rank, hfc_lfc
from tsemon.measures.weights import value_output_products
from tsemon.models import TextEncoder, TextEncoderConfig, VisionTransformer
from tsemon.models.reparameterised import Projection, ReparameterisedAttention

Kind = Literal["original", "sharpening", "smoothing"]
Data = Literal["digits", "text"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PRINTED: Projection = "transpose"
"""These models have three heads, for which footnote 4 prints W_proj = L V_H'."""
READING: Projection = "inverse"
"""With which the eigenvalues of W_V W_proj are those of L, as Section 4 has it."""
MEASURES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "hfc_lfc": hfc_lfc,
    "cosine_similarity": cosine_similarity,
    "effective_rank": effective_rank,
}
SUBLAYERS = ("attention", "LayerNorm", "MLP")
Encoder = VisionTransformer | TextEncoder


@dataclass(frozen=True, kw_only=True)
class Sizes:
    width: int = 96
    depths: tuple[int, ...] = (12, 24, 48)
    """ViT-Ti has the first one, Figure 5 all of them."""
    text_depth: int = 16
    """Crammed BERT's."""
    context: int = 64
    seeds: range = range(3)
    steps: int = 300
    batch_size: int = 32
    num_pairs: int = 67
    """Of A and H, of each of the nine kinds."""
    repeating_seeds: range = range(10)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model to train."""

    kind: Kind
    depth: int
    projection: Projection = PRINTED
    norm_affine: bool = True
    data: Data = "digits"
    seed: int = 0

    def __str__(self) -> str:
        projection = "" if self.kind == "original" else f", {self.projection}"
        norms = "" if self.norm_affine else ", no LN weights"
        data = "" if self.data == "digits" else f" on {self.data}"
        return f"{self.kind}{projection}{data}, depth {self.depth}{norms}, seed {self.seed}"


def setups(sizes: Sizes) -> Iterator[Setup]:
    """The deepest models first: they take the longest. Norms without weights have the depth of ViT-Ti alone, and text
    encoders the projection that is printed."""
    for depth, norm_affine in (*((depth, True) for depth in reversed(sizes.depths)), (sizes.depths[0], False)):
        for kind in KINDS:
            for projection in (PRINTED,) if kind == "original" else (PRINTED, READING):
                for seed in sizes.seeds:
                    yield Setup(kind=kind, depth=depth, projection=projection, norm_affine=norm_affine, seed=seed)
    for kind, seed in itertools.product(KINDS, sizes.seeds):
        yield Setup(kind=kind, depth=sizes.text_depth, data="text", seed=seed)


@dataclass(frozen=True, kw_only=True)
class Trained:
    shares: Mapping[str, Mapping[str, float]]
    """By measure and sub-layer: the fraction of layers that raise it."""
    curves: Mapping[str, Sequence[float]]
    """By measure: after 0 to `depth` blocks."""
    accuracy: float
    eigenvalues: Sequence[float]
    """Real parts for H, over all heads and layers; empty for a reparameterised model, whose signs are fixed."""


@dataclass(frozen=True)
class Models:
    """All trained models."""

    of_setup: Mapping[Setup, Trained]
    depth: int
    """The depth of ViT-Ti, which the paper's tables are about."""

    def over_seeds(self, kind: Kind, projection: Projection = PRINTED, **rules: Any) -> list[Trained]:
        """`rules`: `depth`, `norm_affine` and `data` of a Setup."""
        wanted = Setup(kind=kind, **{"depth": self.depth, "projection": projection} | rules)
        if kind == "original":
            wanted = replace(wanted, projection=PRINTED)
        return [trained for setup, trained in self.of_setup.items() if replace(setup, seed=0) == wanted]

    def share(
        self, kind: Kind, measure: str, projection: Projection = PRINTED, *, sublayer: str = "attention", **rules: Any
    ) -> Spread:
        return Spread([one.shares[measure][sublayer] for one in self.over_seeds(kind, projection, **rules)])

    def end(self, kind: Kind, measure: str, projection: Projection = PRINTED, **rules: Any) -> Spread:
        """The measure after the last block."""
        return Spread([one.curves[measure][-1] for one in self.over_seeds(kind, projection, **rules)])

    def negative_share(self, **rules: Any) -> Spread:
        """Fraction of negative eigenvalues of H in the original model."""
        return Spread([float(np.mean(np.array(one.eigenvalues) < 0)) for one in self.over_seeds("original", **rules)])

    def accuracy(self, kind: Kind, projection: Projection = PRINTED, **rules: Any) -> Spread:
        return Spread([one.accuracy for one in self.over_seeds(kind, projection, **rules)])


def train_one(setup: Setup, sizes: Sizes) -> Numbers:
    if setup.data == "text":
        return asdict(of_text(setup, sizes))
    data = digits()
    model = train(setup, data, sizes)
    return asdict(measured(model, data.val_images, accuracy(model, data.val_images, data.val_labels)))


def of_text(setup: Setup, sizes: Sizes) -> Trained:
    """A BERT that fills in bytes of Python's standard library, measured on 64 sequences that it has not been trained on."""
    text = standard_library_text()
    known, others = text[: -len(text) // 10], text[-len(text) // 10 :]
    torch.manual_seed(setup.seed)
    model = TextEncoder(
        TextEncoderConfig(
            vocab=257,
            context=sizes.context,
            depth=setup.depth,
            width=sizes.width,
            heads=3,
            ffn=4 * sizes.width,
            norm="pre",
            **_rules(setup),
        )
    )
    task = MaskedTask(257, setup.seed)
    _train(model, text_batches(known, sizes.context, sizes.batch_size // 2, seed=setup.seed), sizes, task)
    tokens, targets = next(text_batches(others, sizes.context, 64, seed=0))
    with torch.no_grad():
        _, share = MaskedTask(257).loss_and_accuracy(model, tokens, targets)
    return measured(model, tokens, share.item())


def train(setup: Setup, data: Images, sizes: Sizes) -> VisionTransformer:
    torch.manual_seed(setup.seed)
    model = VisionTransformer.from_preset(
        "vit-ti",
        image_size=16,
        channels=1,
        num_classes=10,
        depth=setup.depth,
        width=sizes.width,
        ffn=4 * sizes.width,
        norm_affine=setup.norm_affine,
        **_rules(setup),
    )
    _train(model, image_batches(data.train_images, data.train_labels, sizes.batch_size, seed=setup.seed), sizes)
    return model


def _rules(setup: Setup) -> dict[str, Any]:
    if setup.kind == "original":
        return {}
    return {"reparameterisation": setup.kind, "projection": setup.projection}


def _train(model: nn.Module, batches: Iterable[Batch], sizes: Sizes, task: Task | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = cosine(optimizer, warmup=sizes.steps // 10, total=sizes.steps)
    for _ in itertools.islice(train_steps(model, optimizer, batches, schedule, task=task), sizes.steps):
        pass
    model.eval()


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).double().mean())


def measured(model: Encoder, inputs: Tensor, accuracy: float) -> Trained:
    passes = sublayer_passes(model, inputs)
    shares = {
        name: {
            sublayer: float(np.mean([is_raised(measure, *states) for states in passes[sublayer]]))
            for sublayer in SUBLAYERS
        }
        for name, measure in MEASURES.items()
    }
    frame = observe(model, partial(forward, model, inputs), measures=list(MEASURES))
    curves = {name: frame.layers[name].tolist() for name in MEASURES}
    return Trained(shares=shares, curves=curves, accuracy=accuracy, eigenvalues=eigenvalues(model))


def eigenvalues(model: Encoder) -> list[float]:
    """Real parts of the eigenvalues of H = W_V W_proj of each head and layer of an original model."""
    found: list[float] = []
    attentions: list[Any] = [block.attention for block in model.blocks]
    for attention in attentions:
        if isinstance(attention, ReparameterisedAttention):
            continue
        value_DD = attention.to_query_key_value.weight[2 * model.config.width :]
        products_H3KK = value_output_products(value_DD, attention.to_output.weight, attention.heads)
        found += torch.linalg.eigvals(products_H3KK[:, 0]).real.flatten().tolist()
    return found


def sublayer_passes(model: Encoder, inputs: Tensor) -> Mapping[str, Sequence[tuple[Tensor, Tensor]]]:
    """Hidden states (B, T, D) before and after each sub-layer of pre-norm blocks: attention and MLP with their residual."""
    with torch.no_grad(), caught(model) as seen:
        model(inputs)
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
