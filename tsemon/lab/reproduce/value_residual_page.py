"""What the value rules' training shows: claims, figures and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from tsemon.catalogue import LAYERED
from tsemon.lab.reproduce.observing import Frame, Values
from tsemon.lab.reproduce.plotting import legend_beside, panels
from tsemon.lab.reproduce.result import Claim, Plot, Result, Table, verdict
from tsemon.lab.reproduce.value_rules import LAMBDAS, MEASURES, Sizes, Trained
from tsemon.measures import importance_entropy

NAMES = {"neutreno": "NeuTRENO", "denseformer": "DenseFormer"}
"""As the paper has them, of the rules that ResFormer is compared with."""


def result(trained: Mapping[str, Trained], sizes: Sizes, data: str) -> Result:
    context = sizes.model["context"]
    return Result(
        settings={
            "models": f"{sizes.size} with {dict(sizes.model)}; {', '.join(sizes.rules)}",
            "models that stop early": f"{', '.join(sizes.short_rules) or 'none'}, after {sizes.short_steps} steps",
            "data": f"{data}; BOS in front of each sequence, the last 5 % to validate; the paper: 20B tokens of SlimPajama",
            "optimiser": f"AdamW (0.9, 0.95), weight decay 0.1, clip 1, lr {sizes.learning_rate:g}, {sizes.warmup} steps "
            f"of warm-up, then a cosine to 10 % at step {sizes.steps}; the paper: 10,000 steps of 2M tokens",
            "batch": f"{sizes.batch_size} x {context} tokens, random windows of the text, the same for all models",
            "dtype": str(sizes.precision).removeprefix("torch."),
            "seeds": "weights 0, batches 0, validation 1; all models start from the same weights",
            "relative loss": f"mean of the last {sizes.window} steps, less the vanilla model's",
        },
        claims=[*claims_of_loss(trained, sizes), *claims_of_attention(trained, context), *claims_of_values(trained)],
        plots={
            "loss": loss_plot(trained, sizes.window),
            "attention": attention_plot(trained, context),
            "values": value_plot(trained),
        },
        tables=[loss_table(trained, sizes.window), *layer_tables(trained, context)],
        notes=NOTES,
    )


NOTES = (
    "Importance entropy (Eq. 11) is that of what a token receives, the mean over queries; the formula as printed sums over "
    "keys and is the same for every token. Low is concentrated, as the figures have it; the text says the contrary. Under "
    "a causal mask even uniform attention stays below log T: that, not log T, is the baseline in the figure.",
    "NeuTRENO's lambda is 0.4, as in the paper's Appendix A.3. DenseFormer is the depth-weighted average of its own paper.",
    "The values in the figures are those that attention mixes: in ResFormer the mean of V_n and V_1. Their largest "
    "eigenvalue is that of one sequence; the first layer's spectrum is a mean over the validation sequences.",
    "Attention sinks, the drain of the first token's value and the peak of its hidden state come late in training. A run "
    "of this length shows at the most how they begin.",
)


def smoothed(loss: Values, window: int) -> Values:
    """Mean of each step and those before it, from step `window` on."""
    return np.convolve(loss, np.full(window, 1 / window), mode="valid")


def relative(trained: Mapping[str, Trained], rule: str, window: int) -> Values:
    """Smoothed loss less the vanilla model's, from step `window` on."""
    loss, vanilla = (smoothed(trained[name].loss, window) for name in (rule, "vanilla"))
    return loss - vanilla[: len(loss)]


def claims_of_loss(trained: Mapping[str, Trained], sizes: Sizes) -> Iterator[Claim]:
    curves = {rule: relative(trained, rule, sizes.window) for rule in trained}
    last = {rule: float(curve[-1]) for rule, curve in curves.items()}
    yield Claim(
        paper="ResFormer consistently outperforms the vanilla Transformer throughout training (Fig. 7)",
        seen=f"loss {last['resformer']:+.3f} against vanilla at the end; below it in "
        f"{np.mean(curves['resformer'] < 0):.0%} of the steps",
        agrees=verdict(last["resformer"] < 0, bool((curves["resformer"] < 0).all())),
    )
    if others := [rule for rule in NAMES if rule in last]:
        yield Claim(
            paper=f"ResFormer outperforms {' and '.join(NAMES[rule] for rule in others)} (Fig. 7, right)",
            seen=f"ResFormer {last['resformer']:+.3f}, " + ", ".join(f"{rule} {last[rule]:+.3f}" for rule in others),
            agrees=verdict(*(last["resformer"] < last[rule] for rule in others)),
        )
    yield claim_of_svformer(curves["svformer"], sizes.window)
    if sizes.short_rules:
        yield from claims_of_short(curves, sizes)


def claims_of_short(curves: Mapping[str, Values], sizes: Sizes) -> Iterator[Claim]:
    at = {rule: float(curves[rule][sizes.short_steps - sizes.window]) for rule in ("resformer", *sizes.short_rules)}
    against = f"against vanilla at step {sizes.short_steps}"
    if LAMBDAS.keys() <= at.keys():
        best = at["lambda 2"]
        yield Claim(
            paper="Of the variants A_n (V_n + lambda V_1), lambda = 2 is best (Fig. 8)",
            seen=", ".join(f"{rule} {at[rule]:+.3f}" for rule in LAMBDAS) + f", Eq. 7 {at['resformer']:+.3f} {against}",
            agrees=verdict(*(best < at[rule] for rule in (*LAMBDAS, "resformer") if rule != "lambda 2")),
        )
    if "cross-layer" in at:
        yield Claim(
            paper="ResFormer ends lower than cross-layer attention, which it approximates (Fig. 10)",
            seen=f"cross-layer {at['cross-layer']:+.3f}, ResFormer {at['resformer']:+.3f} {against}",
            agrees=verdict(at["resformer"] < at["cross-layer"]),
        )


def claim_of_svformer(curve: Values, window: int) -> Claim:
    early, at = curve[: max(1, len(curve) // 5)].mean(), overtaken(curve)
    return Claim(
        paper="SVFormer learns faster than vanilla at first, and is gradually surpassed (Fig. 14)",
        seen=f"{early:+.3f} over the first fifth of the steps, {curve.min():+.3f} at best, {curve[-1]:+.3f} at the end; "
        + ("not surpassed in this run" if at is None else f"surpassed from step {at + window} on"),
        agrees=verdict(bool(early < 0), at is not None),
    )


def overtaken(curve: Values) -> int | None:
    """Where the curve comes above 0 and stays there; None where it ends below, or was never below."""
    below = np.flatnonzero(curve <= 0)
    return int(below[-1]) + 1 if curve[-1] > 0 and len(below) else None


def claims_of_attention(trained: Mapping[str, Trained], context: int) -> Iterator[Claim]:
    vanilla, resformer = trained["vanilla"], trained["resformer"]
    even, even_sink = uniform_entropy(context), uniform_sink_share(context)
    start, end, other = (entropy(frame, context) for frame in (vanilla.start, vanilla.end, resformer.end))
    similarity = vanilla.start.layers["token_similarity"]
    yield Claim(
        paper="A random model's tokens grow alike with depth, and its attention is not concentrated (Fig. 1, left)",
        seen=f"token similarity {similarity[0]:.2f} at the embeddings, {similarity[-1]:.2f} after the last block; "
        f"importance entropy {start.min():.3f} to {start.max():.3f}, uniform causal attention {even:.3f}",
        agrees=verdict(bool(similarity[-1] > 2 * similarity[0]), bool(np.abs(start - even).max() < 0.01)),
    )
    yield Claim(
        paper="Trained, vanilla attention concentrates in deep layers, ResFormer's less (Fig. 1, right)",
        seen=f"entropy {end.min():.3f} to {end.max():.3f} in vanilla layers, {other.min():.3f} to {other.max():.3f} in "
        f"ResFormer's; uniform {even:.3f}",
        agrees=verdict(
            bool(end[1:].min() < even - 0.05), bool(end[1:].min() < even - 0.05 and other.mean() > end.mean())
        ),
    )
    sink = vanilla.end.layers["sink_share"]
    yield Claim(
        paper="The first token becomes a sink of vanilla attention (Fig. 2)",
        seen=f"share {sink.min():.3f} to {sink.max():.3f} over layers; uniform causal attention gives {even_sink:.3f}",
        agrees=verdict(bool(sink.max() > 2 * even_sink)),
    )


def claims_of_values(trained: Mapping[str, Trained]) -> Iterator[Claim]:
    vanilla, resformer = trained["vanilla"].end.layers, trained["resformer"].end.layers
    drain, other = vanilla["first_value_norm_ratio"][1:], resformer["first_value_norm_ratio"][1:]
    yield Claim(
        paper="Beyond the first layer the first token's value is drained, less so in ResFormer (Fig. 2)",
        seen=f"|v_1| against the others', mean over deeper layers: vanilla {drain.mean():.2f}, ResFormer {other.mean():.2f}",
        agrees=verdict(bool(drain.mean() < 0.9), bool(other.mean() > drain.mean() + 0.05)),
    )
    peak, other = vanilla["first_hidden_norm_ratio"], resformer["first_hidden_norm_ratio"]
    yield Claim(
        paper="The first token's hidden state peaks, less so in ResFormer (Fig. 2)",
        seen=f"|h_1| against the others', largest over layers: vanilla {peak.max():.2f}, ResFormer {other.max():.2f}",
        agrees=verdict(bool(peak.max() > 3), bool(peak.max() > 3 and other.max() < peak.max())),
    )
    top, other = vanilla["value_top_eigenvalue"], resformer["value_top_eigenvalue"]
    yield Claim(
        paper="The values' largest eigenvalue is larger in most of ResFormer's layers (Fig. 12)",
        seen=f"larger in {(other > top).sum()} of {len(top)} layers",
        agrees=verdict(bool((other > top).mean() > 0.5)),
    )


def entropy(frame: Frame, context: int) -> Values:
    """Importance entropy of each layer in nats; the metric is a share of log T."""
    return frame.layers["importance_entropy"] * math.log(context)


def uniform_entropy(num_tokens: int) -> float:
    """Importance entropy of uniform causal attention, in nats."""
    rows = torch.ones(num_tokens, num_tokens, dtype=torch.float64).tril()
    return importance_entropy(rows / rows.sum(dim=1, keepdim=True)).item()


def uniform_sink_share(num_tokens: int) -> float:
    """Mean over rows 2 and on of 1 / row, the first token's share of uniform causal attention."""
    return float(np.mean(1 / np.arange(2, num_tokens + 1)))


def loss_plot(trained: Mapping[str, Trained], window: int) -> Plot:
    figure, (left, right) = panels("Training loss", "Training loss, less the vanilla model's", x="step")
    longest = len(smoothed(trained["vanilla"].loss, window))
    for rule in trained:
        loss = smoothed(trained[rule].loss, window)
        steps = np.arange(window, window + len(loss))
        style = "-" if len(loss) == longest else "--"
        left.plot(steps, loss, style, label=rule)
        right.plot(steps, relative(trained, rule, window), style, label=rule)
    for panel in (left, right):
        panel.set_ylabel(f"nats, mean of {window} steps")
    legend_beside(figure, left)
    return Plot(
        figure=figure,
        caption="Loss of models that see the same batches (Fig. 7): below 0 on the right, better than vanilla. Dashed: "
        "models that stop early.",
    )


def attention_plot(trained: Mapping[str, Trained], context: int) -> Plot:
    figure, axes = panels(
        "Token similarity at the start", "Importance entropy", "Attention to the first token", x="layer"
    )
    for rule in (rule for rule in trained if len(trained[rule].loss) == len(trained["vanilla"].loss)):
        start, end = trained[rule].start, trained[rule].end
        layers = np.arange(1, len(end.layers["sink_share"]) + 1)
        axes[0].plot(start.layers["token_similarity"], label=rule)
        axes[1].plot(layers, entropy(end, context), label=rule)
        axes[2].plot(layers, end.layers["sink_share"], label=rule)
    vanilla = entropy(trained["vanilla"].start, context)
    axes[1].plot(np.arange(1, len(vanilla) + 1), vanilla, "k:", label="vanilla at the start")
    axes[1].axhline(uniform_entropy(context), color="0.6", linestyle="--", label="uniform causal attention")
    axes[2].axhline(uniform_sink_share(context), color="0.6", linestyle="--", label="uniform causal attention")
    for panel, label in zip(axes, ("ratio", "nats", "share of rows 2 and on"), strict=True):
        panel.set_ylabel(label)
    legend_beside(figure, axes[1])
    return Plot(
        figure=figure,
        caption="How alike random models' tokens are (left, Fig. 1). What trained attention looks at (Fig. 1, 2): "
        "an entropy below the dashed line would be concentrated, a share above it a sink.",
    )


def value_plot(trained: Mapping[str, Trained]) -> Plot:
    figure, axes = panels(
        "First token's value", "First token's hidden state", "Values' top eigenvalue", "Values, layer 1", x="layer"
    )
    for rule in (rule for rule in trained if len(trained[rule].loss) == len(trained["vanilla"].loss)):
        end = trained[rule].end.layers
        layers = np.arange(1, len(end["first_value_norm_ratio"]) + 1)
        axes[0].plot(layers, end["first_value_norm_ratio"], label=rule)
        axes[1].plot(end["first_hidden_norm_ratio"], label=rule)
        axes[2].semilogy(layers, end["value_top_eigenvalue"], label=rule)
        axes[3].loglog(np.arange(1, len(trained[rule].spectrum) + 1), trained[rule].spectrum, label=rule)
    for panel in axes[:2]:
        panel.axhline(1, color="0.6", linestyle="--")
        panel.set_ylabel("length against the others'")
    for panel in axes[2:]:
        panel.set_ylabel("eigenvalue")
    axes[3].set_ylim(bottom=1e-5 * max(float(run.spectrum[0]) for run in trained.values()))
    axes[3].set_xlabel("rank")
    legend_beside(figure, axes[0])
    return Plot(
        figure=figure,
        caption="Trained models: a value below 1 on the left is a drain, a hidden state above 1 a peak (Fig. 2); largest "
        "eigenvalue of the values in each layer, and all of the first layer's (Fig. 12).",
    )


def loss_table(trained: Mapping[str, Trained], window: int) -> Table:
    val = trained["vanilla"].val_loss
    rows = [
        (
            *(rule, len(run.loss), float(smoothed(run.loss, window)[-1]), float(relative(trained, rule, window)[-1])),
            *((run.val_loss, run.val_loss - val) if len(run.loss) == len(trained["vanilla"].loss) else ("-", "-")),
        )
        for rule, run in trained.items()
    ]
    columns = ("model", "steps", "training loss", "less vanilla's", "validation loss", "less vanilla's")
    return Table(title="Loss, in nats", columns=columns, rows=rows)


def layer_tables(trained: Mapping[str, Trained], context: int) -> Iterator[Table]:
    """Each metric by layer, at the end and, in brackets, at the start."""
    for name in MEASURES:
        rows = []
        for rule, run in trained.items():
            start, end = (
                entropy(frame, context) if name == "importance_entropy" else frame.layers[name]
                for frame in (run.start, run.end)
            )
            rows.append((rule, *(f"{now:.3f} ({then:.3f})" for now, then in zip(end, start, strict=True))))
        num = len(rows[0]) - 1
        first = 0 if name in ("token_similarity", "first_hidden_norm_ratio") else 1
        yield Table(
            title=f"{LAYERED[name].title} (`{name}`{', in nats' if name == 'importance_entropy' else ''}), "
            "at the end (at the start)",
            columns=("layer", *(str(layer) for layer in range(first, first + num))),
            rows=rows,
        )
