"""How the norm of the parameters grows while small language models train, and how near to saturation that brings them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tsemon.lab.reproduce.growth import (
    BLOCKS,
    DECAYED,
    QUICK,
    SCALE,
    SCHEDULES,
    Fits,
    Grown,
    Sizes,
    grown,
    layer_slopes,
)
from tsemon.lab.reproduce.observing import Values
from tsemon.lab.reproduce.plotting import COLOURS, panels
from tsemon.lab.reproduce.result import Claim, Experiment, Plot, Result, Table, verdict

EXPERIMENT = Experiment(
    name="norm-growth",
    title="Growth of the parameter norm, and saturation",
    source="Effects of Parameter Norm Growth During Transformer Training (arXiv 2010.09697), Figures 1, 2, 3, 5 and 6",
)


def run(quick: bool) -> Result:
    sizes = QUICK if quick else Sizes()
    runs = {(block, s.name): grown(block, s, sizes) for block in BLOCKS for s in SCHEDULES}
    decayed = grown("pre-norm", DECAYED, sizes)
    return Result(
        settings=settings(sizes),
        claims=claims(sizes, runs, decayed),
        plots={"norm": norm_plot(runs, decayed), "dynamics": dynamics_plot(runs), "saturation": saturation_plot(runs)},
        tables=[fits_table(runs, decayed), dynamics_table(sizes, runs), attended_table(runs)],
        notes=NOTES,
    )


def claims(sizes: Sizes, runs: Mapping[tuple[str, str], Grown], decayed: Grown) -> list[Claim]:
    fits = {key: Fits.of(*run.norms) for key, run in runs.items()}
    held = [fit for (_, schedule), fit in fits.items() if schedule == "constant"]
    falling = [fit for (_, schedule), fit in fits.items() if schedule == "inverse sqrt"]
    high = [fit for fit in fits.values() if fit.sqrt_r2 > 0.95]
    growth = {key: run.norms[1][-1] / run.norms[1][0] for key, run in runs.items()}
    alignment = {key: run.series("update_alignment") for key, run in runs.items()}
    peaks = {key: steps[values.argmax()] for key, (steps, values) in alignment.items()}
    cosines = [run.checkpoint_cosines[1] for run in runs.values()]
    slopes = {block: layer_slopes(runs[block, "constant"]) for block in BLOCKS}
    steps = [run.series("step_size")[1] for (_, schedule), run in runs.items() if schedule == "inverse sqrt"]
    ratios = [values[-10:].mean() / values[len(values) // 2 :][:10].mean() for values in steps]
    trained = {block: runs[block, "constant"].saturation for block in BLOCKS}
    attended = np.concatenate([run.attended.ravel() for run in runs.values()])
    uniform = (sizes.context + 1) / 2
    return [
        Claim(
            paper="The norm of the parameters grows during training, in every model",
            seen=f"it grows by factors of {min(growth.values()):.2f} to {max(growth.values()):.2f}",
            agrees=verdict(*(factor > 1 for factor in growth.values())),
        ),
        Claim(
            paper="It grows in proportion to sqrt(t), with r2 = 1.00 (T5, learning rate 1 / sqrt(t))",
            seen="with this schedule the exponent of growth in the second half of the steps is "
            f"{span(fit.exponent for fit in falling)}; r2 of a line in sqrt(t) is "
            f"{span(fit.sqrt_r2 for fit in falling)}, of a line in t {span(fit.linear_r2 for fit in falling)}",
            agrees=verdict(
                all(map(is_square_root, falling)), all(fit.sqrt_r2 > max(0.99, fit.linear_r2) for fit in falling)
            ),
        ),
        Claim(
            paper="The trend depends on the schedule of the learning rate (expected in Section 4)",
            seen=f"with a constant rate the exponent is {span(fit.exponent for fit in held)}, with the falling "
            f"one {span(fit.exponent for fit in falling)}",
            agrees=verdict(min(fit.exponent for fit in held) > max(fit.exponent for fit in falling)),
        ),
        Claim(
            paper="A high r2 of the fit to sqrt(t) shows that growth is in proportion to sqrt(t) (implied)",
            seen=f"of {len(high)} runs with an r2 above 0.95 {sum(map(is_square_root, high))} have an exponent within 0.15 "
            f"of 1/2; with a constant rate r2 is {span(fit.sqrt_r2 for fit in held)}, of a line in t "
            f"{span(fit.linear_r2 for fit in held)}",
            agrees=verdict(bool(high) and all(map(is_square_root, high))),
        ),
        Claim(
            paper="Generally, the norm grows faster in later layers than in earlier ones",
            seen="slopes by layer, per sqrt(step), constant rate: "
            + "; ".join(f"{block} {', '.join(f'{slope:.3f}' for slope in of)}" for block, of in slopes.items()),
            agrees=verdict(*(of[len(of) // 2 :].mean() > of[: len(of) // 2].mean() for of in slopes.values())),
        ),
        Claim(
            paper="The cosine of a step with the parameters rises quickly to about 0.15, then decays to nearly 0",
            seen=f"it is largest at steps {min(peaks.values()):g} to {max(peaks.values()):g}, with "
            f"{span(values.max() for _, values in alignment.values())}, and ends at "
            f"{span(values[-1] for _, values in alignment.values())}",
            agrees=verdict(
                max(peaks.values()) < sizes.num_steps / 4,
                all(values[-1] < values.max() / 2 for _, values in alignment.values()),
            ),
        ),
        Claim(
            paper="With a rate of 1 / sqrt(t) the size of steps stays about constant for large t (Assumption 1)",
            seen=f"the last steps are {span(ratios)} times as large as those at half the training",
            agrees=verdict(all(abs(ratio - 1) < 0.1 for ratio in ratios)),
        ),
        Claim(
            paper="The cosine of parameters at one checkpoint with those at the one before approaches 1",
            seen=f"{sizes.checkpoint_every} steps apart it lacks {span(1 - values[0] for values in cosines)} at first and "
            f"{span(1 - values[-1] for values in cosines)} at the end",
            agrees=verdict(*(values[-1] > values[0] for values in cosines)),
        ),
        Claim(
            paper="Randomly initialised transformers are not saturated (similarity about 0)",
            seen="mean over layers at the start: "
            + "; ".join(f"{block} {start[1:].mean():.2f}" for block, (start, _) in trained.items()),
            agrees=verdict(*(start[1:].mean() < 0.2 for start, _ in trained.values())),
        ),
        Claim(
            paper="Small transformers reach a saturation of 1.00",
            seen="last layer after training: "
            + "; ".join(f"{block} {end[-1]:.3f}" for block, (_, end) in trained.items()),
            agrees=verdict(*(end[-1] > 0.98 for _, end in trained.values())),
        ),
        Claim(
            paper="Heads of the saturated network attend to 1 position (argmax) or to half of the sequence (mean)",
            seen=f"{np.mean(attended < 1.5):.0%} of {len(attended)} heads attend to fewer than 1.5 positions and "
            f"{np.mean(attended > 0.8 * uniform):.0%} to more than {0.8 * uniform:.0f}, where the mean of all visible "
            f"positions would be {uniform:g}",
            agrees=verdict(bool((attended < 1.5).any()), bool((attended > 0.8 * uniform).any())),
        ),
        Claim(
            paper="Too much weight decay prevents the growth, the usual 0.01 does not",
            seen="pre-norm, constant rate: the norm grows by a factor of "
            f"{growth['pre-norm', 'constant']:.3f} with 0.01 and of "
            f"{decayed.norms[1][-1] / decayed.norms[1][0]:.3f} with {DECAYED.weight_decay:g}",
            agrees=verdict(growth["pre-norm", "constant"] > 1, decayed.norms[1][-1] < decayed.norms[1][0]),
        ),
    ]


def is_square_root(fit: Fits) -> bool:
    return abs(fit.exponent - 0.5) < 0.15


def span(values: Iterable[float]) -> str:
    found = list(values)
    return f"{min(found):.3g} to {max(found):.3g}"


Curve = tuple[Values, Values]


def drawn(panel: Axes, runs: Mapping[tuple[str, str], Grown], curve: Callable[[Grown], Curve]) -> None:
    for (block, schedule), run in runs.items():
        style = "-" if schedule == "constant" else "--"
        colour = COLOURS[list(BLOCKS).index(block)]
        panel.plot(*curve(run), style, color=colour, label=f"{block}, {schedule}")
    panel.set_xlabel("step")


def grown_since_start(steps: Values, norms: Values) -> Curve:
    return np.sqrt(steps), norms - norms[0]


def norm_plot(runs: Mapping[tuple[str, str], Grown], decayed: Grown) -> Plot:
    figure, (norm, layers, decay) = panels(
        "growth of the norm since step 0", "by layer: pre-norm, inverse sqrt", "weight decay: pre-norm, constant rate"
    )
    drawn(norm, runs, lambda run: grown_since_start(*run.norms))
    run = runs["pre-norm", "inverse sqrt"]
    for layer in range(len(run.training.recording.frames[0].layers["param_norm"])):
        layers.plot(*grown_since_start(*run.series("param_norm", layer)), label=f"layer {layer + 1}")
    decay.plot(*runs["pre-norm", "constant"].norms, label="0.01")
    decay.plot(*decayed.norms, label=f"{DECAYED.weight_decay:g}")
    for panel, x, y in ((norm, "sqrt(step)", "|w_t| - |w_0|"), (layers, "sqrt(step)", ""), (decay, "step", "|w_t|")):
        panel.set(xlabel=x, ylabel=y)
        panel.legend(fontsize=7)
    return Plot(
        figure=figure,
        caption="Growth in proportion to sqrt(step) is a straight line on the left and in the middle; faster growth bends "
        "upwards.",
    )


def dynamics_plot(runs: Mapping[tuple[str, str], Grown]) -> Plot:
    figure, axes = panels("cosine of a step with the parameters", "size of a step", "cosine with the checkpoint before")
    drawn(axes[0], runs, lambda run: run.series("update_alignment"))
    drawn(axes[1], runs, lambda run: run.series("step_size"))
    drawn(axes[2], runs, lambda run: run.checkpoint_cosines)
    axes[1].set_yscale("log")
    axes[1].set_ylabel("norm")
    axes[0].legend(fontsize=7)
    return Plot(
        figure=figure,
        caption="A cosine near 0 on the left is a step at right angles to the parameters; one near 1 on the right is a "
        "direction that has settled.",
    )


def saturation_plot(runs: Mapping[tuple[str, str], Grown]) -> Plot:
    figure, (start, end) = panels("saturation at random initial weights", "after training, constant rate")
    for block in BLOCKS:
        for panel, values in zip((start, end), runs[block, "constant"].saturation, strict=True):
            panel.plot(np.arange(1, len(values)), values[1:], "o-", label=block)
            panel.set(xlabel="layer", ylabel="cosine with the scaled network", ylim=(-0.1, 1.05))
            panel.set_xticks(range(1, len(values)))
    end.legend(fontsize=8)
    return Plot(
        figure=figure,
        caption="At 1 the scaled network gives the same direction. What training adds is the difference between the two "
        "panels.",
    )


def fits_table(runs: Mapping[tuple[str, str], Grown], decayed: Grown) -> Table:
    rows: list[Sequence[float | str]] = []
    for (block, schedule), run in {**runs, ("pre-norm", DECAYED.name): decayed}.items():
        fit, (_, norms) = Fits.of(*run.norms), run.norms
        metric = float(run.series("norm_growth_exponent")[1][-1])
        start, end = float(norms[0]), float(norms[-1])
        rows.append(
            (block, schedule, run.training.mean_loss(50), start, end, fit.sqrt_r2, fit.linear_r2, fit.exponent, metric)
        )
    columns = ("block", "learning rate", "loss, last 50 steps", "norm, start", "end", "r2 of sqrt(t)", "r2 of t")
    return Table(
        title="Growth of the norm",
        columns=(*columns, "exponent of growth, second half", "over all steps, as tsemon reports it"),
        rows=rows,
    )


def dynamics_table(sizes: Sizes, runs: Mapping[tuple[str, str], Grown]) -> Table:
    rows: list[Sequence[float | str]] = []
    for (block, schedule), run in runs.items():
        alignment, step = (run.series(metric)[1] for metric in ("update_alignment", "step_size"))
        cosine = run.checkpoint_cosines[1]
        start, end = run.saturation
        rows.append(
            (
                *(block, schedule, float(alignment.max()), float(alignment[-1]), float(step[0]), float(step[-1])),
                *(float(1 - cosine[-1]), listed(layer_slopes(run)), listed(start[1:]), listed(end[1:])),
            )
        )
    columns = ("block", "learning rate", "largest alignment", "last", "first step size", "last")
    return Table(
        title="Steps, direction and saturation",
        columns=(
            *columns,
            f"1 - cosine, {sizes.checkpoint_every} steps apart, last",
            "slope per sqrt(step), by layer",
            "saturation at the start, by layer",
            "at the end",
        ),
        rows=rows,
    )


def attended_table(runs: Mapping[tuple[str, str], Grown]) -> Table:
    return Table(
        title="Positions attended",
        columns=("block", "learning rate", f"parameters times {SCALE:g}, by head", "as they are, by head"),
        rows=[
            (block, schedule, listed(run.attended.ravel(), 1), listed(run.attended_unscaled.ravel(), 1))
            for (block, schedule), run in runs.items()
        ],
    )


def listed(values: Values, digits: int = 3) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def settings(sizes: Sizes) -> dict[str, Any]:
    return {
        "models": f"depth {sizes.depth}, width {sizes.width}, {sizes.heads} heads, FFN {sizes.ffn}, ReLU, no dropout, "
        "PyTorch's initial weights; pre-norm, post-norm, and branch norm with unscaled scores, the block of its authors' "
        "code (Definition 4 of the paper scales them; the paper: depth 12, width 768, 12 heads, FFN 512; and T5-base)",
        "data": f"bytes of the standard library's sources, batches of {sizes.batch} x {sizes.context} (the paper: words of "
        "WikiText-2 and Penn Treebank; C4)",
        "optimizer": f"AdamW, learning rate {sizes.learning_rate:g}; constant with weight decay 0.01, or T5's schedule, "
        f"1 / sqrt(max(t, {sizes.hold})), without weight decay",
        "steps": f"{sizes.num_steps}, every {sizes.every}th measured; checkpoints {sizes.checkpoint_every} steps apart",
        "norms": "of all parameters but embeddings and scalars; saturation at c = 1024, positions attended at c = 1000, of "
        "weights above 1e-5",
        "seeds and dtype": "seed 0 for weights and batches, the same batches for all; float32",
    }


NOTES = (
    "r2 alone proves little: all smooth growth is nearly a straight line in sqrt(t) over a short range. So the r2 of a "
    "line in t stands beside it, and the exponent p of |w_t| - |w_0| = c t^p beside both.",
    "AdamW's steps follow the learning rate, not the norm; T5 was trained with AdaFactor, whose steps scale with the "
    "parameters.",
    "The branch norm block's residual stream is 1-homogeneous in the parameters by construction and needs no training to "
    "be saturated: saturation is comparable within one architecture only, and says little of training there.",
    "No two modes of heads are promised. Scores grow with the fourth power of c, and ties are rare in real numbers, so "
    "that a head of the scaled network is expected to pick one position. The authors' code multiplies masked scores by "
    "0 and not by minus infinity, so that future positions keep a score of 0 and may win; here they never do. Their second "
    "mode at 41 of 83 positions may come from that: 41 is the mean number of future positions, uniform causal "
    "attention has 42.",
)
