"""A vision transformer of 80 blocks: does post-norm learn, and does its de-escalated twin?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tsemon.lab.reproduce.plotting import COLOURS, panels
from tsemon.lab.reproduce.result import Claim, Experiment, Plot, Result, Table, verdict
from tsemon.lab.reproduce.training import Training, train
from tsemon.lab.train import digits, image_batches
from tsemon.lab.train.images import Images
from tsemon.lab.train.schedules import constant
from tsemon.models import VisionTransformer

EXPERIMENT = Experiment(
    name="deep-vit",
    title="Training a vision transformer of 80 blocks",
    source="Classic Transformers (arXiv 2312.06182), Section 3.3 and Figure 6",
    num_seeds=3,
)
CHANCE = math.log(10)
"""Nats; of a model that gives each digit the same probability."""
LEARNT = CHANCE - 0.1
"""A mean training loss below this counts as learning."""
MEASURES = ("token_similarity", "token_diversity", "grad_norm")
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "post-norm": {"norm": "post"},
    "pre-norm": {"norm": "pre"},
    "de-escalated": {"tau": 1.0},
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    preset: str = "digits-80"
    depth: int = 80
    learning_rates: tuple[float, float, float] = (5e-5, 1e-4, 1e-4)
    """In the order of the variants: the paper's."""
    warmup: int = 0
    batch: int = 16
    num_steps: int = 300
    num_xavier_steps: int = 30
    num_evaluations: int = 5
    every: int = 10

    @property
    def window(self) -> int:
        """The last sixth of the steps, over which a loss is averaged."""
        return self.num_steps // 6


QUICK = Sizes(
    preset="digits-48",
    depth=40,
    learning_rates=(5e-4, 2e-3, 5e-4),
    warmup=20,
    num_steps=100,
    num_xavier_steps=6,
    num_evaluations=2,
)


def run(quick: bool, seed: int = 0) -> Result:
    sizes = QUICK if quick else Sizes()
    trainings = {name: trained(name, sizes, seed) for name in VARIANTS}
    short = replace(sizes, num_steps=sizes.num_xavier_steps, num_evaluations=1, every=5)
    xavier = {name: trained(name, short, seed, is_xavier=True) for name in ("post-norm", "de-escalated")}
    return Result(
        settings=settings(sizes),
        claims=claims(sizes, trainings, xavier),
        plots={"training": training_plot(trainings), "gradients": gradient_plot(trainings, xavier)},
        tables=[training_table(sizes, trainings), xavier_table(xavier)],
        notes=NOTES,
    )


def trained(name: str, sizes: Sizes, seed: int = 0, *, is_xavier: bool = False) -> Training:
    """All variants see the same batches; the post-norm and the de-escalated model start from the same weights."""
    data = digits()
    torch.manual_seed(seed)
    model = VisionTransformer.from_preset(sizes.preset, depth=sizes.depth, **VARIANTS[name])
    if is_xavier:
        start_from_xavier(model)
    lr = dict(zip(VARIANTS, sizes.learning_rates, strict=True))[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.1)
    return train(
        model,
        optimizer,
        image_batches(data.train_images, data.train_labels, sizes.batch, seed=seed),
        sizes.num_steps,
        every=sizes.every,
        measures=MEASURES,
        schedule=constant(optimizer, warmup=sizes.warmup),
        evaluate=lambda model: accuracy(model, data),
        evaluate_every=sizes.num_steps // sizes.num_evaluations,
    )


def accuracy(model: nn.Module, data: Images) -> float:
    """The share of the validation images that are told right."""
    return float((model(data.val_images).argmax(dim=1) == data.val_labels).float().mean())


def start_from_xavier(model: nn.Module) -> None:
    """Xavier's uniform weights, for the queries', keys' and values' matrices each on its own."""
    for weight in matrices(model):
        nn.init.xavier_uniform_(weight)


def matrices(model: nn.Module) -> Iterator[Tensor]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield from module.weight.detach().chunk(3 if name.endswith("to_query_key_value") else 1)


def settings(sizes: Sizes) -> dict[str, Any]:
    config = VisionTransformer.from_preset(sizes.preset, depth=1).config
    rates = ", ".join(f"{name} {lr:g}" for name, lr in zip(VARIANTS, sizes.learning_rates, strict=True))
    return {
        "model": f"depth {sizes.depth}, width {config.width}, {config.heads} heads, FFN {config.ffn}, GELU, class token "
        "(the paper: depth 80, width 192, 8 heads, FFN 384)",
        "de-escalation": "tau 1, at the end of each block",
        "data": "scikit-learn's digits, 16 x 16 pixels in patches of 4 x 4: 17 tokens; 1,437 images to train on, 360 to "
        "validate; no augmentation (the paper: CIFAR-10, 65 tokens, auto-augmentation)",
        "optimizer": f"AdamW, betas (0.9, 0.999), weight decay 0.1; learning rates {rates}, constant after "
        f"{sizes.warmup} steps of warm-up",
        "steps": f"{sizes.num_steps} with batches of {sizes.batch}, {sizes.num_xavier_steps} with Xavier's weights "
        "(the paper: 150 epochs, batches of 128, learning rates cut at 70 % and 90 %)",
        "dtype": "float32",
    }


def claims(sizes: Sizes, trainings: Mapping[str, Training], xavier: Mapping[str, Training]) -> list[Claim]:
    post, deescalated = trainings["post-norm"], trainings["de-escalated"]
    losses = {name: training.mean_loss(sizes.window) for name, training in trainings.items()}
    accuracies = {name: training.evaluations[1][-1] for name, training in trainings.items()}
    diversity = {name: last(training, "token_diversity") for name, training in trainings.items()}
    gradients = post.first_gradients
    started = xavier["de-escalated"].first_gradients
    explosion = {
        name: backward_growth(t) for name, t in {"PyTorch": deescalated, "Xavier": xavier["de-escalated"]}.items()
    }
    return [
        Claim(
            paper="There is a significant gap between the pure post-norm model and the de-escalated one",
            seen=f"mean loss of the last {sizes.window} steps {losses['post-norm']:.3f} against "
            f"{losses['de-escalated']:.3f} (chance is {CHANCE:.3f}), validation accuracy "
            f"{accuracies['post-norm']:.1%} against {accuracies['de-escalated']:.1%}",
            agrees=verdict(losses["post-norm"] > LEARNT, losses["de-escalated"] < LEARNT),
        ),
        Claim(
            paper="The pre-norm model learns too, and the de-escalated one has a slightly lower training loss",
            seen=f"pre-norm {losses['pre-norm']:.3f} ({accuracies['pre-norm']:.1%}), de-escalated "
            f"{losses['de-escalated']:.3f} ({accuracies['de-escalated']:.1%})",
            agrees=verdict(losses["pre-norm"] < LEARNT, losses["de-escalated"] < losses["pre-norm"]),
        ),
        Claim(
            paper="The post-norm model fails because the similarity of its tokens escalates",
            seen=f"token diversity after block {sizes.depth}: {diversity['post-norm'][0]:.1e} at the start and "
            f"{diversity['post-norm'][-1]:.1e} at the end of training",
            agrees=verdict(diversity["post-norm"][0] < 0.05, diversity["post-norm"][-1] < diversity["post-norm"][0]),
        ),
        Claim(
            paper="Gradients neither vanish nor explode in it, so they are not the reason (said of Figure 1)",
            seen=f"gradient norms of its blocks at step 0 are {gradients.min():.2f} to {gradients.max():.2f}",
            agrees=verdict(gradients.max() / gradients.min() < 10),
        ),
        Claim(
            paper="De-escalation removes the escalation",
            seen=f"token diversity after block {sizes.depth}, before the operator acts, is "
            f"{diversity['de-escalated'].min():.2f} or more at every sample",
            agrees=verdict(diversity["de-escalated"].min() > 0.5),
        ),
        Claim(
            paper="De-escalation makes a deep post-norm model trainable (how weights start is not said)",
            seen="going back through a block the gradient of the de-escalated model grows by a factor of "
            f"{explosion['PyTorch']:.3f} with PyTorch's initial weights and {explosion['Xavier']:.3f} with Xavier's: from "
            f"{started[-1]:.2g} in the last block to {started[0]:.2g} in "
            f"the first; after {sizes.num_xavier_steps} steps its loss is {xavier['de-escalated'].mean_loss(5):.2f}",
            agrees=verdict(explosion["PyTorch"] < 1.02, explosion["Xavier"] < 1.02),
        ),
    ]


def last(training: Training, metric: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The metric after the last block, over training."""
    return training.recording.series(metric, -1)[1]


def backward_growth(training: Training) -> float:
    """By what factor the gradient's norm grows from one block to the one before it, at step 0."""
    norms = training.first_gradients
    return float((norms[0] / norms[-1]) ** (1 / (len(norms) - 1)))


def training_plot(trainings: Mapping[str, Training]) -> Plot:
    figure, (loss, right, diversity) = panels("training loss", "validation accuracy", "token diversity, last block")
    for name, training in trainings.items():
        loss.plot(*training.smoothed(), label=name)
        right.plot(*training.evaluations, "o-", label=name)
        diversity.semilogy(*training.recording.series("token_diversity", -1), label=name)
    loss.axhline(CHANCE, color="grey", linestyle=":", label="chance")
    loss.set(xlabel="step", ylabel="nats, mean of 10 steps")
    right.set(xlabel="step", ylabel="share", ylim=(0, 1))
    diversity.set(xlabel="step", ylabel="t_div")
    figure.legend(*loss.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return Plot(
        figure=figure,
        caption="A model that learns leaves the dotted line of chance. The less t_div, the more alike are the tokens, from "
        "the first step on.",
    )


def gradient_plot(trainings: Mapping[str, Training], xavier: Mapping[str, Training]) -> Plot:
    figure, (default, started) = panels("gradient at step 0, PyTorch's weights", "the same, Xavier's weights")
    for panel, those in ((default, trainings), (started, xavier)):
        for name, training in those.items():
            norms = training.first_gradients
            colour = COLOURS[list(VARIANTS).index(name)]
            panel.semilogy(np.arange(1, len(norms) + 1), norms, label=name, color=colour)
        panel.set(xlabel="block", ylabel="norm of its parameters' gradient")
        panel.legend(fontsize=8)
    default.sharey(started)
    started.autoscale(axis="y")
    return Plot(
        figure=figure,
        caption="Each block's gradient before the first step. A curve that rises to the left explodes on its way back.",
    )


def training_table(sizes: Sizes, trainings: Mapping[str, Training]) -> Table:
    rows: list[Sequence[float | str]] = []
    for (name, training), lr in zip(trainings.items(), sizes.learning_rates, strict=True):
        windows = training.losses[: 6 * sizes.window].reshape(6, -1).mean(axis=1)
        ends = [training.recording.series(metric, -1)[1] for metric in ("token_similarity", "token_diversity")]
        rows.append(
            (
                *(name, lr, ", ".join(f"{loss:.3f}" for loss in windows)),
                *(f"{values[0]:.4g} to {values[-1]:.4g}" for values in ends),
                float(training.evaluations[1][-1]),
            )
        )
    return Table(
        title="Training",
        columns=(
            "model",
            "learning rate",
            "mean loss of each sixth of the steps",
            "t_sim of the last block, first to last sample",
            "t_div",
            "validation accuracy",
        ),
        rows=rows,
    )


def xavier_table(xavier: Mapping[str, Training]) -> Table:
    return Table(
        title="Xavier's weights",
        columns=("model", "gradient norm, first block", "last block", "t_div of the last block, step 0", "last loss"),
        rows=[
            [name, *t.first_gradients[[0, -1]].tolist(), f"{last(t, 'token_diversity')[0]:.2g}", float(t.losses[-1])]
            for name, t in xavier.items()
        ],
    )


NOTES = (
    "Figures of a de-escalated block are those before its operator: with tau = 1 nothing of the mean token is left after "
    "it, and its token similarity is zero whatever the block does.",
    "The head reads a class token. A head that reads the mean of all tokens gets nothing from a last block with tau = 1.",
    "Learning rates stay constant: the paper cuts them when most of its 150 epochs are over, here there are 3.",
    "The paper does not say how weights start: Xavier's are tried beside PyTorch's. A model may fail because its tokens "
    "become alike or because its gradient explodes: token similarity and gradients tell the two apart.",
)
