"""Models that are made to sharpen or to smooth: trained ones, repeating ones, and what the theory says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from tsemon.catalogue import OVERSMOOTHING
from tsemon.lab.reproduce.oversmoothing_repeating import (
    REPEATING,
    claims_of_repetition,
    repeating_curves,
    repeating_plot,
)
from tsemon.lab.reproduce.oversmoothing_theory import DOUBLINGS, claims_of_theory, pair_table, random_pairs
from tsemon.lab.reproduce.oversmoothing_training import (
    KINDS,
    MEASURES,
    PRINTED,
    READING,
    SUBLAYERS,
    Kind,
    Models,
    Sizes,
    Trained,
    setups,
    train_one,
)
from tsemon.lab.reproduce.plotting import COLOURS, legend_beside, panels
from tsemon.lab.reproduce.result import (
    NOT_TESTABLE,
    OURS,
    Claim,
    Experiment,
    Numbers,
    Plot,
    Result,
    Table,
    Trial,
    verdict,
)
from tsemon.lab.reproduce.seeds import seeds_of
from tsemon.lab.train.images import digits
from tsemon.lab.train.text import standard_library_text
from tsemon.models import ReparameterisationConfig, ReparameterisedAttention
from tsemon.models.reparameterised import Projection

EXPERIMENT = Experiment(
    name="oversmoothing",
    title="Models that sharpen and models that smooth",
    source=f"{OVERSMOOTHING}, Theorem 3, Tables 1 to 4, Figures 3 to 6 and 10",
)
TITLES = {"hfc_lfc": "HFC/LFC", "cosine_similarity": "cosine similarity", "effective_rank": "effective rank"}
PAPER: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    # Tables 1 to 3, ViT-Ti on CIFAR-100: original, sharpening, smoothing.
    "hfc_lfc": {"attention": (0.000, 1.000, 0.083), "LayerNorm": (0.500, 0.542, 0.125), "MLP": (1.000, 0.167, 1.000)},
    "cosine_similarity": {
        "attention": (1.000, 0.000, 1.000),
        "LayerNorm": (0.458, 0.458, 0.708),
        "MLP": (0.000, 0.917, 0.000),
    },
    "effective_rank": {
        "attention": (0.250, 1.000, 0.167),
        "LayerNorm": (0.583, 0.667, 0.583),
        "MLP": (0.917, 0.417, 0.917),
    },
}
PAPER_TEXT: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    # The same of Crammed BERT on The Pile.
    "hfc_lfc": {"attention": (0.667, 0.467, 0.200), "LayerNorm": (0.750, 0.750, 0.156), "MLP": (0.600, 0.600, 0.267)},
    "cosine_similarity": {
        "attention": (0.333, 0.533, 0.800),
        "LayerNorm": (0.469, 0.250, 0.688),
        "MLP": (0.333, 0.400, 0.733),
    },
    "effective_rank": {
        "attention": (0.733, 0.600, 0.267),
        "LayerNorm": (0.594, 0.594, 0.781),
        "MLP": (0.733, 0.733, 0.333),
    },
}
MOST, FEW = 0.9, 0.1
"""Shares of layers that count as all and as none."""

FULL = Sizes()
QUICK = Sizes(width=48, depths=(12,), seeds=range(1), steps=100, num_pairs=23, repeating_seeds=range(5), text_depth=4)


def trials(quick: bool, seed: int) -> dict[str, Trial]:
    sizes = _sizes(quick, seed)
    return {str(setup): partial(train_one, setup, sizes) for setup in setups(sizes)}


def _sizes(quick: bool, seed: int) -> Sizes:
    sizes = QUICK if quick else FULL
    seeds, repeating = (seeds_of(seed, len(every)) for every in (sizes.seeds, sizes.repeating_seeds))
    return replace(sizes, seeds=seeds, repeating_seeds=repeating)


def result(quick: bool, seed: int, found: Mapping[str, Numbers]) -> Result:
    sizes = _sizes(quick, seed)
    models = Models({setup: Trained(**found[str(setup)]) for setup in setups(sizes)}, sizes.depths[0])
    pairs = random_pairs(sizes.num_pairs, seed=seed)
    repeating = repeating_curves(sizes.repeating_seeds)
    return Result(
        settings={
            "vision transformers": f"pre-norm, depths {', '.join(map(str, sizes.depths))}, width {sizes.width}, 3 heads, "
            f"MLP {4 * sizes.width}, 17 tokens; the paper's ViT-Ti: width 192, 65 tokens",
            "text encoders": f"BERT with pre-norm blocks, depth {sizes.text_depth}, width {sizes.width}, 3 heads, MLP "
            f"{4 * sizes.width}, {sizes.context} bytes of Python's standard library, 15 % of them masked, in batches of "
            f"{sizes.batch_size // 2}, with W_proj as printed; otherwise trained like the vision transformers; measured "
            "without masks. The paper: Crammed BERT, 128 tokens, batches of 8192, 24 hours on The Pile",
            "as printed": "W_proj = L V_H', footnote 4, for models with several heads",
            "as we read it": "W_proj = L V_H^-1, Section 4",
            "training": f"{sizes.steps} steps of {sizes.batch_size} digits, AdamW, lr 1e-3, weight decay 0.05, warm-up "
            f"{sizes.steps // 10} steps, cosine to 10 %, no augmentation; the paper: 300 epochs of CIFAR-100, lr 1.25e-4",
            "agrees": f"shares of at least {MOST} where the paper has 100%, and of at most {FEW} where it has 0%; nearly "
            f"the opposite is at most {2 * FEW:g} or at least {1 - 2 * FEW:g}",
            "measured on": f"{len(digits().val_images)} digits or 64 sequences, not trained on; means over these",
            "repeating models": f"depth {REPEATING['depth']}, width {REPEATING['width']}, {REPEATING['num_tokens']} tokens "
            f"from N(0, 1), 8 sequences, geometric mean over {len(sizes.repeating_seeds)} seeds; the paper does not tell "
            "them",
            "pairs": f"{sizes.num_pairs} A and H of each of nine kinds, 8 tokens, width 8, 2^{DOUBLINGS} layers, float64",
            "seeds": f"{len(sizes.seeds)} for weights and batches, from {sizes.seeds[0]} on; {seed} for pairs",
            "dtype": "float32 but for the pairs",
        },
        claims=[
            *claims_of_training(models, sizes.depths),
            *claims_of_text(models, sizes.text_depth),
            *claims_of_repetition(repeating),
            *claims_of_theory(pairs),
        ],
        plots={
            "depth": depth_plot(models),
            "eigenvalues": eigenvalue_plot(models, sizes.text_depth),
            "repeating": repeating_plot(repeating),
        },
        tables=[
            *share_tables(models),
            text_table(models, sizes.text_depth),
            accuracy_table(models, sizes.depths),
            pair_table(pairs),
        ],
        notes=[*NOTES, stretch_note(sizes.width)],
    )


NOTES = (
    "A sub-layer raises a measure if its mean over digits, or sequences, is larger after it than before. Attention and MLP "
    "are taken with their residual, as in Eq. 2; a LayerNorm, two in a block, is compared with its own input.",
    "V_H L V_H' is symmetric: its eigenvalues have the signs of L (Sylvester's law of inertia) but other sizes, and its "
    "eigenvectors are orthogonal, so that they stretch nothing.",
    "HFC/LFC is in Frobenius norms. The curves over depth are the metrics of tsemon's probes; the effective rank there is "
    "that of one sequence.",
    "clip(psi, [-1, 0]) of a normal psi makes half of the eigenvalues exactly 0, which Corollary 3 leaves out: [-1, 0).",
    "With post-LN the sign of gamma cannot matter: the update and the norm are odd functions, so that a negative gamma only "
    "turns the sign of every other layer.",
    "Which attention is symmetric decides whether Proposition 1 holds; a softmax's hardly ever is. Of the repeating models "
    "those with A and H symmetric meet all that the theory assumes: H = V_H L V_H' with an orthogonal V_H, and psi uniform "
    "in its range. The norm's weights spoil the signs of the eigenvalues only of an H that is not symmetric.",
)


def stretch_note(width: int) -> str:
    """How far V_H is from orthogonal at the start."""
    torch.manual_seed(0)
    attention = ReparameterisedAttention(width, 3, config=ReparameterisationConfig(reparameterisation="sharpening"))
    h_DD = (attention.basis @ attention.output_weight_DD()).detach()
    return (
        "The eigenvalues decide what many equal layers do, not what one does: V_H is not orthogonal, and H = V_H L V_H^-1, "
        f"with eigenvalues in [-1, 0], has a spectral norm of {torch.linalg.matrix_norm(h_DD, 2):.0f} at the start. One "
        "layer of a sharpening model with the inverse may well smooth."
    )


def claims_of_training(models: Models, depths: Sequence[int]) -> Iterator[Claim]:
    def shares(kind: Kind, projection: Projection, **rules: Any) -> str:
        """Those of the attention layers, in the order of Tables 1 to 3."""
        return ", ".join(str(models.share(kind, measure, projection, **rules)) for measure in MEASURES)

    hfc, cosine, rank = (models.share("sharpening", measure) for measure in MEASURES)
    yield Claim(
        paper="100% of the attention layers in the sharpening model increase the HFC/LFC (Table 1) and the effective rank "
        "(Table 3) and 0% of them increase the cosine similarity (Table 2; CIFAR100)",
        seen=f"shares of HFC/LFC, cosine similarity and effective rank: {shares('sharpening', PRINTED)}; of the original "
        f"model {shares('original', PRINTED)}",
        reading=shares("sharpening", READING),
        agrees=verdict(hfc.mean >= MOST, cosine.mean <= FEW, rank.mean >= MOST),
    )
    hfc, cosine, rank = (models.share("smoothing", measure) for measure in MEASURES)
    yield Claim(
        paper="We observe nearly the opposite, intended, behaviour for the smoothing model (0.083, 1.000, 0.167)",
        seen=shares("smoothing", PRINTED),
        reading=shares("smoothing", READING),
        agrees=verdict(hfc.mean <= 2 * FEW, cosine.mean >= 1 - 2 * FEW, rank.mean <= 2 * FEW),
    )
    yield Claim(
        paper="The sharpening model reduces smoothing and the smoothing model increases smoothing, for all metrics "
        "(CIFAR100, Fig. 3)",
        seen=ends_of(models, PRINTED) + " after the last block (smoothing, original, sharpening)",
        reading=ends_of(models, READING),
        agrees=verdict(*smooths_and_sharpens(models)),
    )
    yield Claim(
        paper="Without LayerNorm weights the percentage of layers that increase HFC/LFC goes from 33% to 100%, and for "
        "cosine similarity from 67% to 0% (ImageNet, Table 4)",
        seen="on digits: " + without_norm_weights(models, PRINTED),
        reading=without_norm_weights(models, READING),
        agrees=NOT_TESTABLE,
    )
    for paper in (
        "For CIFAR100, sharpening does improve test accuracy, but as model depth is increased, smoothing improves it even "
        "more (Fig. 5)",
        "For ImageNet both sharpening and smoothing models have lower test accuracy than the original model: -2.6% "
        "(sharpening) and -0.6% (smoothing)",
    ):
        yield Claim(
            paper=paper,
            seen="accuracy on digits: " + accuracies(models, PRINTED, depths),
            reading=accuracies(models, READING, depths),
            agrees=NOT_TESTABLE,
        )
    if len(depths) == 1:
        return
    yield Claim(
        paper="Does the sharpening model sharpen at other depths, too?",
        seen="; ".join(f"depth {depth}: {shares('sharpening', PRINTED, depth=depth)}" for depth in depths),
        reading="; ".join(f"depth {depth}: {shares('sharpening', READING, depth=depth)}" for depth in depths),
        agrees=OURS,
    )


def claims_of_text(models: Models, depth: int) -> Iterator[Claim]:
    of_text: dict[str, Any] = {"depth": depth, "data": "text"}
    guess = most_frequent_share()
    has_learnt = all(models.accuracy(kind, **of_text).is_above(guess) for kind in KINDS)
    smooth, original = (
        {measure: models.end(kind, measure, **of_text) for measure in MEASURES} for kind in ("smoothing", "original")
    )
    yield Claim(
        paper="In between these extremes is The Pile, where the smoothing model seems to predictably reduce the HFC/LFC and "
        "effective rank, compared to the original model",
        seen=f"after the last block HFC/LFC is {smooth['hfc_lfc']} against {original['hfc_lfc']}, effective rank "
        f"{smooth['effective_rank']} against {original['effective_rank']}",
        agrees=verdict(*(smooth[measure].is_below(original[measure]) for measure in ("hfc_lfc", "effective_rank")))
        if has_learnt
        else NOT_TESTABLE,
    )
    yield Claim(
        paper="However, the smoothing model has less overall smoothing than the base model, as defined by cosine similarity",
        seen=f"cosine similarity after the last block is {smooth['cosine_similarity']} against "
        f"{original['cosine_similarity']}",
        agrees=verdict(smooth["cosine_similarity"].is_below(original["cosine_similarity"]))
        if has_learnt
        else NOT_TESTABLE,
    )
    vision, text = models.negative_share(), models.negative_share(**of_text)
    yield Claim(
        paper="Vision models have distributions [of the eigenvalues of H] skewing to the negatives; Language models have "
        "symmetrically distributed eigenvalues (Fig. 10)",
        seen=f"fraction with a negative real part: {vision} in vision transformers, {text} in text encoders",
        agrees=verdict(vision.is_above(0.5), not text.is_above(0.5) and not text.is_below(0.5)),
    )


def most_frequent_share() -> float:
    """How many bytes of the text a guess of the most frequent one fills in."""
    text = standard_library_text()
    return text.bincount().max().item() / len(text)


def without_norm_weights(models: Models, projection: Projection) -> str:
    return ", ".join(
        f"{models.share('sharpening', measure, projection)} to "
        f"{models.share('sharpening', measure, projection, norm_affine=False)}"
        for measure in ("hfc_lfc", "cosine_similarity")
    )


def ends_of(models: Models, projection: Projection) -> str:
    return "; ".join(
        f"{title} " + ", ".join(str(models.end(kind, measure, projection)) for kind in BY_SMOOTHNESS)
        for measure, title in TITLES.items()
    )


BY_SMOOTHNESS: tuple[Kind, ...] = ("smoothing", "original", "sharpening")
SIGNS = {"hfc_lfc": 1, "cosine_similarity": -1, "effective_rank": 1}
"""1: a larger value is less smooth."""


def smooths_and_sharpens(models: Models) -> Iterator[bool]:
    """By each measure, whether the smoothing model ends smoother than the original, and the sharpening one less smooth."""
    for measure, sign in SIGNS.items():
        smooth, original, sharp = (models.end(kind, measure) for kind in BY_SMOOTHNESS)
        yield smooth.is_below(original) if sign > 0 else smooth.is_above(original)
        yield sharp.is_above(original) if sign > 0 else sharp.is_below(original)


def accuracies(models: Models, projection: Projection, depths: Sequence[int]) -> str:
    return "; ".join(
        f"depth {depth}: " + ", ".join(f"{kind} {models.accuracy(kind, projection, depth=depth)}" for kind in KINDS)
        for depth in depths
    )


def depth_plot(models: Models) -> Plot:
    figure, axes = panels(*TITLES.values(), x="block")
    for panel, measure in zip(axes, MEASURES, strict=True):
        for colour, kind in zip(COLOURS, KINDS, strict=False):
            for projection, style in ((PRINTED, "-"), (READING, "--")):
                if kind == "original" and projection == READING:
                    continue
                curves = [one.curves[measure] for one in models.over_seeds(kind, projection)]
                name = kind if kind == "original" else f"{kind}, {projection}"
                panel.plot(np.mean(curves, axis=0), color=colour, linestyle=style, label=name)
    legend_beside(figure, axes[1])
    return Plot(
        figure=figure,
        caption="Trained vision transformers, measured at the input and behind each block (Fig. 3), mean over seeds. Low on "
        "the left and right, high in the middle is smooth.",
    )


def eigenvalue_plot(models: Models, text_depth: int) -> Plot:
    figure, axes = panels("Vision transformers", "Text encoders", x="real part of an eigenvalue of H")
    of_text: dict[str, Any] = {"depth": text_depth, "data": "text"}
    for panel, rules in zip(axes, ({}, of_text), strict=True):
        values = np.concatenate([one.eigenvalues for one in models.over_seeds("original", **rules)])
        panel.hist(values, bins=60)
        panel.axvline(0, color="black", linewidth=0.8)
    return Plot(
        figure=figure,
        caption="Eigenvalues of H = W_V W_proj of all heads, layers and seeds of the original models (Fig. 10).",
    )


def share_tables(models: Models) -> Iterator[Table]:
    columns: list[tuple[str, Kind, Projection, bool]] = [
        (
            f"{kind}{'' if kind == 'original' else f', {projection}'}{'' if affine else ', no LN weights'}",
            kind,
            projection,
            affine,
        )
        for affine in (True, False)
        for kind in KINDS
        for projection in ((PRINTED,) if kind == "original" else (PRINTED, READING))
    ]
    for number, (measure, title) in enumerate(TITLES.items(), start=1):
        yield Table(
            title=f"Table {number}: fraction of layers that raise the {title} (in brackets: ViT-Ti on CIFAR-100)",
            columns=("sub-layer", *(name for name, *_ in columns)),
            rows=[
                (
                    sublayer,
                    *(
                        f"{models.share(kind, measure, projection, sublayer=sublayer, norm_affine=affine)}"
                        + (
                            f" ({PAPER[measure][sublayer][KINDS.index(kind)]:.3f})"
                            if affine and projection == PRINTED
                            else ""
                        )
                        for _, kind, projection, affine in columns
                    ),
                )
                for sublayer in SUBLAYERS
            ],
        )


def text_table(models: Models, depth: int) -> Table:
    return Table(
        title="Text encoders: fraction of layers that raise each measure (in brackets: Crammed BERT on The Pile)",
        columns=("measure", "sub-layer", *KINDS),
        rows=[
            (
                f"bytes filled in correctly (a guess: {most_frequent_share():.3f})",
                "",
                *(str(models.accuracy(kind, depth=depth, data="text")) for kind in KINDS),
            ),
            *(
                (
                    title,
                    sublayer,
                    *(
                        f"{models.share(kind, measure, sublayer=sublayer, depth=depth, data='text')} ({of_paper:.3f})"
                        for kind, of_paper in zip(KINDS, PAPER_TEXT[measure][sublayer], strict=True)
                    ),
                )
                for measure, title in TITLES.items()
                for sublayer in SUBLAYERS
            ),
        ],
    )


def accuracy_table(models: Models, depths: Sequence[int]) -> Table:
    return Table(
        title="Accuracy on digits that were not trained on",
        columns=("depth", "original", *(f"{kind}, {p}" for kind in KINDS[1:] for p in (PRINTED, READING))),
        rows=[
            (
                depth,
                str(models.accuracy("original", depth=depth)),
                *(str(models.accuracy(kind, p, depth=depth)) for kind in KINDS[1:] for p in (PRINTED, READING)),
            )
            for depth in depths
        ],
    )
