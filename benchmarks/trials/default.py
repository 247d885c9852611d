"""Trainings at default settings: three public models and two of tsemon's own, and what breaks them.

Each defect sets in halfway unless it is there from the first step on. Seeds tell runs of one kind apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from trials import defects as d
from trials import subjects as s
from trials.recording import Trial

STEPS, EVENT = 1000, 500
SEEDS = 71, 72, 73


def control(name: str, subject: s.Make, about: str, rate: float) -> Trial:
    """A healthy training."""
    return Trial(name=name, subject=subject, about=about, rate=rate, warmup=40, steps=STEPS, every=None)


TEXT = control("text", s.language, "tsemon's language model, pre-norm, 5 blocks", 2.5e-3)
DIGITS = control("digits", s.vision, "tsemon's vision transformer, pre-norm, 5 blocks", 1.5e-3)
GPT2 = control("gpt2", s.gpt2, "Hugging Face's GPT-2, 4 blocks", 1.5e-3)
BERT = control("bert", s.bert, "Hugging Face's BERT, 4 blocks, padded", 1.5e-3)
VIT = control("vit", s.hugging_face_vit, "Hugging Face's ViT, 4 blocks", 1e-3)
TWINS = TEXT, DIGITS, GPT2, BERT, VIT

late, unseen = {"event_step": EVENT}, {"event_step": EVENT, "shows_in_loss": False}
FAILING = (
    TEXT.failing("text-nan", "loss", "a weight becomes NaN", d.nan_weight, **late),
    TEXT.failing("text-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    TEXT.failing("text-decay", "norm", "a weight decay of -8", d.weight_decay(-8.0), **late),
    TEXT.failing("text-inflated", "norm", "one block's weights grow by 3 % a step", d.inflated(2, 1.03), **late),
    TEXT.failing("text-rate-0", "dead", "the rate is 0", d.rate_times(0.0), **late),
    TEXT.failing("text-rate-tiny", "dead", "a thousandth of the rate", rate=2.5e-6),
    TEXT.failing("text-block-x4", "norm", "one block's weights times 4", d.block_times(3, 4.0), **late),
    TEXT.failing("text-rate-x25", "entropy", "25 times the rate, no warm-up", rate=6e-2, warmup=0, clip_norm=math.inf),
    TEXT.failing("text-post", "tse", "post-norm, 22 blocks",
                 subject=partial(s.language, depth=22, width=32, ffn=80, norm="post"), rate=3e-3, warmup=15),
    DIGITS.failing("digits-qk", "entropy", "queries and keys times 25", d.queries_and_keys_times(25), **late),
    DIGITS.failing("digits-constant", "data", "one input for all", d.batches_through(d.constant_inputs), **late),
    DIGITS.failing("digits-ascent", "diverge", "the loss has the wrong sign", d.loss_times(-1.0), **late),
    DIGITS.failing("digits-attention", "rank", "5 blocks of attention alone", subject=s.attention_only(s.vision)),
    DIGITS.failing("digits-post", "tse", "post-norm, 20 blocks",
                   subject=partial(s.vision, depth=20, width=32, ffn=64, norm="post"), rate=1.2e-3, warmup=15),
    GPT2.failing("gpt2-nan", "loss", "a weight becomes NaN", d.nan_weight, **late),
    GPT2.failing("gpt2-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    GPT2.failing("gpt2-rate", "diverge", "60 times the rate, unclipped", d.both(d.rate_times(60), d.no_clipping), **late),
    GPT2.failing("gpt2-same-batch", "data", "the same batch", d.same_batch, **unseen),
    GPT2.failing("gpt2-norm", "fresh", "the last norm's gain and bias are zero", d.zeroed("transformer.ln_f"), **late),
    GPT2.failing("gpt2-embedding", "fresh", "token embeddings are zero from the start", d.zeroed("transformer.wte")),
    BERT.failing("bert-random", "diverge", "noise for inputs", d.batches_through(d.random_inputs), **late),
    BERT.failing("bert-decay", "norm", "a weight decay of -12", d.weight_decay(-12.0), **late),
    BERT.failing("bert-rate", "diverge", "60 times the rate, unclipped", d.both(d.rate_times(60), d.no_clipping), **late),
    VIT.failing("vit-forgotten", "dead", "the optimizer does not know the blocks", d.forgotten(0, 1, 2, 3)),
    VIT.failing("vit-random", "diverge", "noise for inputs", d.batches_through(d.random_inputs), **late),
    VIT.failing("vit-same-batch", "data", "the same batch", d.same_batch, **unseen),
    VIT.failing("vit-decay-20", "dead", "a weight decay of 20", d.weight_decay(20.0)),
    VIT.failing("vit-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
)  # fmt: skip


def seeded(trials: tuple[Trial, ...], seeds: tuple[int, ...] = SEEDS) -> Iterator[Trial]:
    """Return every trial for each seed, next to its control run with the same seed."""
    for seed in seeds:
        for trial in trials:
            yield replace(trial, name=f"{trial.name}-{seed}", twin=trial.twin and f"{trial.twin}-{seed}", seed=seed)
