"""Classic Transformers, Figure 4: pre-norm blocks slow escalation down by letting attention count for less and less.

Axes: `B` batch, `T` tokens, `D` width, `H` heads; `L` blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tsemon.lab.reproduce.observing import Frame, Values, forward, observe
from tsemon.lab.reproduce.plotting import panels
from tsemon.lab.reproduce.random_encoder import NUM_TOKENS, caught, head_mix, random_encoder, random_tokens
from tsemon.lab.reproduce.result import Claim, Experiment, Plot, Result, Table, verdict
from tsemon.lab.reproduce.seeds import seeds_of
from tsemon.models import Encoder

EXPERIMENT = Experiment(
    name="pre-norm",
    title="Pre-norm blocks slow escalation down",
    source="Why Classic Transformers Are Shallow (arXiv 2312.06182), Figure 4",
    num_seeds=3,
)
DEPTH = 40
Encoded = Mapping[str, Values]
"""(L,) of each quantity, mean over runs."""


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Of one language model, by layer."""

    similarity: Values
    """(L + 1,), of the embeddings first."""
    gap: Values
    """(L,)"""


def run(quick: bool, seed: int = 0) -> Result:
    from transformers import LlamaConfig, Qwen2Config  # an import of seconds, which other experiments need not

    runs = 2 if quick else 10
    llama, qwen2 = ((512, 1024), (512,)) if quick else ((512, 1024, 2048, 4096), (512, 1024, 2048))
    encoded = encoders(seeds_of(seed, runs), depth=DEPTH, width=512, heads=8, ffn=2048)
    configs = [*(sized(LlamaConfig, width) for width in llama), *(sized(Qwen2Config, width) for width in qwen2)]
    decoded = {f"{config.model_type} {config.hidden_size}": decoder(config, DEPTH, seed) for config in configs}
    return Result(
        settings={
            "encoder": f"{DEPTH} pre-norm blocks, otherwise that of Figure 2: n = {NUM_TOKENS}, d = 512, h = 8, q = "
            f"2048, W from N(0, 1/d), X from N(0, 1); {runs} runs for each seed",
            "language models": "Hugging Face Llama and Qwen2, 40 layers; widths "
            + ", ".join(decoded)
            + "; heads of width 128, feed-forward width in the package's default proportion (Llama 11008/4096, Qwen2 "
            "22016/4096), weights from the package's default N(0, 0.02^2), biases 0",
            "text": f"{NUM_TOKENS} random ids, one sequence",
            "dtype": "float32",
        },
        claims=claims(encoded, decoded),
        plots={"encoder": encoder_figure(encoded), "language-models": decoder_figure(decoded)},
        tables=[encoder_table(encoded), decoder_table(decoded)],
        notes=[
            "|X| is tsemon's hidden_rms times sqrt(n d), the gap its spectral_gap: mean over heads of 1 - |lambda_2|.",
            "Layers of the language models are drawn and run one at a time, in one layer's memory; with weights drawn "
            "at random that is the same.",
            "The paper does not give the sizes of its language models, and the level depends on them. Weights of a "
            "fixed standard deviation 0.02 do more in a wider layer: d 0.02^2 is 0.2 for d = 512 and 1.6 for 4096, "
            "and the feed-forward network, a product of three such layers, gains on attention.",
            "The gap depends on the width for the same reason: scores have variance (d sigma^2)^2, 0.04 for d "
            "= 512 and 2.7 for 4096, and with large ones some token attends mostly to itself.",
        ],
    )


def encoders(seeds: Iterable[int], *, depth: int, width: int, heads: int, ffn: int) -> Encoded:
    each = []
    for seed in seeds:
        model = random_encoder(seed, norm="pre", depth=depth, width=width, heads=heads, ffn=ffn)
        each.append(encoder(model, random_tokens(seed, width)))
    return {name: np.mean([one[name] for one in each], axis=0) for name in each[0]}


def encoder(model: Encoder, x_BTD: Tensor) -> Encoded:
    with caught(model) as seen:
        frame = observe(model, lambda: forward(model, x_BTD), measures=["token_similarity", "hidden_rms"])
    rows = []
    for layer, block in enumerate(model.blocks):
        name = f"blocks.{layer}"
        x, normed = seen[name][0], seen[f"{name}.norm1"][1]
        mixed_BHTD = head_mix(block.attention, seen[f"{name}.attention.to_query_key_value"][1], normed)
        expected = x.square().sum() + mixed_BHTD.square().sum() / mixed_BHTD.shape[1]  # Eq. 20, mean over heads
        rows.append(
            (
                normed.norm().item(),
                seen[f"{name}.attention"][1].norm().item(),
                (seen[f"{name}.norm2"][0].square().sum() / expected).item(),
            )
        )
    named = dict(zip(("|LN(X)|", "|P LN(X) W|", "|Y|^2 / Eq. 20"), np.array(rows).T, strict=True))
    return {
        "token similarity": frame.layers["token_similarity"][1:],
        "|X|": frame.layers["hidden_rms"][:-1] * x_BTD[0].numel() ** 0.5,
        **named,
    }


def sized(kind: Any, width: int) -> Any:
    """The package's default configuration, brought to this width."""
    default = kind()
    heads = max(1, width // 128)
    return kind(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=width * default.intermediate_size // default.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=1,
    )


def decoder(config: Any, depth: int, seed: int = 0) -> Decoded:
    """A model of `depth` layers, drawn and run one at a time."""
    from transformers import AutoModel

    torch.manual_seed(seed)
    model = AutoModel.from_config(config).requires_grad_(False)
    model.norm = nn.Identity()  # so that what the model returns is what the next layer gets
    x_BTD = model.embed_tokens(torch.randint(config.vocab_size, (1, NUM_TOKENS)))
    similarity, gap = [], []
    for _ in range(depth):
        draw(model.layers[0], config.initializer_range)
        x_BTD, frame = one_layer(model, x_BTD)
        similarity.append(frame.layers["token_similarity"])
        gap.append(frame.layers["spectral_gap"][0])
    return Decoded(similarity=np.array([similarity[0][0], *(each[1] for each in similarity)]), gap=np.array(gap))


def draw(layer: nn.Module, std: float) -> None:
    """New weights, as the package starts them; biases are zero and norms one already."""
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=std)


def one_layer(model: Any, x_BTD: Tensor) -> tuple[Tensor, Frame]:
    outputs: list[Tensor] = []

    def pass_on() -> None:
        outputs.append(model(inputs_embeds=x_BTD, use_cache=False).last_hidden_state)

    frame = observe(model, pass_on, measures=["token_similarity", "spectral_gap"])
    return outputs[0], frame


def claims(encoded: Encoded, decoded: Mapping[str, Decoded]) -> Sequence[Claim]:
    t_sim, norm, branch = encoded["token similarity"], encoded["|X|"], encoded["|P LN(X) W|"]
    early, late = t_sim[9] - t_sim[0], t_sim[-1] - t_sim[-11]
    shares = branch / norm
    eq_20 = np.abs(encoded["|Y|^2 / Eq. 20"] - 1).max()
    curves = {name: each.similarity for name, each in decoded.items()}
    gaps = np.array([each.gap.mean() for each in decoded.values()])
    return [
        Claim(
            paper="In a pre-norm vision transformer similarity rises, at a diminishing rate.",
            seen=f"t_sim {t_sim[0]:.3f} after block 1, {t_sim[4]:.2f} after 5, {t_sim[9]:.3f} after 10, "
            f"{t_sim[19]:.3f} after 20, {t_sim[-1]:.3f} after 40; {early:+.2f} from block 1 to 10, {late:+.3f} "
            "over the last 10.",
            agrees=verdict(bool((np.diff(t_sim) > 0).all()), bool(0 <= late < early / 10)),
        ),
        Claim(
            paper="|X| grows while what attention gets, LN(X), has the same norm always (Eq. 20).",
            seen=f"|X| is {norm[0]:.0f} in block 1 and {norm[-1]:.0f} in the last, |LN(X)| is "
            f"{encoded['|LN(X)|'].min():.1f} to {encoded['|LN(X)|'].max():.1f}; |Y|^2 is off Eq. 20 by {eq_20:.1%} at most.",
            agrees=verdict(bool((np.diff(norm) > 0).all()), bool(np.ptp(encoded["|LN(X)|"]) < 1), bool(eq_20 < 0.05)),
        ),
        Claim(
            paper="So attention counts for less and less beside the residual.",
            seen=f"|P LN(X) W| / |X| is {shares[0]:.2f} in block 1, at most {shares.max():.2f}, in block "
            f"{shares.argmax() + 1}, and {shares[-1]:.2f} in the last; |P LN(X) W| is {branch[-10:].min():.0f} to "
            f"{branch[-10:].max():.0f} in the last 10.",
            agrees=verdict(bool(shares[-1] < shares.max() / 2), bool(shares[0] == shares.max())),
        ),
        Claim(
            paper="In Llama and Qwen2 similarity rises rapidly at first, then ever more slowly.",
            seen="First 5 layers and last 20: "
            + "; ".join(
                f"{name} {each[5] - each[0]:+.2f}, {each[-1] - each[-21]:+.2f}" for name, each in curves.items()
            )
            + ".",
            agrees=verdict(*(rises_ever_more_slowly(each) for each in curves.values())),
        ),
        Claim(
            paper="It stays below 0.8 after 40 layers.",
            seen=", ".join(f"{name}: {each[-1]:.2f}" for name, each in curves.items()) + ".",
            agrees=verdict(*(bool(each[-1] < 0.8) for each in curves.values())),
        ),
        Claim(
            paper="The spectral gap of their triangular attention is approximately 0.5.",
            seen="Mean over layers: "
            + ", ".join(f"{name} {gap:.2f}" for name, gap in zip(decoded, gaps, strict=True))
            + ".",
            agrees=verdict(*(bool(abs(gap - 0.5) < 0.03) for gap in gaps)),
        ),
    ]


def rises_ever_more_slowly(t_sim: Values) -> bool:
    """By a tenth of all that there is in the first 5 layers, and in the last 20 still, but by less than a quarter of it."""
    early, late = t_sim[5] - t_sim[0], t_sim[-1] - t_sim[-21]
    return bool(early > 0.1 and 0 <= late < early / 4)


def encoder_figure(encoded: Encoded) -> Plot:
    drawing, (left, middle, right) = panels("Token similarity", "Frobenius norms", "Share of attention", x="block")
    blocks = np.arange(1, len(encoded["|X|"]) + 1)
    left.plot(blocks, encoded["token similarity"])
    left.set_ylabel("t_sim of the block's output")
    for name in ("|X|", "|LN(X)|", "|P LN(X) W|"):
        middle.plot(blocks, encoded[name], label=name)
    middle.legend(fontsize=8)
    right.plot(blocks, encoded["|P LN(X) W|"] / encoded["|X|"])
    right.set_ylabel("|P LN(X) W| / |X|")
    for panel in (left, middle, right):
        panel.set_ylim(bottom=0)
    return Plot(
        figure=drawing,
        caption="Pre-norm encoder, mean over runs: similarity after each block; norms of the residual stream X, of what "
        "attention gets, LN(X), and of what it adds to X; and the last of these against the first.",
    )


def decoder_figure(decoded: Mapping[str, Decoded]) -> Plot:
    drawing, (left, right) = panels("Token similarity", "Spectral gap", x="layer")
    for name, each in decoded.items():
        style = "-" if name.startswith("llama") else "--"
        left.plot(np.arange(len(each.similarity)), each.similarity, style, label=name)
        right.plot(np.arange(1, len(each.gap) + 1), each.gap, style, label=name)
    left.axhline(0.8, color="grey", linewidth=0.8, linestyle=":")
    left.set_ylabel("t_sim (layer 0: embeddings)")
    right.set_ylabel("1 - |lambda_2|, mean over heads")
    left.set_ylim(0, 1)
    right.set_ylim(0, 1)
    right.legend(fontsize=8, loc="upper right", ncols=2)
    return Plot(
        figure=drawing, caption="Llama and Qwen2 at random initialisation, by width; dotted: the 0.8 of the paper."
    )


def encoder_table(encoded: Encoded) -> Table:
    return Table.numbered("Pre-norm encoder", "block", encoded)


def decoder_table(decoded: Mapping[str, Decoded]) -> Table:
    columns: dict[str, Values] = {}
    for name, each in decoded.items():
        columns |= {f"{name} t_sim": each.similarity[1:], f"{name} gap": each.gap}
    return Table.numbered("Language models", "layer", columns)
