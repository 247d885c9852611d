"""What the value rules' training shows: claims, figures and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from tsemon.catalogue import LAYERED
from tsemon.lab.reproduce.observing import Frame, Values
from tsemon.lab.reproduce.plotting import legend_beside, panels
from tsemon.lab.reproduce.result import NOT_TESTABLE, OURS, Claim, Plot, Result, Spread, Table, verdict
from tsemon.lab.reproduce.value_rules import LAMBDAS, MEASURES, Runs, Sizes, Trained
from tsemon.measures import importance_entropy

NAMES = {"neutreno": "NeuTRENO", "denseformer": "DenseFormer"}
"""As the paper has them, of the rules that ResFormer is compared with."""


def result(runs: Runs, sizes: Sizes, data: str, others: Sequence[tuple[Sizes, Runs]] = ()) -> Result:
    """`others`: models of other sizes, vanilla and ResFormer alone."""
    context = sizes.model["context"]
    return Result(
        settings={
            "models": f"{sizes.size} with {dict(sizes.model)}; {', '.join(sizes.rules)}",
            "models that stop early": f"{', '.join(sizes.short_rules) or 'none'}, after {sizes.short_steps} steps",
            **{
                f"models of width {other.model['width']}": f"{', '.join(other.rules)}, {other.steps} steps"
                for other, _ in others
            },
            "data": f"{data}; BOS in front of each sequence, the last 5 % to validate; the paper: 20B tokens of SlimPajama",
            "optimizer": f"AdamW (0.9, 0.95), weight decay 0.1, clip 1, lr {sizes.learning_rate:g}, {sizes.warmup} steps "
            f"of warm-up, then a cosine to 10 % at step {sizes.steps}; the paper: 10,000 steps of 2M tokens",
            "batch": f"{sizes.batch_size} x {context} tokens, random windows of the text, the same for all models of a seed",
            "dtype": str(sizes.precision).removeprefix("torch."),
            "seeds": f"{len(sizes.seeds)} for weights and batches, from {sizes.seeds[0]} on; all models of a seed "
            "start from the same weights",
            "relative loss": f"mean of the last {sizes.window} steps, less the vanilla model's with the same seed",
        },
        claims=[
            *claims_of_loss(runs, sizes),
            *claims_of_size(runs, sizes, others),
            *claims_of_attention(runs, context),
            *claims_of_values(runs),
        ],
        plots={
            "loss": loss_plot(runs, sizes.window),
            "attention": attention_plot(runs, context),
            "values": value_plot(runs),
        },
        tables=[loss_table(runs, sizes.window), *layer_tables(runs, context)],
        notes=NOTES,
    )


NOTES = (
    "Importance entropy (Eq. 11) is that of what a token receives, the mean over queries; the formula as printed sums over "
    "keys and is the same for every token. Low is concentrated, as the figures have it; the text says the contrary. Under "
    "a causal mask even uniform attention stays below log T: that, not log T, is the baseline in the figure.",
    "NeuTRENO's lambda is 0.4, as in the paper's Appendix A.3. DenseFormer is the depth-weighted average of its own paper.",
    "The values in the figures are those that attention mixes: in ResFormer the mean of V_n and V_1, as Eq. 7 has it. The "
    "factor 1/2 makes their eigenvalues smaller; the model with lambda 1 has V_n + V_1. The largest eigenvalue is that of "
    "one sequence; the first layer's spectrum is a mean over the validation sequences.",
    "Attention sinks, the drain of the first token's value and the peak of its hidden state come late in training. If the "
    "vanilla model does not show them, nothing here tests what ResFormer does about them.",
)


def smoothed(loss: Values, window: int) -> Values:
    """Mean of each step and those before it, from step `window` on."""
    return np.convolve(loss, np.full(window, 1 / window), mode="valid")


def relative(runs: Runs, rule: str, window: int) -> list[Values]:
    """Smoothed losses less the vanilla model's with the same seed, from step `window` on."""
    losses, vanilla = ([smoothed(one.loss, window) for one in runs.of(name)] for name in (rule, "vanilla"))
    return [loss - other[: len(loss)] for loss, other in zip(losses, vanilla, strict=True)]


def ends(runs: Runs, rule: str, window: int, at: int | None = None) -> Spread:
    """Relative loss at the end, or after `at` steps."""
    place = -1 if at is None else at - window
    return Spread([float(curve[place]) for curve in relative(runs, rule, window)])


def less(one: Spread, other: Spread) -> Spread:
    """The difference for each seed: equal seeds see equal batches."""
    return Spread([a - b for a, b in zip(one.values, other.values, strict=True)])


def claims_of_loss(runs: Runs, sizes: Sizes) -> Iterator[Claim]:
    window = sizes.window
    last = {rule: ends(runs, rule, window) for rule in sizes.rules}
    below = Spread([float(np.mean(curve < 0)) for curve in relative(runs, "resformer", window)])
    yield Claim(
        paper="ResFormer consistently outperforms vanilla Transformer throughout training (Fig. 7)",
        seen=f"loss {last['resformer']} against vanilla at the end; below it in {below.mean:.0%} of the steps",
        agrees=verdict(last["resformer"].is_below(0), min(below.values) == 1),
    )
    if others := [rule for rule in NAMES if rule in last]:
        yield Claim(
            paper=f"ResFormer outperforms {' and '.join(NAMES[rule] for rule in others)} (Fig. 7, right)",
            seen=f"ResFormer {last['resformer']}, " + ", ".join(f"{rule} {last[rule]}" for rule in others),
            agrees=verdict(*(less(last["resformer"], last[rule]).is_below(0) for rule in others)),
        )
    yield claim_of_svformer(relative(runs, "svformer", window), window)
    if sizes.short_rules:
        yield from claims_of_short(runs, sizes)


def claims_of_short(runs: Runs, sizes: Sizes) -> Iterator[Claim]:
    rules = [rule for rule in ("resformer", *LAMBDAS, *sizes.short_rules) if rule in runs.rules]
    at = {rule: ends(runs, rule, sizes.window, sizes.short_steps) for rule in rules}
    against = f"against vanilla at step {sizes.short_steps}"
    if LAMBDAS.keys() <= at.keys():
        apart = {rule: less(at["lambda 2"], at[rule]) for rule in (*LAMBDAS, "resformer") if rule != "lambda 2"}
        yield Claim(
            paper="The performance improves as lambda increases, achieving the best results at lambda = 2 (Fig. 8)",
            seen=", ".join(f"{rule} {at[rule]}" for rule in LAMBDAS)
            + f", Eq. 7 {at['resformer']} {against}; lambda 2 less "
            + ", ".join(f"{rule} {difference}" for rule, difference in apart.items()),
            agrees=verdict(*(difference.is_below(0) for difference in apart.values())),
        )
    if "cross-layer" in at:
        yield Claim(
            paper="ResFormer achieves an even lower final loss than cross-layer attention, which it approximates (Fig. 10)",
            seen=f"cross-layer {at['cross-layer']}, ResFormer {at['resformer']} {against}",
            agrees=verdict(less(at["resformer"], at["cross-layer"]).is_below(0)),
        )


def claims_of_size(runs: Runs, sizes: Sizes, others: Sequence[tuple[Sizes, Runs]]) -> Iterator[Claim]:
    found = {}
    for other, of_other in others:
        steps = min(sizes.steps, other.steps)
        found = {
            one.model["width"]: ends(some, "resformer", one.window, steps)
            for one, some in ((sizes, runs), (other, of_other))
        }
        yield Claim(
            paper="Does ResFormer gain at another size, too?",
            seen=", ".join(f"{loss} at width {width}" for width, loss in found.items())
            + f" against vanilla at step {steps}",
            agrees=OURS,
        )


def claim_of_svformer(curves: Sequence[Values], window: int) -> Claim:
    """`curves`: relative losses of all seeds."""
    early = Spread([float(curve[: max(1, len(curve) // 5)].mean()) for curve in curves])
    best, last = (Spread([float(of(curve)) for curve in curves]) for of in (np.min, lambda curve: curve[-1]))
    steps = [at + window for curve in curves if (at := overtaken(curve)) is not None]
    surpassed = f"surpassed from step {min(steps)} on" if steps else "not surpassed in this run"
    return Claim(
        paper="SVFormer will always be gradually surpassed by vanilla attention during training while its training speed is "
        "faster than vanilla Transformer at the early stage (Fig. 14)",
        seen=f"{early} over the first fifth of the steps, {best} at best, {last} at the end; {surpassed}"
        + (f" ({len(steps)} of {len(curves)} seeds)" if steps and len(curves) > 1 else ""),
        agrees=verdict(early.is_below(0), len(steps) == len(curves)),
    )


def overtaken(curve: Values) -> int | None:
    """Where the curve comes above 0 and stays there; None where it ends below, or was never below."""
    below = np.flatnonzero(curve <= 0)
    return int(below[-1]) + 1 if curve[-1] > 0 and len(below) else None


def claims_of_attention(runs: Runs, context: int) -> Iterator[Claim]:
    even, even_sink = uniform_entropy(context), uniform_sink_share(context)
    start = runs.mean("vanilla", lambda run: entropy(run.start, context))
    end, other = (runs.mean(rule, lambda run: entropy(run.end, context)) for rule in ("vanilla", "resformer"))
    first = runs.spread("vanilla", lambda run: run.start.layers["token_similarity"][0])
    last = runs.spread("vanilla", lambda run: run.start.layers["token_similarity"][-1])
    yield Claim(
        paper="A random model's tokens grow alike with depth, and its attention is not concentrated (Fig. 1, left)",
        seen=f"token similarity {first} at the embeddings, {last} after the last block; "
        f"importance entropy {start.min():.3f} to {start.max():.3f}, uniform causal attention {even:.3f}",
        agrees=verdict(last.mean > 2 * first.mean, bool(np.abs(start - even).max() < 0.01)),
    )
    is_concentrated = bool(end[1:].min() < even - 0.05)
    yield Claim(
        paper="The clustering of attention increases with the number of layers for the vanilla Transformer, and is less "
        "pronounced for ResFormer (Fig. 1, right)",
        seen=f"entropy {end.min():.3f} to {end.max():.3f} in vanilla layers, {other.min():.3f} to {other.max():.3f} in "
        f"ResFormer's; uniform {even:.3f}",
        agrees=verdict(bool(other.mean() > end.mean())) if is_concentrated else NOT_TESTABLE,
    )
    sink = runs.spread("vanilla", lambda run: run.end.layers["sink_share"].max())
    yield Claim(
        paper="The start token easily attracts massive attention (Fig. 2)",
        seen=f"share {sink} in the layer with the largest; uniform causal attention gives {even_sink:.3f}",
        agrees="yes" if sink.is_above(2 * even_sink) else NOT_TESTABLE,
    )


def claims_of_values(runs: Runs) -> Iterator[Claim]:
    def compared(metric: str, number: Callable[[Values], float]) -> tuple[Spread, Spread]:
        def of(run: Trained) -> float:
            return number(run.end.layers[metric])

        return runs.spread("vanilla", of), runs.spread("resformer", of)

    drain, other = compared("first_value_norm_ratio", lambda ratios: ratios[1:].mean())
    yield Claim(
        paper="Attention concentration is associated with value-state drains, and ResFormer mitigates them (Fig. 2)",
        seen=f"|v_1| against the others', mean over deeper layers: vanilla {drain}, ResFormer {other}",
        agrees=verdict(other.is_above(drain)) if drain.is_below(0.9) else NOT_TESTABLE,
    )
    peak, other = compared("first_hidden_norm_ratio", lambda ratios: ratios.max())
    yield Claim(
        paper="It is associated with hidden-state peaks, less so in ResFormer (Fig. 2)",
        seen=f"|h_1| against the others', largest over layers: vanilla {peak}, ResFormer {other}",
        agrees=verdict(other.is_below(peak)) if peak.is_above(3.0) else NOT_TESTABLE,
    )

    def larger(rule: str) -> Spread:
        """Number of layers with a larger eigenvalue than the vanilla model's."""
        tops, others = ([one.end.layers["value_top_eigenvalue"] for one in runs.of(name)] for name in (rule, "vanilla"))
        return Spread([float((top > other).sum()) for top, other in zip(tops, others, strict=True)])

    num = len(runs.seeds[0]["vanilla"].end.layers["value_top_eigenvalue"])
    has_sum = "lambda 1" in runs.rules
    found = {rule: larger(rule) for rule in ("resformer", *(["lambda 1"] if has_sum else []))}
    yield Claim(
        paper="The values' largest eigenvalue is larger in most of ResFormer's layers (Fig. 12)",
        seen=f"Eq. 7, (V_n + V_1) / 2: larger in {found['resformer'].mean:.1f} of {num} layers",
        reading=f"V_n + V_1: larger in {found['lambda 1'].mean:.1f} of {num} layers" if has_sum else "",
        agrees=verdict(*(count.mean > num / 2 for count in found.values())),
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


def loss_plot(runs: Runs, window: int) -> Plot:
    figure, (left, right) = panels("Training loss", "Training loss, less the vanilla model's", x="step")
    trained = runs.seeds[0]
    longest = len(smoothed(trained["vanilla"].loss, window))
    for rule in runs.rules:
        loss = runs.mean(rule, lambda run: smoothed(run.loss, window))
        steps = np.arange(window, window + len(loss))
        style = "-" if len(loss) == longest else "--"
        left.plot(steps, loss, style, label=rule)
        right.plot(steps, np.mean(relative(runs, rule, window), axis=0), style, label=rule)
    for panel in (left, right):
        panel.set_ylabel(f"nats, mean of {window} steps")
    legend_beside(figure, left)
    return Plot(
        figure=figure,
        caption="Loss of models that see the same batches, mean over seeds (Fig. 7): below 0 on the right, better than "
        "vanilla. Dashed: models that stop early.",
    )


def whole(runs: Runs) -> list[str]:
    """Rules that were trained for all steps."""
    trained = runs.seeds[0]
    return [rule for rule in runs.rules if len(trained[rule].loss) == len(trained["vanilla"].loss)]


def attention_plot(runs: Runs, context: int) -> Plot:
    figure, axes = panels(
        "Token similarity at the start", "Importance entropy", "Attention to the first token", x="layer"
    )
    for rule in whole(runs):
        similarity = runs.mean(rule, lambda run: run.start.layers["token_similarity"])
        even = runs.mean(rule, lambda run: entropy(run.end, context))
        sink = runs.mean(rule, lambda run: run.end.layers["sink_share"])
        layers = np.arange(1, len(sink) + 1)
        axes[0].plot(similarity, label=rule)
        axes[1].plot(layers, even, label=rule)
        axes[2].plot(layers, sink, label=rule)
    vanilla = runs.mean("vanilla", lambda run: entropy(run.start, context))
    axes[1].plot(np.arange(1, len(vanilla) + 1), vanilla, "k:", label="vanilla at the start")
    axes[1].axhline(uniform_entropy(context), color="0.6", linestyle="--", label="uniform causal attention")
    axes[2].axhline(uniform_sink_share(context), color="0.6", linestyle="--", label="uniform causal attention")
    for panel, label in zip(axes, ("ratio", "nats", "share of rows 2 and on"), strict=True):
        panel.set_ylabel(label)
    legend_beside(figure, axes[1])
    return Plot(
        figure=figure,
        caption="Means over seeds. How alike random models' tokens are (left, Fig. 1). What trained attention looks at "
        "(Fig. 1, 2): an entropy below the dashed line would be concentrated, a share above it a sink.",
    )


def value_plot(runs: Runs) -> Plot:
    figure, axes = panels(
        "First token's value", "First token's hidden state", "Values' top eigenvalue", "Values, layer 1", x="layer"
    )
    spectra = {rule: runs.mean(rule, lambda run: run.spectrum) for rule in whole(runs)}
    for rule, spectrum in spectra.items():
        value = runs.mean(rule, lambda run: run.end.layers["first_value_norm_ratio"])
        hidden = runs.mean(rule, lambda run: run.end.layers["first_hidden_norm_ratio"])
        top = runs.mean(rule, lambda run: run.end.layers["value_top_eigenvalue"])
        layers = np.arange(1, len(value) + 1)
        axes[0].plot(layers, value, label=rule)
        axes[1].plot(hidden, label=rule)
        axes[2].semilogy(layers, top, label=rule)
        axes[3].loglog(np.arange(1, len(spectrum) + 1), spectrum, label=rule)
    for panel in axes[:2]:
        panel.axhline(1, color="0.6", linestyle="--")
        panel.set_ylabel("length against the others'")
    for panel in axes[2:]:
        panel.set_ylabel("eigenvalue")
    axes[3].set_ylim(bottom=1e-5 * max(float(spectrum[0]) for spectrum in spectra.values()))
    axes[3].set_xlabel("rank")
    legend_beside(figure, axes[0])
    return Plot(
        figure=figure,
        caption="Trained models, means over seeds: a value below 1 on the left is a drain, a hidden state above 1 a peak "
        "(Fig. 2); largest eigenvalue of the values in each layer, and all of the first layer's (Fig. 12).",
    )


def loss_table(runs: Runs, window: int) -> Table:
    rows: list[Sequence[str | int]] = []
    for rule in runs.rules:
        row = [runs.spread(rule, lambda run: smoothed(run.loss, window)[-1]), ends(runs, rule, window)]
        if rule in whole(runs):
            vals, vanilla = (runs.spread(name, lambda run: run.val_loss) for name in (rule, "vanilla"))
            row += [vals, less(vals, vanilla)]
        rows.append((rule, len(runs.seeds[0][rule].loss), *map(str, row), *["-"] * (4 - len(row))))
    columns = ("model", "steps", "training loss", "less vanilla's", "validation loss", "less vanilla's")
    return Table(title="Loss, in nats", columns=columns, rows=rows)


def layer_tables(runs: Runs, context: int) -> Iterator[Table]:
    """Each metric by layer, mean over seeds, at the end and, in brackets, at the start."""

    def of(metric: str, frame: Frame) -> Values:
        return entropy(frame, context) if metric == "importance_entropy" else frame.layers[metric]

    for name in MEASURES:
        rows = []
        for rule in runs.rules:
            start, end = (
                np.mean([of(name, frame) for frame in frames], axis=0)
                for frames in ([run.start for run in runs.of(rule)], [run.end for run in runs.of(rule)])
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
