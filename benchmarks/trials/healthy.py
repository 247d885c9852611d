"""Long healthy trainings at default settings, with the rates of `trials.default`, but larger batches or widths.

A change of the data or of the batch size comes halfway. A step takes 23 to 30 ms on one core, in bfloat16 up to 65 ms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trials import default
from trials import defects as d
from trials import subjects as s
from trials.recording import Trial, sgd
from tsemon.lab.train import digits, image_batches, text_batches
from tsemon.lab.train.augmentation import crop_and_flip
from tsemon.lab.train.batches import Batch
from tsemon.lab.train.images import Augment

STEPS = 5000
BATCH, IMAGES = 24, 64
language = partial(s.language, batch=BATCH)
vision = partial(s.vision, depth=6, batch=IMAGES)
gpt2, bert, vit = partial(s.gpt2, width=64), partial(s.bert, width=64), partial(s.hugging_face_vit, layers=6, width=128)


# Schedules: factors of the learning rate, by the fraction of the run that is over.


def cosine(progress: float) -> float:
    return 0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2


def warm_cosine(progress: float) -> float:
    """A linear warm-up over a tenth of the run, then a cosine."""
    return progress / 0.1 if progress < 0.1 else cosine((progress - 0.1) / 0.9)


def restarts(progress: float) -> float:
    """Five cosines with warm restarts."""
    return cosine(5 * progress % 1.0)


def drops(progress: float) -> float:
    return 0.1 ** ((progress >= 0.5) + (progress >= 0.8))


def linear(progress: float) -> float:
    return 1.0 - 0.98 * progress


def triangle(progress: float) -> float:
    """A linear warm-up over a third of the run, then a linear decay."""
    return min(3 * progress, 1.5 * (1 - progress)) + 1e-3


# Data and optimizers.


def text(seed: int, part: slice = slice(None), batch: int = BATCH) -> Iterable[Batch]:
    return text_batches(s.text()[part], 40, batch, seed)


first_text = partial(text, part=slice(1_000_000))
other_text = partial(text, part=slice(2_000_000, None))


def images(seed: int, augment: Augment | None = None, batch: int = IMAGES) -> Iterable[Batch]:
    known = digits(seed)
    return image_batches(known.train_images, known.train_labels, batch, seed, augment)


augmented = partial(images, augment=crop_and_flip)


def noisy(inputs: Tensor, targets: Tensor) -> Batch:
    return inputs + 0.7 * torch.randn_like(inputs), targets


def on(subject: s.Make, data: Any) -> s.Make:
    """The same model on other data."""

    def make(seed: int) -> s.Subject:
        made = subject(seed)
        made.batches = iter(data(seed))
        return made

    return make


def through(subject: s.Make, change: Any) -> s.Make:
    def make(seed: int) -> s.Subject:
        made = subject(seed)
        made.batches = itertools.starmap(change, made.batches)
        return made

    return make


def decayed(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1)


def _trial(of: Trial, name: str, about: str, **settings: Any) -> Trial:
    return replace(of, name=f"{of.name}-{name}", about=about, **{"steps": STEPS} | settings)


TEXT, DIGITS = replace(default.TEXT, subject=language), replace(default.DIGITS, subject=vision)
GPT2, BERT = replace(default.GPT2, subject=gpt2), replace(default.BERT, subject=bert)
# At the rate of the narrower model, 1e-3, its loss jumps and its attention logits grow beyond 100. Without augmentation, it
# learns all images by heart, and then single batches have a hundred times the loss of the others.
VIT = replace(default.VIT, subject=on(vit, partial(augmented, batch=12)), rate=4e-4)
middle = {"event_step": STEPS // 2}
tuned = partial(s.pretrained, steps=500)
HEALTHY = (
    _trial(TEXT, "constant", "a constant rate"),
    _trial(TEXT, "cosine", "warm-up and cosine", schedule=warm_cosine, warmup=0),
    _trial(TEXT, "triangle", "a long warm-up and a linear decay", schedule=triangle, warmup=0),
    _trial(TEXT, "restarts", "cosines with warm restarts", schedule=restarts),
    _trial(TEXT, "drops", "the rate drops to a tenth, twice", schedule=drops),
    _trial(TEXT, "evaluated", "an evaluation every 250 steps, cosine", schedule=cosine, evaluates_every=250),
    _trial(TEXT, "other", "other text", subject=on(language, first_text), defect=d.new_batches(other_text), **middle),
    _trial(TEXT, "batch", "36 sequences a step instead of 24", defect=d.new_batches(partial(text, batch=36)), **middle),
    _trial(TEXT, "accumulation", "three batches of 8 a step, cosine", subject=partial(language, batch=8),
           accumulation=3, schedule=warm_cosine, warmup=0),
    _trial(TEXT, "fine-tuned", "fine-tuning on other text, linear decay",
           subject=on(tuned(on(language, first_text), rate=2.5e-3), other_text), rate=6e-4, schedule=linear),
    _trial(TEXT, "post", "post-norm", subject=partial(language, norm="post"), rate=1.5e-3, schedule=linear),
    _trial(TEXT, "decay", "a weight decay of 0.1, cosine", optimizer=decayed, schedule=cosine),
    _trial(TEXT, "bfloat16", "bfloat16 autocast", precision=torch.bfloat16, schedule=warm_cosine, warmup=0),
    _trial(TEXT, "resformer", "Llama-like, value residuals, 6 blocks", subject=s.llama, schedule=cosine),
    _trial(DIGITS, "constant", "a constant rate, long after the loss is zero"),
    _trial(DIGITS, "augmented", "shifted and mirrored, evaluated every 200 steps, cosine",
           subject=on(vision, augmented), schedule=warm_cosine, warmup=0, evaluates_every=200),
    _trial(DIGITS, "restarts", "cosines with warm restarts, augmented", subject=on(vision, augmented), schedule=restarts),
    _trial(DIGITS, "cleaner", "noisy images, then images as they are", subject=through(vision, noisy),
           defect=d.new_batches(images), schedule=linear, **middle),
    _trial(DIGITS, "batch", "96 images a step instead of 64, augmented", subject=on(vision, augmented),
           defect=d.new_batches(partial(augmented, batch=96)), **middle),
    _trial(DIGITS, "sgd", "SGD with momentum, the rate drops", subject=on(vision, augmented), optimizer=sgd, rate=0.03,
           schedule=drops),
    _trial(DIGITS, "fine-tuned", "fine-tuning on augmented images",
           subject=on(tuned(vision, rate=1.5e-3), augmented), rate=2e-4, schedule=linear),
    _trial(GPT2, "cosine", "dropout, warm-up and cosine", schedule=warm_cosine, warmup=0),
    _trial(GPT2, "evaluated", "dropout, an evaluation every 200 steps", evaluates_every=200),
    _trial(GPT2, "fine-tuned", "dropout, fine-tuning on other text, linear decay",
           subject=on(tuned(on(gpt2, first_text), rate=1.5e-3), other_text), rate=4e-4, schedule=linear),
    _trial(GPT2, "bfloat16", "dropout, bfloat16 autocast, restarts", precision=torch.bfloat16, schedule=restarts),
    _trial(GPT2, "other", "dropout, other text, cosine", subject=on(gpt2, first_text), defect=d.new_batches(other_text),
           schedule=cosine, **middle),
    _trial(BERT, "cosine", "dropout, padded, warm-up and cosine", schedule=warm_cosine, warmup=0),
    _trial(BERT, "evaluated", "dropout, padded, weight decay of 0.1, an evaluation every 500 steps", optimizer=decayed,
           evaluates_every=500),
    _trial(VIT, "cosine", "augmented, weight decay of 0.1, warm-up and cosine", optimizer=decayed,
           schedule=warm_cosine, warmup=0),
    _trial(VIT, "evaluated", "augmented, an evaluation every 250 steps, the rate drops", schedule=drops,
           evaluates_every=250),
)  # fmt: skip
HEALTHY = tuple(replace(trial, seed=101 + number) for number, trial in enumerate(HEALTHY))
