"""The trainings: healthy ones, and each of the failing ones beside its healthy twin."""

from __future__ import annotations

import hashlib
import math
from functools import partial

import torch
from torch import nn

from trials import defects as d
from trials import subjects as s
from trials.recording import Trial, sgd


def _cosine(progress: float) -> float:
    return 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2


def _restarts(progress: float) -> float:
    return _cosine(3 * progress % 1.0)


TEXT = Trial(name="text-5", subject=s.language, about="language model, pre-norm, 5 blocks")
TEXT_POST = Trial(
    name="text-5-post",
    subject=partial(s.language, norm="post"),
    about="language model, post-norm, 5 blocks",
    rate=1.5e-3,
    warmup=40,
    seed=12,
)
TEXT_14 = Trial(
    name="text-14",
    subject=partial(s.language, depth=14),
    about="language model, pre-norm, 14 blocks",
    rate=1.2e-3,
    steps=240,
    seed=13,
)
TEXT_22 = Trial(
    name="text-22",
    subject=partial(s.language, depth=22, width=32, ffn=80),
    about="language model, pre-norm, 22 blocks",
    rate=3e-3,
    steps=200,
    seed=14,
)
TEXT_30 = Trial(
    name="text-30",
    subject=partial(s.language, depth=30, width=32, ffn=80),
    about="language model, pre-norm, 30 blocks",
    rate=1.2e-3,
    steps=180,
    seed=26,
)
TORCH_18 = Trial(
    name="torch-18",
    subject=partial(s.torch_language, depth=18, norm_first=True),
    about="language model of torch.nn, pre-norm, 18 blocks",
    rate=8e-4,
    steps=200,
    seed=15,
)
DIGITS = Trial(
    name="digits-5", subject=s.vision, about="vision transformer, pre-norm, 5 blocks", rate=1.5e-3, steps=260, seed=16
)
DIGITS_20 = Trial(
    name="digits-20",
    subject=partial(s.vision, depth=20, width=32, ffn=64),
    about="vision transformer, pre-norm, 20 blocks",
    rate=1.2e-3,
    steps=200,
    seed=17,
)
DIGITS_40 = Trial(
    name="digits-40",
    subject=partial(s.vision, depth=40, width=32, ffn=64, batch=12),
    about="vision transformer, pre-norm, 40 blocks",
    rate=1e-3,
    steps=200,
    seed=18,
)
FILL = Trial(
    name="fill-3",
    subject=s.masked,
    about="text encoder, pre-norm, 3 blocks, fills in bytes",
    seed=19,
)
RELU = Trial(
    name="relu-5", subject=partial(s.perceptron, depth=5), about="ReLU perceptron, 5 layers", rate=1.5e-3, seed=21
)
TANH = Trial(
    name="tanh-10",
    subject=partial(s.perceptron, depth=10, activation=nn.Tanh),
    about="tanh perceptron, 10 layers",
    rate=1.5e-3,
    seed=22,
)
SGD = Trial(
    name="digits-5-sgd",
    subject=s.vision,
    about="vision transformer, 5 blocks, SGD with momentum",
    optimizer=sgd,
    rate=0.03,
    steps=260,
    seed=23,
)
COPYING = Trial(
    name="copying", subject=s.repeated, about="copies rows of letters, with sharp heads", rate=3e-3, steps=400, seed=49
)
VICREG = Trial(
    name="vicreg",
    subject=partial(s.self_supervised, rule=s.vicreg),
    about="self-supervised: VICReg on digits",
    rate=1e-3,
    seed=25,
)

TWINS = (
    TEXT, TEXT_POST, TEXT_14, TEXT_22, TEXT_30, TORCH_18,
    DIGITS, DIGITS_20, DIGITS_40, FILL, RELU, TANH, SGD, COPYING, VICREG,
)  # fmt: skip

ODD = (
    Trial(name="warmup-180", subject=s.language, about="a long warm-up", warmup=180, seed=31),
    Trial(name="cosine", subject=s.language, about="the rate falls along a cosine", schedule=_cosine, seed=32),
    Trial(name="restarts", subject=s.vision, about="three cosines, warm restarts", schedule=_restarts, seed=33),
    Trial(name="batch-2", subject=partial(s.language, batch=2), about="two sequences a step", rate=1e-3, seed=34),
    Trial(name="frozen-low", subject=s.language, about="the lower two blocks frozen on purpose",
          frozen=("blocks.0", "blocks.1", "embed"), seed=35),
    Trial(name="bfloat16", subject=s.language, about="bfloat16 autocast", precision=torch.bfloat16, steps=200, seed=36),
    Trial(name="gpt2", subject=s.gpt2, about="Hugging Face's GPT-2, dropout", rate=1.5e-3, seed=37),
    Trial(name="bert", subject=s.bert, about="Hugging Face's BERT, padded", rate=1.5e-3, seed=38),
    Trial(name="accumulation", subject=partial(s.language, batch=4), about="three batches a step", accumulation=3, steps=240,
          seed=39),
    Trial(name="resumed", subject=s.language, about="a second attempt goes on at step 140", resumed_at=140, seed=40),
    Trial(name="optimizer-reset", subject=s.language, about="Adam forgets its moments at step 150",
          defect=d.reset_optimizer, event_step=150, seed=53),
    Trial(name="fine-tuned", subject=partial(s.fine_tuning, steps=250), about="fine-tuning on other text", rate=3e-4,
          seed=41),
    Trial(name="resformer", subject=s.llama, about="Llama-like, value residuals, 6 blocks", seed=42),
    Trial(name="svformer", subject=partial(s.llama, preset="svformer-2m", depth=9), about="values of the first block alone",
          rate=1.5e-3, steps=200, seed=43),
    Trial(name="transformer-xl", subject=s.recurrent, about="Transformer-XL, with a memory", seed=44),
    Trial(name="text-14-de-escalated", subject=partial(s.language, depth=14, norm="post", tau=0.5),
          about="post-norm, 14 blocks, de-escalated", rate=1e-3, steps=200, seed=45),
    Trial(name="digits-20-de-escalated", subject=partial(s.vision, depth=20, width=32, ffn=64, norm="post", tau=1.0),
          about="post-norm, 20 blocks, de-escalated", rate=6e-4, steps=200, seed=46),
    Trial(name="converged", subject=s.vision, about="long after the loss is zero", rate=1.5e-3, steps=700, every=10,
          seed=47),
    Trial(name="modular", subject=s.modular, about="products modulo 59: a long plateau", rate=1e-3, steps=900, every=10,
          seed=48),
    Trial(name="small-batches", subject=partial(s.vision, batch=8), about="small batches at a low rate", rate=4e-4, seed=50),
    Trial(name="slow", subject=s.language, about="a rate ten times too small", rate=2e-4, seed=51),
    Trial(name="text-14-post", subject=partial(s.language, depth=14, norm="post"),
          about="post-norm, 14 blocks: tokens grow alike and part again", rate=1.2e-3, steps=240, seed=13),
    Trial(name="text-22-post-escapes", subject=partial(s.language, depth=22, width=32, ffn=80, norm="post"),
          about="post-norm, 22 blocks, a low rate: the same", rate=1.2e-3, steps=200, seed=14),
    Trial(name="branch-norm", subject=partial(s.language, norm="branch", activation="relu"), about="norms on the branches",
          rate=1.5e-3, seed=52),
)  # fmt: skip

TSE = (
    TEXT_22.failing("text-22-post", "tse", "post-norm, 22 blocks",
                    subject=partial(s.language, depth=22, width=32, ffn=80, norm="post")),
    TEXT_30.failing("text-30-post", "tse", "post-norm, 30 blocks",
                    subject=partial(s.language, depth=30, width=32, ffn=80, norm="post")),
    TORCH_18.failing("torch-18-post", "tse", "torch.nn's layers, post-norm, 18 blocks",
                     subject=partial(s.torch_language, depth=18, norm_first=False)),
    DIGITS_20.failing("digits-20-post", "tse", "post-norm, 20 blocks",
                      subject=partial(s.vision, depth=20, width=32, ffn=64, norm="post")),
    DIGITS_40.failing("digits-40-post", "tse", "post-norm, 40 blocks",
                      subject=partial(s.vision, depth=40, width=32, ffn=64, batch=12, norm="post")),
    TEXT_POST.failing("text-5-post-rate", "tse", "post-norm, 5 blocks, ten times the rate", rate=1.5e-2, warmup=0),
)  # fmt: skip
ENTROPY = (
    TEXT.failing("rate-x25", "entropy", "25 times the rate, no warm-up", rate=6e-2, warmup=0, clip_norm=math.inf),
    TEXT.failing("rate-creeps", "entropy", "the rate rises to 80 times its value", rate=0.2, warmup=270, clip_norm=math.inf),
    DIGITS.failing("digits-rate", "entropy", "50 times the rate, no warm-up", rate=7.5e-2, warmup=0, clip_norm=math.inf),
    COPYING.failing("copying-rate", "entropy", "20 times the rate, no warm-up", rate=6e-2, warmup=0, clip_norm=math.inf),
    COPYING.failing("copying-qk-x12", "entropy", "queries and keys start 12 times too large", d.queries_and_keys_times(12)),
    DIGITS.failing("qk-x12", "entropy", "queries and keys start 12 times too large", d.queries_and_keys_times(12)),
    DIGITS.failing("qk-x25-late", "entropy", "queries and keys times 25 from step 120 on", d.queries_and_keys_times(25),
                   event_step=120),
)  # fmt: skip
RANK = (
    TEXT_14.failing("attention-only", "rank", "14 blocks of attention alone",
                    subject=s.attention_only(partial(s.language, depth=14))),
    DIGITS.failing("digits-attention-only", "rank", "5 blocks of attention alone", subject=s.attention_only(s.vision)),
    VICREG.failing("vicreg-views-only", "rank", "views have to agree, and nothing else",
                   d.loss_is(partial(s.vicreg, spread=0.0)), shows_in_loss=False),
    VICREG.failing("simsiam-no-stop", "rank", "SimSiam whose gradients flow through both views",
                   d.loss_is(partial(s.simsiam, stops=False)), shows_in_loss=False),
    VICREG.failing("vicreg-no-variance", "rank", "no variance term from step 120 on",
                   d.loss_is(partial(s.vicreg, spread=0.0)), event_step=120, shows_in_loss=False),
)  # fmt: skip
NORM = (
    TEXT.failing("decay-negative", "norm", "a weight decay of -4", d.weight_decay(-4.0)),
    TEXT.failing("decay-negative-late", "norm", "a weight decay of -8 from step 100 on", d.weight_decay(-8.0),
                 event_step=100),
    DIGITS.failing("digits-decay-negative", "norm", "a weight decay of -12", d.weight_decay(-12.0)),
    TEXT.failing("block-inflated", "norm", "one block's weights grow by 3 % a step from step 80 on", d.inflated(2, 1.03),
                 event_step=80),
    TANH.failing("tanh-rate", "norm", "100 times the rate", rate=0.15, clip_norm=math.inf),
)  # fmt: skip
DEAD = (
    DIGITS.failing("blocks-forgotten", "dead", "the optimizer does not know the blocks", d.forgotten(0, 1, 2, 3, 4)),
    TEXT.failing("rate-0", "dead", "the rate is 0 from step 80 on", d.rate_times(0.0), event_step=80),
    RELU.failing("relu-dead", "dead", "biases minus 8 at step 70", d.dead_biases, event_step=70),
    RELU.failing("relu-rate", "dead", "400 times the rate for 8 steps, unclipped, at step 70",
                 d.both(d.rate_times(400, for_steps=8), d.no_clipping), event_step=70),
    TANH.failing("sigmoid-10", "dead", "sigmoids in place of tanh",
                 subject=partial(s.perceptron, depth=10, activation=nn.Sigmoid)),
    TEXT.failing("decay-20", "dead", "a weight decay of 20", d.weight_decay(20.0)),
    TEXT_14.failing("graph-cut", "dead", "block 11's output is detached", d.cut_graph(11)),
)  # fmt: skip
DIVERGE = (
    TEXT.failing("rate-x40-late", "diverge", "40 times the rate from step 130 on", d.rate_times(40), event_step=130),
    DIGITS.failing("digits-rate-x60-late", "diverge", "60 times the rate from step 110 on, unclipped",
                   d.both(d.rate_times(60), d.no_clipping), event_step=110),
    TEXT.failing("targets-shuffled", "diverge", "targets of other inputs from step 160 on",
                 d.batches_through(d.shuffled_targets), event_step=160),
    FILL.failing("fill-nan", "diverge", "a weight becomes NaN at step 140", d.nan_weight, event_step=140),
    DIGITS.failing("inputs-random", "diverge", "noise for inputs from step 140 on", d.batches_through(d.random_inputs),
                   event_step=140),
    TEXT.failing("spike", "diverge", "60 times the rate for 2 steps at step 150", d.rate_times(60, for_steps=2),
                 event_step=150, shows_in_loss=False),
    SGD.failing("sgd-rate", "diverge", "60 times the rate, unclipped", rate=2.0, clip_norm=math.inf),
    DIGITS.failing("ascent", "diverge", "the loss has the wrong sign from step 120 on", d.loss_times(-1.0), event_step=120),
)  # fmt: skip
DATA = (
    TEXT.failing("same-batch", "data", "the same batch from step 120 on", d.same_batch, event_step=120, shows_in_loss=False),
    DIGITS.failing("same-batch-digits", "data", "the same batch from step 100 on", d.same_batch, event_step=100,
                   shows_in_loss=False),
    TEXT.failing("four-batches", "data", "the same four batches from step 100 on", d.few_batches(4), event_step=100,
                 shows_in_loss=False),
    DIGITS.failing("inputs-constant", "data", "one input for all from step 120 on", d.batches_through(d.constant_inputs),
                   event_step=120),
    TEXT.failing("only-padding", "data", "nothing but padding from step 150 on", d.batches_through(d.only_padding),
                 event_step=150, shows_in_loss=False),
    DIGITS.failing("one-class", "data", "one class for all from step 120 on", d.batches_through(d.one_class),
                   event_step=120, shows_in_loss=False),
)  # fmt: skip
FRESH = (
    TEXT.failing("sees-the-future", "fresh", "no causal mask", d.sees_the_future, shows_in_loss=False),
    TEXT.failing("targets-are-inputs", "fresh", "the targets are the inputs", d.batches_through(d.own_targets),
                 shows_in_loss=False),
    TEXT.failing("block-ascends", "fresh", "one block's gradients have the wrong sign from step 100 on",
                 d.gradients_times(-1.0, 2), event_step=100),
    SGD.failing("no-zero-grad", "fresh", "gradients are never zeroed, nor clipped", d.no_zero_grad, clip_norm=math.inf),
    DIGITS.failing("block-new", "fresh", "one block's weights are drawn again at step 150", d.new_block(1), event_step=150,
                   shows_in_loss=False),
    TEXT.failing("norm-zeroed", "fresh", "the last norm's gain and bias are zero from step 120 on", d.zeroed("norm"),
                 event_step=120),
    TEXT.failing("embedding-zero", "fresh", "token embeddings are zero and stay so", d.zeroed("embed")),
    TEXT.failing("float16", "fresh", "weights and Adam's moments in float16", d.half_precision, clip_norm=math.inf),
)  # fmt: skip

TRIALS = TWINS + ODD + TSE + ENTROPY + RANK + NORM + DEAD + DIVERGE + DATA + FRESH

KEPT_BACK = {
    trial.name for trial in TRIALS if trial not in TWINS and hashlib.sha256(trial.name.encode()).digest()[0] % 2
}
"""Drawn by their names: whoever chooses thresholds looks at the others alone."""
