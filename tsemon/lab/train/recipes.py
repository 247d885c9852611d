"""The recipes that have a name: four that run at once, and those of the papers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tsemon.catalogue import nearest
from tsemon.errors import InvalidArgument
from tsemon.lab.train import cifar10
from tsemon.lab.train.documents import WIKITEXT
from tsemon.lab.train.recipe import ImageData, Recipe, TextData

SMALL_TEXT = Recipe(
    name="small-text",
    about="A small language model on the bytes of Python's standard library.",
    model="CausalLanguageModel",
    sizes={"depth": 4, "width": 64, "heads": 4, "ffn": 256, "norm": "pre"},
    data=TextData(context=64),
    batch_size=16,
    steps=500,
    learning_rate=1e-3,
    schedule="cosine",
    warmup=20,
    clip_norm=1.0,
    evaluate_every=100,
    evaluation_batches=20,
)
SMALL_BERT = replace(
    SMALL_TEXT,
    name="small-bert",
    about="A small BERT that fills in bytes of Python's standard library.",
    model="TextEncoder",
    sizes={"depth": 4, "width": 64, "heads": 4, "ffn": 256},
)
SMALL_T5 = replace(
    SMALL_BERT,
    name="small-t5",
    about="A small encoder of T5 that fills in bytes of Python's standard library, with T5's optimizer and schedule.",
    model="T5Encoder",
    sizes={"depth": 4, "width": 64, "heads": 4, "head_width": 16, "ffn": 256},
    optimizer="adafactor",
    learning_rate=1e-2,
    weight_decay=0.0,
    schedule="inverse-sqrt",
    warmup=100,
    clip_norm=None,
)
SMALL_DIGITS = Recipe(
    name="small-digits",
    about="A small vision transformer on scikit-learn's digits.",
    model="VisionTransformer",
    sizes={"patch": 4, "depth": 4, "width": 64, "heads": 4, "ffn": 128, "norm": "pre"},
    data=ImageData(),
    batch_size=32,
    steps=500,
    learning_rate=1e-3,
    schedule="cosine",
    warmup=20,
    evaluate_every=100,
)

_VIT_80 = Recipe(
    name="vit-80-cifar10-post-norm",
    about="Classic Transformers 3.3, Figure 6, post-norm: 150 epochs. Crops and mirrors in place of auto-augmentation.",
    model="VisionTransformer",
    preset="vit-80",
    data=ImageData(
        source="CIFAR-10: data_batch_1.bin to data_batch_5.bin and test_batch.bin, or the Python version, "
        f"from {cifar10.HOME}",
        augmentation="crop-flip",
    ),
    batch_size=128,
    steps=150 * (50_000 // 128),
    learning_rate=0.5e-4,
    schedule="multi-step",
    evaluate_every=50_000 // 128,
)
_TRANSFORMER_XL_60 = Recipe(
    name="transformer-xl-60-wikitext103-post-norm",
    about="Classic Transformers 3.4, Figure 7, post-norm; it shows the first 50,000 steps. Else as Dai et al.'s base model.",
    model="TransformerXL",
    preset="transformer-xl-60",
    data=TextData(
        source=f"WikiText-103, word level: {' and '.join(WIKITEXT)}, from "
        "https://huggingface.co/datasets/Salesforce/wikitext (wikitext-103-v1)",
        context=150,
        tokenizer="words",
        vocab=267_735,
        is_streamed=True,
    ),
    batch_size=40,
    steps=200_000,
    learning_rate=2.5e-4,
    weight_decay=0.0,
    schedule="cosine",
    final_ratio=0.0,
    evaluate_every=4_000,
)
_SLIMPAJAMA = TextData(
    source="SlimPajama: the folders train and validation with their .jsonl.zst files, from "
    "https://huggingface.co/datasets/cerebras/SlimPajama-627B. For the paper's tokens give the tokenizer.json of "
    "RedPajama-INCITE-7B-Base as data.tokenizer",
    context=2_048,
    tokenizer="bpe",
    vocab=50_277,
)
_RESFORMER_82M = Recipe(
    name="resformer-82m-slimpajama",
    about="Value Residual Learning 4.1.1, Table 4: ResFormer, but in bfloat16. Warm-up of Table 4; 4.1.1 says 1,200.",
    model="Llama",
    preset="resformer-82m",
    data=_SLIMPAJAMA,
    batch_size=1_024,
    accumulation=32,
    steps=10_000,
    learning_rate=6e-4,
    betas=(0.9, 0.95),
    schedule="cosine",
    warmup=120,
    clip_norm=1.0,
    precision="bfloat16",
    evaluate_every=500,
    evaluation_batches=100,
)

TABLE_2 = {
    "CommonCrawl": 0.5,
    "C4": 0.2,
    "GitHub": 0.1,
    "Books": 0.05,
    "ArXiv": 0.05,
    "Wikipedia": 0.05,
    "StackExchange": 0.05,
}
"""Domains of Value Residual Learning's data, and their proportions."""
_DOMAINS = (
    f"A folder with the folders {', '.join(TABLE_2)}, such as the documents of SlimPajama "
    "(https://huggingface.co/datasets/cerebras/SlimPajama-627B) by their redpajama_set_name, and as data.tokenizer the "
    "tokenizer.json of RedPajama-INCITE-7B-Base"
)


def _variant(recipe: Recipe, name: str, kind: tuple[str, str], **changes: Any) -> Recipe:
    """The same, of another kind, which is told instead of that of `recipe`."""
    return replace(recipe, name=name, about=recipe.about.replace(*kind), **changes)


_PRE_NORM = ("post-norm", "pre-norm")
_DE_ESCALATED = ("post-norm", "post-norm de-escalated")
_PRINTED = ("post-norm", "post-norm de-escalated by the mean of all tokens as Eq. 21 is printed: it sees later tokens")
_CAUSAL = ("post-norm", "post-norm de-escalated by the mean of the tokens so far")
_XL = "transformer-xl-60-wikitext103"

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        SMALL_TEXT,
        SMALL_BERT,
        SMALL_T5,
        SMALL_DIGITS,
        _VIT_80,
        _variant(_VIT_80, "vit-80-cifar10-pre-norm", _PRE_NORM, preset="vit-80-pre-norm", learning_rate=1e-4),
        _variant(_VIT_80, "vit-80-cifar10", _DE_ESCALATED, preset="vit-80-de-escalated", learning_rate=1e-4),
        _TRANSFORMER_XL_60,
        _variant(_TRANSFORMER_XL_60, f"{_XL}-pre-norm", _PRE_NORM, preset="transformer-xl-60-pre-norm"),
        _variant(_TRANSFORMER_XL_60, _XL, _PRINTED, preset="transformer-xl-60-de-escalated"),
        _variant(_TRANSFORMER_XL_60, f"{_XL}-causal", _CAUSAL, preset="transformer-xl-60-de-escalated-causal"),
        _RESFORMER_82M,
        _variant(
            _RESFORMER_82M,
            "resformer-82m-mixture",
            ("in bfloat16.", "in bfloat16, with the mixture of Table 2."),
            data=replace(_SLIMPAJAMA, mixture=TABLE_2, source=_DOMAINS),
        ),
        *(
            _variant(
                _RESFORMER_82M, f"{rule.lower()}-82m-slimpajama", ("ResFormer", rule), preset=f"{rule.lower()}-82m"
            )
            for rule in ("Vanilla", "SVFormer", "NeuTRENO")
        ),
    )
}


def recipe_named(name: str) -> Recipe:
    """Raises InvalidArgument, with the nearest name, where there is none."""
    if name not in RECIPES:
        raise InvalidArgument(
            f"no recipe named {name!r}; {nearest(name, list(RECIPES))}; tsemon train --list shows all"
        )
    return RECIPES[name]
