"""Trainings at default settings that no rule was tried on: other models, sizes, doses and seeds than in `trials.default`.

They were written down before the first of them ran. After a rule was changed because of them, they are not unseen any more.
"""

from __future__ import annotations

from functools import partial

from trials import defects as d
from trials import subjects as s
from trials.default import control

EVENT = 560
SEEDS = 95, 96

XL = control("xl", s.recurrent, "tsemon's Transformer-XL, 4 blocks", 2e-3)
BERT = control("bert-6", partial(s.bert, layers=6, width=40), "Hugging Face's BERT, 6 blocks, padded", 1.2e-3)
VIT = control("vit-6", partial(s.hugging_face_vit, layers=6, width=40), "Hugging Face's ViT, 6 blocks", 8e-4)
TEXT = control("text-7", partial(s.language, depth=7, width=48, heads=6), "tsemon's language model, 7 blocks", 2e-3)
TORCH = control("torch-6", partial(s.torch_language, depth=6, norm_first=True), "torch.nn, pre-norm, 6 blocks", 8e-4)
TWINS = XL, BERT, VIT, TEXT, TORCH

late, unseen = {"event_step": EVENT}, {"event_step": EVENT, "shows_in_loss": False}
FAILING = (
    XL.failing("xl-nan", "loss", "a weight becomes NaN", d.nan_weight, **late),
    XL.failing("xl-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    XL.failing("xl-decay", "norm", "a weight decay of -7", d.weight_decay(-7.0), **late),
    XL.failing("xl-rate", "diverge", "45 times the rate, unclipped", d.both(d.rate_times(45), d.no_clipping), **late),
    XL.failing("xl-same-batch", "data", "the same batch", d.same_batch, **unseen),
    XL.failing("xl-dead", "dead", "biases so negative that no ReLU passes", d.dead_biases, **late),
    BERT.failing("bert-6-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    BERT.failing("bert-6-qk", "entropy", "queries and keys times 30", d.queries_and_keys_times(30), **late),
    BERT.failing("bert-6-rate-tiny", "dead", "a thousandth of the rate", rate=1.2e-6),
    BERT.failing("bert-6-ascent", "diverge", "the loss has the wrong sign", d.loss_times(-1.0), **late),
    BERT.failing("bert-6-decay-25", "dead", "a weight decay of 25", d.weight_decay(25.0), **late),
    VIT.failing("vit-6-constant", "data", "one input for all", d.batches_through(d.constant_inputs), **late),
    VIT.failing("vit-6-inflated", "norm", "block 2's weights grow by 2.5 % a step", d.inflated(2, 1.025), **late),
    VIT.failing("vit-6-random", "diverge", "noise for inputs", d.batches_through(d.random_inputs), **late),
    VIT.failing("vit-6-forgotten", "dead", "the optimizer does not know the blocks", d.forgotten(*range(6))),
    VIT.failing("vit-6-rate", "diverge", "55 times the rate, unclipped", d.both(d.rate_times(55), d.no_clipping), **late),
    TEXT.failing("text-7-post", "tse", "post-norm, 18 blocks, no warm-up",
                 subject=partial(s.language, depth=18, width=36, ffn=96, norm="post"), rate=2.5e-3, warmup=0),
    TEXT.failing("text-7-attention", "rank", "7 blocks of attention alone",
                 subject=s.attention_only(partial(s.language, depth=7, width=48))),
    TEXT.failing("text-7-ascent", "diverge", "the loss has the wrong sign", d.loss_times(-1.0), **late),
    TEXT.failing("text-7-block", "norm", "block 1's weights times 8", d.block_times(1, 8.0), **late),
    TEXT.failing("text-7-rate-tiny", "dead", "a thousandth of the rate", rate=2e-6),
    TEXT.failing("text-7-qk", "entropy", "queries and keys times 15", d.queries_and_keys_times(15), **late),
    TORCH.failing("torch-6-post", "tse", "post-norm, 22 blocks",
                  subject=partial(s.torch_language, depth=22, norm_first=False)),
    TORCH.failing("torch-6-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    TORCH.failing("torch-6-rate-x80", "diverge", "80 times the rate, unclipped",
                  d.both(d.rate_times(80), d.no_clipping), **late),
)  # fmt: skip
