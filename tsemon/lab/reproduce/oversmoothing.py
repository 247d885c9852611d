"""Models that are made to sharpen or to smooth: trained ones, repeating ones, and what the theory says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tsemon.catalogue import OVERSMOOTHING
from tsemon.lab.reproduce.oversmoothing_repeating import (
    REPEATING,
    claims_of_repetition,
    repeating_curves,
    repeating_plot,
)
from tsemon.lab.reproduce.oversmoothing_theory import DOUBLINGS, claims_of_theory, pair_table, random_pairs
from tsemon.lab.reproduce.oversmoothing_training import KINDS, MEASURES, SUBLAYERS, Sizes, Trained, measured, train
from tsemon.lab.reproduce.plotting import COLOURS, legend_beside, panels
from tsemon.lab.reproduce.result import Claim, Experiment, Plot, Result, Table, verdict
from tsemon.lab.train.images import digits
from tsemon.models import ReparameterisationConfig, ReparameterisedAttention

EXPERIMENT = Experiment(
    name="oversmoothing",
    title="Models that sharpen and models that smooth",
    source=f"{OVERSMOOTHING}, Theorem 3, Tables 1 to 4, Figures 3 to 6",
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


FULL = Sizes()
QUICK = Sizes(width=48, steps=100, num_pairs=23, repeating_seeds=5)


def run(quick: bool) -> Result:
    sizes = QUICK if quick else FULL
    data = digits()
    trained, plain = (
        {
            name: measured(train(kind, data, sizes, norm_affine=norm_affine), data.val_images, data.val_labels)
            for name, kind in KINDS.items()
        }
        for norm_affine in (True, False)
    )
    pairs = random_pairs(sizes.num_pairs)
    repeating = repeating_curves(sizes.repeating_seeds)
    return Result(
        settings={
            "vision transformers": f"pre-norm, depth {sizes.depth}, width {sizes.width}, 3 heads, MLP {4 * sizes.width}, 17 "
            "tokens; the paper's ViT-Ti: width 192, 65 tokens",
            "training": f"{sizes.steps} steps of {sizes.batch_size} digits, AdamW, lr 1e-3, weight decay 0.05, warm-up "
            f"{sizes.steps // 10} steps, cosine to 10 %, no augmentation; the paper: 300 epochs of CIFAR-100, lr 1.25e-4",
            "measured on": f"{len(data.val_images)} digits that were not trained on; means over digits",
            "repeating models": f"depth {REPEATING['depth']}, width {REPEATING['width']}, {REPEATING['num_tokens']} tokens "
            f"from N(0, 1), 8 sequences, geometric mean over {sizes.repeating_seeds} seeds; the paper does not tell them",
            "pairs": f"{sizes.num_pairs} A and H of each of nine kinds, 8 tokens, width 8, 2^{DOUBLINGS} layers, float64",
            "seeds": "0 for weights, batches and pairs",
            "dtype": "float32 but for the pairs",
        },
        claims=[*claims_of_training(trained, plain), *claims_of_repetition(repeating), *claims_of_theory(pairs)],
        plots={"depth": depth_plot(trained, plain), "repeating": repeating_plot(repeating)},
        tables=[*share_tables(trained, plain), pair_table(pairs)],
        notes=[*NOTES, stretch_note(sizes.width)],
    )


NOTES = (
    "A sub-layer raises a measure where its mean over digits is larger behind it than before. Attention and MLP are taken "
    "with their residual, as in Eq. 2; a LayerNorm, two in a block, is compared with its own input.",
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
        "layer of a sharpening model may well smooth."
    )


def claims_of_training(trained: Mapping[str, Trained], plain: Mapping[str, Trained]) -> Iterator[Claim]:
    sharp, smooth, original = (trained[name].shares for name in ("sharpening", "smoothing", "original"))
    at = [(name, "attention") for name in MEASURES]
    yield Claim(
        paper="Each attention layer of the sharpening model raises HFC/LFC and effective rank, none the cosine similarity "
        "(CIFAR-100: 1.000, 1.000, 0.000)",
        seen="shares {0:.3f}, {2:.3f}, {1:.3f}; of the original model {3:.3f}, {5:.3f}, {4:.3f}".format(
            *(sharp[key] for key in at), *(original[key] for key in at)
        ),
        agrees=verdict(
            sharp[at[0]] > 0.9 and sharp[at[1]] < 0.1 and sharp[at[2]] > 0.9,
            sharp[at[0]] > original[at[0]] and sharp[at[1]] < original[at[1]] and sharp[at[2]] > original[at[2]],
        ),
    )
    yield Claim(
        paper="Attention layers of the smoothing model do the opposite (0.083, 0.167, 1.000)",
        seen="shares {0:.3f}, {2:.3f}, {1:.3f}".format(*(smooth[key] for key in at)),
        agrees=verdict(smooth[at[0]] < 0.2, smooth[at[1]] > 0.8, smooth[at[2]] < 0.2),
    )
    last = {name: {measure: float(run.curves[measure][-1]) for measure in MEASURES} for name, run in trained.items()}
    signs = {"hfc_lfc": 1, "cosine_similarity": -1, "effective_rank": 1}
    yield Claim(
        paper="The smoothing model ends smoother than the original by all three measures, the sharpening one less smooth "
        "(CIFAR-100, Fig. 3)",
        seen="; ".join(
            f"{TITLES[name]} {last['smoothing'][name]:.2f}, {last['original'][name]:.2f}, {last['sharpening'][name]:.2f}"
            for name in MEASURES
        )
        + " (smoothing, original, sharpening)",
        agrees=verdict(
            all(sign * last["smoothing"][name] < sign * last["original"][name] for name, sign in signs.items()),
            all(sign * last["sharpening"][name] > sign * last["original"][name] for name, sign in signs.items()),
        ),
    )
    fixed = plain["sharpening"].shares
    yield Claim(
        paper="Without LayerNorm weights more of the sharpening model's attention layers raise HFC/LFC, fewer the cosine "
        "similarity (ImageNet: 0.333 to 1.000, 0.667 to 0.000; Table 4)",
        seen=f"{sharp[at[0]]:.3f} to {fixed[at[0]]:.3f}, {sharp[at[1]]:.3f} to {fixed[at[1]]:.3f}",
        agrees=verdict(fixed[at[0]] > sharp[at[0]], fixed[at[1]] < sharp[at[1]]),
    )
    yield from claims_of_accuracy(trained, plain)


def claims_of_accuracy(trained: Mapping[str, Trained], plain: Mapping[str, Trained]) -> Iterator[Claim]:
    original, sharp, smooth = (trained[name].accuracy for name in KINDS)
    seen = ", ".join(f"{name} {run.accuracy:.1%}" for name, run in trained.items())
    yield Claim(
        paper="More smoothing does not mean less accuracy: the smoothing model is better than the sharpening one",
        seen=f"{seen}; without LayerNorm weights {', '.join(f'{run.accuracy:.1%}' for run in plain.values())}",
        agrees=verdict(smooth > sharp),
    )
    yield Claim(
        paper="Both models beat the original on CIFAR-100 (Fig. 5)",
        seen=f"on digits: {seen}",
        agrees=verdict(sharp > original, smooth > original),
    )
    yield Claim(
        paper="Both models lose against the original on ImageNet",
        seen=f"on digits: {seen}",
        agrees=verdict(sharp < original, smooth < original),
    )


def depth_plot(trained: Mapping[str, Trained], plain: Mapping[str, Trained]) -> Plot:
    figure, axes = panels(*TITLES.values(), x="block")
    for panel, measure in zip(axes, MEASURES, strict=True):
        for colour, name in zip(COLOURS, trained, strict=False):
            panel.plot(trained[name].curves[measure], color=colour, label=name)
            panel.plot(plain[name].curves[measure], color=colour, linestyle="--", label=f"{name}, no LN weights")
    legend_beside(figure, axes[1])
    return Plot(
        figure=figure,
        caption="Trained vision transformers, measured at the input and behind each block (Fig. 3 and 6). Low on the left "
        "and right, high in the middle is smooth.",
    )


def share_tables(trained: Mapping[str, Trained], plain: Mapping[str, Trained]) -> Iterator[Table]:
    for number, name in enumerate(MEASURES, start=1):
        yield Table(
            title=f"Table {number}: share of layers that raise the {TITLES[name]} (in brackets: ViT-Ti on CIFAR-100)",
            columns=("sub-layer", *KINDS, *(f"{kind}, no LN weights" for kind in KINDS)),
            rows=[
                (
                    sublayer,
                    *(
                        f"{run.shares[name, sublayer]:.3f} ({paper:.3f})"
                        for run, paper in zip(trained.values(), PAPER[name][sublayer], strict=True)
                    ),
                    *(f"{run.shares[name, sublayer]:.3f}" for run in plain.values()),
                )
                for sublayer in SUBLAYERS
            ],
        )
