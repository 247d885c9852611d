"""Trainings at default settings that no rule was tried on: other models, sizes, doses and seeds than in `trials.default`.

They were written down before the first of them ran. After a rule was changed because of them, they are not unseen any more.
"""

from __future__ import annotations

from functools import partial

from trials import defects as d
from trials import subjects as s
from trials.default import control

EVENT = 540
SEEDS = 111, 112

TEXT = control("text-9", partial(s.language, depth=9, width=44, ffn=120), "tsemon's language model, 9 blocks", 2e-3)
BERT = control("bert-5", partial(s.bert, layers=5, width=60), "Hugging Face's BERT, 5 blocks, padded", 1.2e-3)
GPT2 = control("gpt2-3", partial(s.gpt2, layers=3, width=64), "Hugging Face's GPT-2, 3 blocks, with dropout", 1.4e-3)
DIGITS = control(
    "digits-7", partial(s.vision, depth=7, width=48), "tsemon's vision transformer, pre-norm, 7 blocks", 1.3e-3
)
TORCH = control("torch-7", partial(s.torch_language, depth=7, norm_first=True), "torch.nn, pre-norm, 7 blocks", 9e-4)
TWINS = TEXT, BERT, GPT2, DIGITS, TORCH

late, unseen = {"event_step": EVENT}, {"event_step": EVENT, "shows_in_loss": False}
FAILING = (
    TEXT.failing("text-9-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    TEXT.failing("text-9-decay", "norm", "a weight decay of -9", d.weight_decay(-9.0), **late),
    TEXT.failing("text-9-inflated", "norm", "block 6's weights grow by 3.5 % a step", d.inflated(6, 1.035), **late),
    TEXT.failing("text-9-qk", "entropy", "queries and keys times 40", d.queries_and_keys_times(40), **late),
    TEXT.failing("text-9-rate", "diverge", "70 times the rate, unclipped",
                 d.both(d.rate_times(70), d.no_clipping), **late),
    TEXT.failing("text-9-nan", "loss", "a weight becomes NaN", d.nan_weight, **late),
    BERT.failing("bert-5-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    BERT.failing("bert-5-random", "diverge", "noise for inputs", d.batches_through(d.random_inputs), **late),
    BERT.failing("bert-5-ascent", "diverge", "the loss has the wrong sign", d.loss_times(-1.0), **late),
    BERT.failing("bert-5-decay-25", "dead", "a weight decay of 25", d.weight_decay(25.0), **late),
    BERT.failing("bert-5-forgotten", "dead", "the optimizer does not know the blocks", d.forgotten(*range(5))),
    BERT.failing("bert-5-same-batch", "data", "the same batch", d.same_batch, **unseen),
    GPT2.failing("gpt2-3-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    GPT2.failing("gpt2-3-decay-18", "dead", "a weight decay of 18", d.weight_decay(18.0), **late),
    GPT2.failing("gpt2-3-constant", "data", "one input for all", d.batches_through(d.constant_inputs), **late),
    GPT2.failing("gpt2-3-rate-tiny", "dead", "a thousandth of the rate", rate=1.4e-6),
    DIGITS.failing("digits-7-ascent", "diverge", "the loss has the wrong sign", d.loss_times(-1.0), **late),
    DIGITS.failing("digits-7-decay-24", "dead", "a weight decay of 24", d.weight_decay(24.0), **late),
    DIGITS.failing("digits-7-rate", "diverge", "70 times the rate, unclipped",
                   d.both(d.rate_times(70), d.no_clipping), **late),
    DIGITS.failing("digits-7-block", "norm", "block 4's weights times 12", d.block_times(4, 12.0), **late),
    DIGITS.failing("digits-7-same-batch", "data", "the same batch", d.same_batch, **unseen),
    TORCH.failing("torch-7-shuffled", "diverge", "targets of other inputs", d.batches_through(d.shuffled_targets), **late),
    TORCH.failing("torch-7-post-28", "tse", "post-norm, 28 blocks",
                  subject=partial(s.torch_language, depth=28, norm_first=False)),
    TORCH.failing("torch-7-cut", "dead", "block 3's output is detached", d.cut_graph(3)),
    TORCH.failing("torch-7-dead", "dead", "biases so negative that no ReLU passes", d.dead_biases, **late),
)  # fmt: skip
