"""A training as the test's own hooks capture it, and the expected measures in float64.

Axes: B samples, n tokens, d width, H heads, Q queries, K keys.
"""

import copy
import math
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tsemon
from tests.frames import frames_in
from tests.setups.harness import Footprint
from tests.tsemon.measures import oracle

NUM_STEPS = 3
SCALE = 1024.0
HIDDEN = -9000.0
"""A score below this belongs to a masked key. Old code subtracts 10,000; no unmasked score here is so low."""

ALONE = re.compile(r"(^|\.)(pos|\w*emb)\w*$")


@dataclass(frozen=True)
class Attention:
    """Scores (B, H, Q, K), and True where a key is visible."""

    scores: np.ndarray
    visible: np.ndarray


class AttentionSeen(TorchDispatchMode):
    """Records calls of PyTorch's attention and softmax kernels, whichever function the library called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        if name in ("_softmax", "_safe_softmax"):
            self._keep_scores(args[0], args[1])
        elif name == "_scaled_dot_product_flash_attention_for_cpu":
            self._keep_call(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _keep_scores(self, scores, dim):
        if scores.ndim >= 3 and dim in (-1, scores.ndim - 1):
            self._keep(scores.detach().double().reshape(scores.shape[0], -1, *scores.shape[-2:]))

    def _keep_call(self, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
        query, key = query.detach().double(), key.detach().double()
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query @ key.mT * (scale or 1 / math.sqrt(query.shape[-1]))
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask.detach()
        if is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        self._keep(scores)

    def _keep(self, scores):
        with torch.utils._python_dispatch._disable_current_modes():
            scores = scores.numpy().copy()
        self.calls.append(Attention(scores, scores > HIDDEN))


@contextmanager
def looking(subject, model=None):
    """Record the first hidden state at each place, and all attention calls."""
    states, attentions = [[None] * len(known.places) for known in subject.stacks], AttentionSeen()
    names = {id(module): name for name, module in subject.model.named_modules()}

    def keep(mine, values):
        """The n-th call of a module fills the n-th of its places in each stack."""
        filled = set()
        for number, entry, pick in mine:
            if number not in filled and states[number][entry] is None:
                filled.add(number)
                states[number][entry] = None if values[pick] is None else values[pick].detach().clone()

    places = {}
    for number, known in enumerate(subject.stacks):
        for entry, place in enumerate(known.places):
            key = (names[id(place.module)], place.is_input)
            places.setdefault(key, []).append((number, entry, place.pick))
    with ExitStack() as handles:
        for (name, is_input), mine in places.items():
            module = (model or subject.model).get_submodule(name)
            if is_input:
                handle = module.register_forward_pre_hook(
                    lambda _, args, kwargs, mine=mine: keep(mine, dict(enumerate([*args, *kwargs.values()])) | kwargs),
                    with_kwargs=True,
                )
            else:
                handle = module.register_forward_hook(
                    lambda _, args, output, mine=mine: keep(
                        mine, output if isinstance(output, tuple | list) else [output]
                    )
                )
            handles.callback(handle.remove)
        handles.enter_context(attentions)
        yield states, attentions.calls


@dataclass
class Step:
    """Everything recorded in one step."""

    batch: dict
    states: list
    attentions: list
    before: dict
    gradients: dict
    after: dict


class Trainer:
    """The training, the same with and without hooks and tsemon."""

    def __init__(self, specimen):
        torch.manual_seed(0)
        self.subject = subject = specimen.build()
        subject.model.train()
        self.optimizer = subject.optimizer([p for p in subject.model.parameters() if p.requires_grad])
        torch.manual_seed(1)

    def step(self, number, forward=None):
        """Return the mean loss over the step's passes. `forward` replaces the first forward pass."""
        subject, losses = self.subject, []
        self.optimizer.zero_grad()
        for micro in range(subject.num_passes):
            batch = subject.batch(number * subject.num_passes + micro)
            output = forward(batch) if forward and micro == 0 else subject.model(**batch)
            loss = subject.loss(output) / subject.num_passes
            loss.backward()
            losses.append(loss.detach())
        self.gradients = {name: _numpy(p.grad) for name, p in subject.model.named_parameters() if p.grad is not None}
        if subject.clip is not None:
            torch.nn.utils.clip_grad_norm_(subject.model.parameters(), subject.clip)
        self.optimizer.step()
        return torch.stack(losses).sum()

    @property
    def model(self):
        return self.subject.model

    @property
    def optimizers(self):
        return [self.optimizer]

    def left(self, losses):
        """Losses, parameters, buffers and random state."""
        state = {name: value.clone() for name, value in self.subject.model.state_dict().items()}
        return {"losses": torch.stack(losses), "random state": torch.get_rng_state(), **state}


def seen_by_hooks(specimen):
    """Train without tsemon. Returns the subject, its final state, and the expected values per step and view."""
    trainer, steps, losses = Trainer(specimen), [], []
    subject = trainer.subject
    for number in range(NUM_STEPS):
        kept = {}

        def forward(batch, kept=kept):
            with looking(subject) as (states, attentions):
                output = subject.model(**batch)
            kept.update(batch=batch, states=states, attentions=attentions)
            return output

        before = _thetas(subject.model)
        losses.append(trainer.step(number, forward))
        steps.append(Step(**kept, before=before, gradients=trainer.gradients, after=_thetas(subject.model)))
        if number == 0:
            saturated = [_states_of_copy(subject, scale) for scale in (1.0, SCALE)]
    expected = [
        [Expected(subject, view, step, None if number else saturated).values() for view in subject.all_views()]
        for number, step in enumerate(steps)
    ]
    return subject, trainer.left(losses), expected


def _states_of_copy(subject, scale):
    """Hidden states of the first batch in eval mode, in a copy with scaled parameters."""
    model = copy.deepcopy(subject.model).eval()
    with torch.random.fork_rng(), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
        with looking(subject, model) as (states, _):
            model(**subject.batch(0))
    return states


def _numpy(tensor):
    return tensor.detach().double().numpy().copy()


def _thetas(model):
    return {name: _numpy(p) for name, p in model.named_parameters()}


def seen_by_tsemon(specimen, folder):
    """Train with tsemon. Returns the final state, frames, status, and what tsemon left behind after `close`."""
    trainer, losses = Trainer(specimen), []
    before = Footprint(trainer)
    with tsemon.attach(
        trainer.subject.model,
        trainer.optimizer,
        **{"run": "r", "every": 1, "attention_rows": "all", "spool_dir": folder} | trainer.subject.options,
    ) as monitor:
        for number in range(NUM_STEPS):
            losses.append(trainer.step(number))
            monitor.step(loss=losses[-1])
    return trainer.left(losses), frames_in(folder), monitor.status, Footprint(trainer).differs_from(before)


class Expected:
    """The measures of one step by definition, for one view of the stacks."""

    def __init__(self, subject, view, step, saturated):
        self.subject, self.view, self.step, self.saturated = subject, view, step, saturated
        self.stacks = [subject.stacks[number] for number in view]
        names = {id(p): name for name, p in subject.model.named_parameters()}
        taken, self.names = set(), []
        for part in (part for known in self.stacks for part in known.parts):
            own = {names[id(p)]: p for module in part for p in module.parameters() if p.numel() > 1}
            self.names.append([name for name in own if name not in taken])
            taken |= own.keys()
        embeddings = [m for m in subject.model.modules() if isinstance(m, torch.nn.Embedding)]
        embedded = {names[id(p)] for m in embeddings for p in m.parameters()}
        # Single parameters outside the blocks, such as `pos_embed`.
        embedded |= {name for name in names.values() if name not in taken and ALONE.search(name)}
        self.total = [name for name, p in subject.model.named_parameters() if p.numel() > 1 and name not in embedded]
        self.has_embeddings_inside = bool(taken & embedded)

    def values(self):
        """Metric to a value per block, a list of values per stack, or one value for the model."""
        found = {
            "token_similarity": self.of_sequences(oracle.token_similarity),
            "token_diversity": self.of_sequences(oracle.token_diversity),
            "effective_rank": self.of_first_sequence(oracle.effective_rank),
            **self.of_attention(),
            "param_norm": [oracle.norm(self.thetas(self.step.after, own)) if own else math.nan for own in self.names],
            "grad_norm": [self.gradient_norm(own) for own in self.names],
            "update_norm": self.updates(oracle.update_norm),
            "update_ratio": self.updates(oracle.update_ratio),
        }
        if not self.has_embeddings_inside:
            found["total_param_norm"] = oracle.norm(self.thetas(self.step.after, self.total))
            found["total_grad_norm"] = self.gradient_norm(self.total)
        if self.saturated is not None:
            found["saturation"] = self.saturation()
        return found

    # Hidden states: a list per stack.

    def entries(self, states, measure, **which):
        """measure: a function of the list of sequences in one hidden state."""
        return [
            [math.nan if x is None else measure(self.sequences(known, x, **which)) for x in states[number]]
            for number, known in zip(self.view, self.stacks, strict=True)
        ]

    def sequences(self, known, x, rows=math.inf):
        x = known.layout(x).double()
        places = known.sequences(self.step.batch, *x.shape[:2])
        return [x[sample, where].numpy() for sample, where in places if sample < rows]

    def of_sequences(self, measure):
        return self.entries(self.step.states, lambda found: oracle.mean_of_known([measure(x) for x in found]))

    def of_first_sequence(self, measure):
        return self.entries(self.step.states, lambda found: measure(found[0]))

    def saturation(self):
        # tsemon holds the first four rows of the batch.
        plain, scaled = (self.entries(states, _spread, rows=4) for states in self.saturated)
        return [
            [oracle.saturation(*pair) if _are_known(*pair) else math.nan for pair in zip(*of_stack, strict=True)]
            for of_stack in zip(plain, scaled, strict=True)
        ]

    # Attention.

    def of_attention(self):
        entropy, lowest, largest, count = [], [], [], 0
        for number, known in zip(self.view, self.stacks, strict=True):
            calls = known.attentions
            if calls is None:
                calls = range(count, count + known.depth)
            for call in calls:
                if call is None:
                    of_heads, logit = np.array([math.nan]), math.nan
                else:
                    count = call + 1
                    of_heads, logit = self.attention(number, self.step.attentions[call])
                entropy.append(of_heads.mean())
                lowest.append(of_heads.min())
                largest.append(logit)
        return {"attention_entropy": entropy, "attention_entropy_min": lowest, "max_attention_logit": largest}

    def attention(self, number, seen):
        """Entropy per head, and the maximum logit."""
        known, scores = self.subject.stacks[number], seen.scores
        size, num_tokens = known.layout(self.step.states[number][0]).shape[:2]
        num_heads = scores.shape[1]
        if num_heads == 1 and scores.shape[0] % size == 0 and scores.shape[0] > size:
            # Samples and heads share the first axis.
            per_sample = scores.shape[0] // size
            if scores.shape[-2] == num_tokens:
                scores = scores.reshape(size, per_sample, *scores.shape[-2:])
                seen = Attention(scores, seen.visible.reshape(scores.shape))
        if scores.shape[0] == size and scores.shape[-2] == num_tokens:
            rows = known.sequences(self.step.batch, size, num_tokens)
        else:
            rows = [(sample, torch.arange(scores.shape[-2])) for sample in range(scores.shape[0])]
        entropies = np.full((len(rows), scores.shape[1]), math.nan)
        largest = []
        for i, (sample, where) in enumerate(rows):
            for head in range(scores.shape[1]):
                pair = (seen.scores[sample, head][where], seen.visible[sample, head][where])
                entropies[i, head] = oracle.attention_entropy(*pair)
                largest.append(oracle.max_attention_logit(*pair))
        return np.nanmean(entropies, axis=0), np.nanmax(largest)

    # Parameters.

    def thetas(self, of, names):
        return [of[name] for name in names]

    def gradient_norm(self, names):
        found = [self.step.gradients[name] for name in names if name in self.step.gradients]
        return oracle.norm(found) if found else math.nan

    def updates(self, measure):
        pairs = [(self.thetas(self.step.before, own), self.thetas(self.step.after, own)) for own in self.names]
        return [measure(*pair) if pair[0] else math.nan for pair in pairs]


def _spread(sequences):
    """At most 64 tokens, one from the middle of each of equally long stretches, as docs/measures.md says."""
    tokens = np.concatenate(sequences)
    size = min(len(tokens), 64)
    return tokens[(np.arange(size) * 2 + 1) * len(tokens) // (2 * size)]


def _are_known(*values):
    return all(isinstance(value, np.ndarray) for value in values)
