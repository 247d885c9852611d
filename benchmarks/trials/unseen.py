"""Trainings at default settings that no rule was tried on: other models, sizes, doses and seeds than in `trials.default`.

They were written down before the first of them ran. After a rule was changed because of them, they are not unseen any more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from trials import defects as d
from trials import subjects as s
from trials.default import control
from trials.recording import sgd

EVENT = 620
SEEDS = 91, 92

LLAMA = control("llama", s.llama, "tsemon's Llama with value residuals, 6 blocks", 2e-3)
FILL = control("fill", partial(s.masked, depth=8), "tsemon's text encoder, 8 blocks", 1.5e-3)
TORCH = control("torch", partial(s.torch_language, depth=8, norm_first=True), "torch.nn, pre-norm, 8 blocks", 1e-3)
GPT2 = control("gpt2-8", partial(s.gpt2, layers=8, width=40), "Hugging Face's GPT-2, 8 blocks", 1e-3)
SGD = replace(control("sgd", partial(s.vision, depth=7), "tsemon's ViT, 7 blocks, SGD", 0.03), optimizer=sgd)
TWINS = LLAMA, FILL, TORCH, GPT2, SGD

late, unseen = {"event_step": EVENT}, {"event_step": EVENT, "shows_in_loss": False}
FAILING = (
    LLAMA.failing("llama-nan", "loss", "a weight becomes NaN", d.nan_weight, **late),
    LLAMA.failing("llama-decay", "norm", "a weight decay of -6", d.weight_decay(-6.0), **late),
    LLAMA.failing("llama-inflated", "norm", "block 4's weights grow by 2 % a step", d.inflated(4, 1.02), **late),
    LLAMA.failing("llama-rate", "diverge", "50 times the rate, unclipped", d.both(d.rate_times(50), d.no_clipping), **late),
    LLAMA.failing("llama-same-batch", "data", "the same batch", d.same_batch, **unseen),
    LLAMA.failing("llama-decay-30", "dead", "a weight decay of 30", d.weight_decay(30.0), **late),
    FILL.failing("fill-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    FILL.failing("fill-qk", "entropy", "queries and keys times 20", d.queries_and_keys_times(20), **late),
    FILL.failing("fill-rate-tiny", "dead", "a thousandth of the rate", rate=1.5e-6),
    FILL.failing("fill-attention", "rank", "8 blocks of attention alone",
                 subject=s.attention_only(partial(s.masked, depth=8))),
    FILL.failing("fill-rate-x30", "entropy", "30 times the rate, no warm-up", rate=4.5e-2, warmup=0, clip_norm=math.inf),
    TORCH.failing("torch-post", "tse", "post-norm, 20 blocks, no warm-up",
                  subject=partial(s.torch_language, depth=20, norm_first=False), warmup=0),
    TORCH.failing("torch-rate-0", "dead", "the rate is 0", d.rate_times(0.0), **late),
    TORCH.failing("torch-graph-cut", "dead", "block 3's output is detached", d.cut_graph(3), **late),
    TORCH.failing("torch-ascent", "diverge", "the loss has the wrong sign", d.loss_times(-1.0), **late),
    GPT2.failing("gpt2-8-random", "diverge", "noise for inputs", d.batches_through(d.random_inputs), **late),
    GPT2.failing("gpt2-8-constant", "data", "one input for all", d.batches_through(d.constant_inputs), **late),
    GPT2.failing("gpt2-8-decay", "norm", "a weight decay of -10", d.weight_decay(-10.0), **late),
    GPT2.failing("gpt2-8-forgotten", "dead", "the optimizer does not know blocks 2 to 5", d.forgotten(2, 3, 4, 5)),
    GPT2.failing("gpt2-8-block", "norm", "block 5's weights times 10", d.block_times(5, 10.0), **late),
    SGD.failing("sgd-rate", "diverge", "40 times the rate, unclipped", d.both(d.rate_times(40), d.no_clipping), **late),
    SGD.failing("sgd-noise", "diverge", "batches of 2 at ten times the rate, unclipped",
                d.both(d.new_batches(lambda seed: s.vision(seed, depth=7, batch=2).batches), d.rate_times(10),
                       d.no_clipping), **late),
    SGD.failing("sgd-same-batch", "data", "the same batch", d.same_batch, **unseen),
    SGD.failing("sgd-post", "tse", "post-norm, 24 blocks, AdamW",
                subject=partial(s.vision, depth=24, width=32, ffn=64, norm="post"), rate=1.2e-3, warmup=15,
                optimizer=LLAMA.optimizer),
)  # fmt: skip
