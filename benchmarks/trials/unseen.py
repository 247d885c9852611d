"""Trainings at default settings that no rule was tried on: other models, sizes, doses and seeds than in `trials.default`.

They were written down before the first of them ran. After a rule was changed because of them, they are not unseen any more.
"""

from __future__ import annotations

from functools import partial

from trials import defects as d
from trials import subjects as s
from trials.default import control

EVENT = 560
SEEDS = 101, 102

TEXT = control(
    "text-6", partial(s.language, depth=6, width=52, ffn=140), "tsemon's language model, pre-norm, 6 blocks", 2e-3
)
MASKED = control(
    "masked-5",
    partial(s.masked, depth=5, width=44, ffn=120),
    "tsemon's text encoder, 5 blocks, a quarter hidden",
    1.5e-3,
)
GPT2 = control("gpt2-5", partial(s.gpt2, layers=5, width=52), "Hugging Face's GPT-2, 5 blocks, with dropout", 1.3e-3)
VIT = control("vit-5", partial(s.hugging_face_vit, layers=5, width=56), "Hugging Face's ViT, 5 blocks", 9e-4)
TORCH = control("torch-5", partial(s.torch_language, depth=5, norm_first=True), "torch.nn, pre-norm, 5 blocks", 1e-3)
TWINS = TEXT, MASKED, GPT2, VIT, TORCH

late, unseen = {"event_step": EVENT}, {"event_step": EVENT, "shows_in_loss": False}
FAILING = (
    TEXT.failing("text-6-ascent", "diverge", "the loss has the wrong sign", d.loss_times(-1.0), **late),
    TEXT.failing("text-6-inflated", "norm", "block 3's weights grow by 4 % a step", d.inflated(3, 1.04), **late),
    TEXT.failing("text-6-decay", "norm", "a weight decay of -7", d.weight_decay(-7.0), **late),
    TEXT.failing("text-6-qk", "entropy", "queries and keys times 30", d.queries_and_keys_times(30), **late),
    TEXT.failing("text-6-rate", "diverge", "50 times the rate, unclipped",
                 d.both(d.rate_times(50), d.no_clipping), **late),
    TEXT.failing("text-6-same-batch", "data", "the same batch", d.same_batch, **unseen),
    MASKED.failing("masked-5-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    MASKED.failing("masked-5-forgotten", "dead", "the optimizer does not know the blocks", d.forgotten(*range(5))),
    MASKED.failing("masked-5-rate-tiny", "dead", "a thousandth of the rate", rate=1.5e-6),
    MASKED.failing("masked-5-block", "norm", "block 1's weights times 10", d.block_times(1, 10.0), **late),
    MASKED.failing("masked-5-nan", "loss", "a weight becomes NaN", d.nan_weight, **late),
    GPT2.failing("gpt2-5-constant", "data", "one input for all", d.batches_through(d.constant_inputs), **late),
    GPT2.failing("gpt2-5-padding", "data", "nothing but padding", d.batches_through(d.only_padding), **unseen),
    GPT2.failing("gpt2-5-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    GPT2.failing("gpt2-5-decay-30", "dead", "a weight decay of 30", d.weight_decay(30.0), **late),
    GPT2.failing("gpt2-5-ascent", "diverge", "the loss has the wrong sign", d.loss_times(-1.0), **late),
    VIT.failing("vit-5-ascent", "diverge", "the loss has the wrong sign", d.loss_times(-1.0), **late),
    VIT.failing("vit-5-random", "diverge", "noise for inputs", d.batches_through(d.random_inputs), **late),
    VIT.failing("vit-5-rate", "diverge", "80 times the rate, unclipped",
                d.both(d.rate_times(80), d.no_clipping), **late),
    VIT.failing("vit-5-nan", "loss", "a weight becomes NaN", d.nan_weight, **late),
    TORCH.failing("torch-5-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    TORCH.failing("torch-5-post-24", "tse", "post-norm, 24 blocks",
                  subject=partial(s.torch_language, depth=24, norm_first=False)),
    TORCH.failing("torch-5-decay-22", "dead", "a weight decay of 22", d.weight_decay(22.0), **late),
    TORCH.failing("torch-5-dead", "dead", "biases so negative that no ReLU passes", d.dead_biases, **late),
    TORCH.failing("torch-5-rate", "diverge", "60 times the rate, unclipped",
                  d.both(d.rate_times(60), d.no_clipping), **late),
)  # fmt: skip
