"""Trainings at default settings that no rule was tried on: other models, sizes, doses and seeds than in `trials.default`.

They were written down before the first of them ran. After a rule was changed because of them, they are not unseen any more.
"""

from __future__ import annotations

from functools import partial

from trials import defects as d
from trials import subjects as s
from trials.default import control

EVENT = 460
SEEDS = 121, 122

TEXT = control("text-6", partial(s.language, depth=6, width=56, ffn=150), "tsemon's language model, 6 blocks", 2.2e-3)
LLAMA = control("llama-4", partial(s.llama, depth=4), "tsemon's Llama with value residuals, 4 blocks", 1.8e-3)
GPT2 = control("gpt2-5", partial(s.gpt2, layers=5, width=44), "Hugging Face's GPT-2, 5 blocks, with dropout", 1.6e-3)
BERT = control("bert-7", partial(s.bert, layers=7, width=36), "Hugging Face's BERT, 7 blocks, padded", 1.1e-3)
VIT = control("vit-7", partial(s.hugging_face_vit, layers=7, width=44), "Hugging Face's ViT, 7 blocks", 7e-4)
TWINS = TEXT, LLAMA, GPT2, BERT, VIT

late, unseen = {"event_step": EVENT}, {"event_step": EVENT, "shows_in_loss": False}
FAILING = (
    TEXT.failing("text-6-random", "diverge", "noise for inputs", d.batches_through(d.random_inputs), **late),
    TEXT.failing("text-6-decay-16", "dead", "a weight decay of 16", d.weight_decay(16.0), **late),
    TEXT.failing("text-6-inflated", "norm", "block 1's weights grow by 2.5 % a step", d.inflated(1, 1.025), **late),
    TEXT.failing("text-6-same-batch", "data", "the same batch", d.same_batch, **unseen),
    TEXT.failing("text-6-post-26", "tse", "post-norm, 26 blocks",
                 subject=partial(s.language, depth=26, width=36, ffn=90, norm="post"), rate=2.5e-3, warmup=15),
    LLAMA.failing("llama-4-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    LLAMA.failing("llama-4-nan", "loss", "a weight becomes NaN", d.nan_weight, **late),
    LLAMA.failing("llama-4-rate", "diverge", "50 times the rate, unclipped",
                  d.both(d.rate_times(50), d.no_clipping), **late),
    LLAMA.failing("llama-4-decay", "norm", "a weight decay of -10", d.weight_decay(-10.0), **late),
    LLAMA.failing("llama-4-forgotten", "dead", "the optimizer does not know the blocks", d.forgotten(*range(4))),
    GPT2.failing("gpt2-5-ascent", "diverge", "the loss has the wrong sign", d.loss_times(-1.0), **late),
    GPT2.failing("gpt2-5-qk", "entropy", "queries and keys times 30", d.queries_and_keys_times(30), **late),
    GPT2.failing("gpt2-5-decay", "norm", "a weight decay of -11", d.weight_decay(-11.0), **late),
    GPT2.failing("gpt2-5-rate-0", "dead", "the rate is 0", d.rate_times(0.0), **late),
    GPT2.failing("gpt2-5-cut", "dead", "block 1's output is detached", d.cut_graph(1)),
    BERT.failing("bert-7-constant", "data", "one input for all", d.batches_through(d.constant_inputs), **late),
    BERT.failing("bert-7-nan", "loss", "a weight becomes NaN", d.nan_weight, **late),
    BERT.failing("bert-7-inflated", "norm", "block 5's weights grow by 4 % a step", d.inflated(5, 1.04), **late),
    BERT.failing("bert-7-rate", "diverge", "80 times the rate, unclipped",
                 d.both(d.rate_times(80), d.no_clipping), **late),
    BERT.failing("bert-7-rate-tiny", "dead", "a thousandth of the rate", rate=1.1e-6),
    VIT.failing("vit-7-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    VIT.failing("vit-7-random", "diverge", "noise for inputs", d.batches_through(d.random_inputs), **late),
    VIT.failing("vit-7-decay-22", "dead", "a weight decay of 22", d.weight_decay(22.0), **late),
    VIT.failing("vit-7-qk", "entropy", "queries and keys times 50", d.queries_and_keys_times(50), **late),
    VIT.failing("vit-7-constant", "data", "one input for all", d.batches_through(d.constant_inputs), **late),
)  # fmt: skip
