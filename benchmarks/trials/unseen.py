"""Trainings at default settings that no rule was tried on: other models, sizes, doses and seeds than in `trials.default`.

They were written down before the first of them ran. After a rule was changed because of them, they are not unseen any more.
"""

from __future__ import annotations

import math
from functools import partial

from trials import defects as d
from trials import subjects as s
from trials.default import control

EVENT = 540
SEEDS = 97, 98

LLAMA = control(
    "llama-5", partial(s.llama, depth=5, width=40, ffn=104), "tsemon's Llama with value residuals, 5 blocks", 1.6e-3
)
ALBERT = control(
    "albert-5", partial(s.albert, layers=5), "Hugging Face's ALBERT, 5 layers of one set of weights, padded", 1.2e-3
)
GPT2 = control("gpt2-6", partial(s.gpt2, layers=6, width=56), "Hugging Face's GPT-2, 6 blocks, with dropout", 1.2e-3)
DIGITS = control("digits-8", partial(s.vision, depth=8), "tsemon's vision transformer, 8 blocks", 1e-3)
TORCH = control(
    "torch-4-post", partial(s.torch_language, depth=4, norm_first=False), "torch.nn, post-norm, 4 blocks", 7e-4
)
TWINS = LLAMA, ALBERT, GPT2, DIGITS, TORCH

late, unseen = {"event_step": EVENT}, {"event_step": EVENT, "shows_in_loss": False}
FAILING = (
    LLAMA.failing("llama-5-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    LLAMA.failing("llama-5-decay", "norm", "a weight decay of -9", d.weight_decay(-9.0), **late),
    LLAMA.failing("llama-5-qk", "entropy", "queries and keys times 20", d.queries_and_keys_times(20), **late),
    LLAMA.failing("llama-5-same-batch", "data", "the same batch", d.same_batch, **unseen),
    LLAMA.failing("llama-5-forgotten", "dead", "the optimizer does not know the blocks", d.forgotten(*range(5))),
    LLAMA.failing("llama-5-rate", "diverge", "70 times the rate, unclipped",
                  d.both(d.rate_times(70), d.no_clipping), **late),
    ALBERT.failing("albert-5-nan", "loss", "a weight becomes NaN", d.nan_weight, **late),
    ALBERT.failing("albert-5-rate", "diverge", "60 times the rate, unclipped",
                   d.both(d.rate_times(60), d.no_clipping), **late),
    ALBERT.failing("albert-5-ascent", "diverge", "the loss has the wrong sign", d.loss_times(-1.0), **late),
    GPT2.failing("gpt2-6-constant", "data", "one input for all", d.batches_through(d.constant_inputs), **late),
    GPT2.failing("gpt2-6-padding", "data", "nothing but padding", d.batches_through(d.only_padding), **unseen),
    GPT2.failing("gpt2-6-ascent", "diverge", "the loss has the wrong sign", d.loss_times(-1.0), **late),
    GPT2.failing("gpt2-6-decay-25", "dead", "a weight decay of 25", d.weight_decay(25.0), **late),
    GPT2.failing("gpt2-6-block", "norm", "block 2's weights times 9", d.block_times(2, 9.0), **late),
    GPT2.failing("gpt2-6-rate-x30", "entropy", "30 times the rate, no warm-up", rate=3.6e-2, warmup=0, clip_norm=math.inf),
    DIGITS.failing("digits-8-random", "diverge", "noise for inputs", d.batches_through(d.random_inputs), **late),
    DIGITS.failing("digits-8-inflated", "norm", "block 5's weights grow by 3 % a step", d.inflated(5, 1.03), **late),
    DIGITS.failing("digits-8-attention", "rank", "8 blocks of attention alone",
                   subject=s.attention_only(partial(s.vision, depth=8))),
    DIGITS.failing("digits-8-post", "tse", "post-norm, 26 blocks",
                   subject=partial(s.vision, depth=26, width=32, ffn=64, norm="post"), rate=1.2e-3, warmup=15),
    DIGITS.failing("digits-8-rate-0", "dead", "the rate is 0", d.rate_times(0.0), **late),
    TORCH.failing("torch-4-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    TORCH.failing("torch-4-post-20", "tse", "post-norm, 20 blocks",
                  subject=partial(s.torch_language, depth=20, norm_first=False)),
    TORCH.failing("torch-4-rate-tiny", "dead", "a thousandth of the rate", rate=7e-7),
    TORCH.failing("torch-4-dead", "dead", "biases so negative that no ReLU passes", d.dead_biases, **late),
    TORCH.failing("torch-4-nan", "loss", "a weight becomes NaN", d.nan_weight, **late),
)  # fmt: skip
