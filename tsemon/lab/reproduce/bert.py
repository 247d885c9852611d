"""Classic Transformers, Figure 1: BERT and ALBERT, a hundred layers deep, as Hugging Face starts them.

Axes: `B` batch, `T` tokens; `L` layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tsemon.lab.reproduce.observing import Frame, Values, forward, observe
from tsemon.lab.reproduce.plotting import panels
from tsemon.lab.reproduce.result import Claim, Experiment, Plot, Result, Table, verdict

EXPERIMENT = Experiment(
    name="bert",
    title="Deep BERT and ALBERT forget what tells tokens apart",
    source="Why Classic Transformers Are Shallow (arXiv 2312.06182), Figure 1",
    num_seeds=3,
)
SHAPE = (2, 128)
"""Sequences and tokens."""
MEASURES = ("token_similarity", "cosine_similarity", "token_diversity")
BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
XXLARGE = {"hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384}
"""What AlbertConfig has by default."""
OFF: Mapping[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ON: Mapping[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
BERT, DROPOUT, ALBERT, ALBERT_DEFAULT = "BERT", "BERT with dropout", "ALBERT, base sizes", "ALBERT, default sizes"


def run(quick: bool, seed: int = 0) -> Result:
    found = experiment(seed, depth=100, default_depth=20, narrow=(3, 8) if quick else (1, 1))
    return Result(
        settings={
            "models": "BERT and ALBERT of Hugging Face transformers, post-norm, with random weights: 100 layers of "
            "BERT base sizes (width 768, 12 heads, feed-forward 3072); ALBERT so and, 20 layers, with its default "
            "sizes (4096, 64, 16384)",
            "reduced": "3 times (BERT base sizes) and 8 times (ALBERT default sizes) narrower, with weights sqrt(3) "
            "and sqrt(8) times larger, so that d sigma^2 is as in the full size"
            if quick
            else "nothing",
            "initialisation": "the package's default, N(0, 0.02^2) where not reduced, biases 0",
            "input": f"{SHAPE[0]} sequences of {SHAPE[1]} random ids, all visible; for gradients BERT's "
            "masked-language loss on random labels",
            "dropout": "0, and 0.1 (BERT's default) in 'BERT with dropout'; the paper does not say",
            "dtype": "float32",
        },
        claims=claims(found),
        plots={"layers": figure(found)},
        tables=[table(found)],
        notes=[
            "All by tsemon's metrics token_similarity, cosine_similarity, token_diversity and grad_norm. Layer 0 is "
            "the first layer's input. ALBERT has no gradient norm by layer, as its layers share one set of weights.",
            "With dropout each token loses other features in every layer, which works against similarity. What a monitor "
            "sees in training mode is not what the same network has in evaluation mode.",
            "Near 1 a layer divides diversity by 1 + (d sigma^2)^2, sigma the weights' standard deviation: values "
            "and output are two matrices, with W = W_v W_o. That is 1.094 for BERT base.",
        ],
    )


def experiment(seed: int, *, depth: int, default_depth: int, narrow: tuple[int, int]) -> Mapping[str, Frame]:
    from transformers import AlbertConfig, BertConfig  # an import of seconds, which other experiments need not

    base, default = narrowed(BASE, narrow[0]), narrowed(XXLARGE, narrow[1])
    return {
        BERT: bert(BertConfig(**base, **OFF, num_hidden_layers=depth), seed, has_gradients=True),
        DROPOUT: bert(BertConfig(**base, **ON, num_hidden_layers=depth), seed),
        ALBERT: albert(AlbertConfig(**base, **OFF, num_hidden_layers=depth), seed),
        ALBERT_DEFAULT: albert(AlbertConfig(**default, **OFF, num_hidden_layers=default_depth), seed),
    }


def narrowed(sizes: Mapping[str, int], factor: int) -> dict[str, Any]:
    """So much narrower, with weights so much larger that d sigma^2 stays what it was."""
    return {name: size // factor for name, size in sizes.items()} | {"initializer_range": 0.02 * factor**0.5}


def bert(config: Any, seed: int = 0, *, has_gradients: bool = False) -> Frame:
    from transformers import BertForMaskedLM

    torch.manual_seed(seed)
    model: Any = BertForMaskedLM(config)
    ids_BT, labels_BT = torch.randint(config.vocab_size, (2, *SHAPE))
    if has_gradients:
        return observe(model, lambda: model(ids_BT, labels=labels_BT).loss, measures=[*MEASURES, "grad_norm"])
    return observe(model.requires_grad_(False), lambda: forward(model, ids_BT), measures=MEASURES)


def albert(config: Any, seed: int = 0) -> Frame:
    from transformers import AlbertModel

    torch.manual_seed(seed)
    model: Any = AlbertModel(config).requires_grad_(False)
    ids_BT = torch.randint(config.vocab_size, SHAPE)
    return observe(model, lambda: forward(model, ids_BT), measures=MEASURES)


def claims(found: Mapping[str, Frame]) -> Sequence[Claim]:
    t_sim = {name: frame.layers["token_similarity"] for name, frame in found.items()}
    t_div = {name: frame.layers["token_diversity"] for name, frame in found.items()}
    apart = max(
        np.abs(frame.layers["token_similarity"] - frame.layers["cosine_similarity"]).max() for frame in found.values()
    )
    gradient = found[BERT].layers["grad_norm"]
    rate = (t_div[BERT][40] / t_div[BERT][-1]) ** (1 / (len(t_div[BERT]) - 41))
    plateau = t_sim[DROPOUT][40:]
    return [
        Claim(
            paper="In both models token similarity escalates to 1 with depth.",
            seen=f"BERT: t_sim {t_sim[BERT][0]:.2f} at the embeddings, {t_sim[BERT][20]:.2f} after 20 layers, "
            f"{t_sim[BERT][-1]:.4f} after {len(gradient)} ({reached(t_sim[BERT], 0.9)}), "
            f"layers that lower it: {int((np.diff(t_sim[BERT]) < 0).sum())}. ALBERT: 1 less {t_div[ALBERT][-1]:.1g} at base "
            f"sizes; at default sizes {t_sim[ALBERT_DEFAULT][5]:.4f} after 5 layers.",
            agrees=verdict(*(bool(t_sim[name][-1] > 0.99) for name in (BERT, ALBERT, ALBERT_DEFAULT))),
        ),
        Claim(
            paper="Token similarity and cosine similarity escalate almost identically.",
            seen=f"They differ by {apart:.4f} at most.",
            agrees=verdict(bool(apart < 0.02)),
        ),
        Claim(
            paper="BERT's gradient norm stays at a roughly constant level: no vanishing, no exploding.",
            seen=f"{gradient.min():.2f} to {gradient.max():.2f} over the layers.",
            agrees=verdict(bool(gradient.max() / gradient.min() < 3)),
        ),
        Claim(
            paper="The convergence to 1 is linear (Section 2.5).",
            seen=f"From layer 40 on a layer divides diversity by {rate:.3f}; 1 + (d sigma^2)^2 = "
            f"{1 + (BASE['hidden_size'] * 0.02**2) ** 2:.3f}.",
            agrees=verdict(bool(abs(rate - 1 - (BASE["hidden_size"] * 0.02**2) ** 2) < 0.02)),
        ),
        Claim(
            paper="(The paper does not say whether dropout was on.) With dropout, too, similarity goes to 1.",
            seen=f"With dropout 0.1 BERT's t_sim is between {plateau.min():.2f} and {plateau.max():.2f} from layer "
            f"40 on; {int((np.diff(t_sim[DROPOUT]) < 0).sum())} of {len(gradient)} layers lower it.",
            agrees=verdict(bool(t_sim[DROPOUT][-1] > 0.99)),
        ),
    ]


def reached(t_sim: Values, level: float) -> str:
    """In words, the first layer that has this level."""
    layers = np.flatnonzero(t_sim >= level)
    return f"{level:g} first at layer {layers[0]}" if len(layers) else f"{level:g} in no layer"


def figure(found: Mapping[str, Frame]) -> Plot:
    drawing, (left, second, third, right) = panels(
        "Token similarity", "Cosine similarity", "Token diversity", "Gradient norm, BERT", x="layer"
    )
    for name, frame in found.items():
        for panel, metric in zip((left, second, third), MEASURES, strict=True):
            panel.plot(frame.layers[metric], label=name)
    third.set_yscale("log")
    gradient = found[BERT].layers["grad_norm"]
    right.plot(np.arange(1, len(gradient) + 1), gradient)
    right.set_ylim(bottom=0)
    left.legend(fontsize=8, loc="lower right")
    left.set_ylabel("mean over sequences")
    right.set_ylabel("|g| of a layer's weights")
    return Plot(
        figure=drawing,
        caption="BERT and ALBERT at random initialisation, by layer; layer 0 is the first layer's input.",
    )


def table(found: Mapping[str, Frame]) -> Table:
    gradient = found[BERT].layers["grad_norm"]
    depth = len(gradient)
    rows: list[tuple[float | int | str, ...]] = []
    for layer in sorted({0, 1, 2, 5, *range(10, depth, 10), depth}):
        similarities = (frame.layers["token_similarity"] for frame in found.values())
        rows.append(
            (
                layer,
                *(float(each[layer]) if layer < len(each) else "-" for each in similarities),
                float(found[BERT].layers["cosine_similarity"][layer]),
                float(found[BERT].layers["token_diversity"][layer]),
                float(gradient[layer - 1]) if layer else "-",
            )
        )
    columns = ("layer", *(f"t_sim, {name}" for name in found), "t_cos, BERT", "t_div, BERT", "gradient norm, BERT")
    return Table(title="By layer", columns=columns, rows=rows)
