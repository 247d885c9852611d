"""Every number in a frame of a real, small model against the definition (`oracle`) of the tensors that plain hooks captured.

A causal, de-escalated language model, and a bidirectional BERT with padding. Both train for 21 steps, every second of them
sampled; the frame that is compared is the eleventh, the second with the slow tier.
"""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tsemon
from tests import zoo
from tests.frames import frames_in, values_of
from tests.tsemon.measures import oracle
from tsemon.catalogue import CATALOGUE, LAYERED, NOT_OF_TENSORS

HEADS, NUM_STEPS, EVERY = 4, 21, 2
USUAL = {"rtol": 2e-5, "atol": 2e-6}
"""Sums of a few hundred float32 products, and cosines near zero."""
OF_UPDATES = {"rtol": 1e-4, "atol": 1e-5}
"""An update follows from the optimizer's state; what the weights became is that after a rounding."""
TOLERANCES = {
    "effective_rank": {"rtol": 2e-4},  # from a Gram matrix
    "batch_rank": {"rtol": 2e-4},
    "spectral_gap": {"rtol": 0, "atol": 2e-5},  # of weights in float32
    "saturation": {"rtol": 1e-3, "atol": 1e-3},  # two passes whose scores are 1024^4 times as large
    "update_norm": OF_UPDATES,
    "update_ratio": OF_UPDATES,
    "trained_update_ratio": OF_UPDATES,
    "update_alignment": OF_UPDATES,
    "step_size": OF_UPDATES,
    "embedding_update_norm": OF_UPDATES,
    "head_update_norm": OF_UPDATES,
    "value_output_growth": {"rtol": 0.08},  # 32 power iterations
    "norm_growth_exponent": {"rtol": 1e-3},  # logarithms of small differences
    "norm_growth_r2": {"rtol": 1e-3},
}


def float64(x):
    return x.detach().double().numpy().copy()


def language_model():
    model, _ = zoo.our_language_model()
    return SimpleNamespace(
        model=model,
        blocks="blocks",
        logits=lambda batch: model(batch["input_ids"]),
        before_norm="norm1",
        added="attention",
        fed="feed_forward.expand",
        norms=["norm1", "norm2"],
        units="feed_forward.contract",
        projections=["attention.to_query_key_value"],
        value=("attention.to_query_key_value", slice(64, None)),
        output="attention.to_output",
        query_key={f"attention.to_query_key_value.{kind}": 64 for kind in ("weight", "bias")},  # the first 64 rows
        embeddings=("embed.", "positions."),
        head="head.",
        is_causal=True,
        absent=set(),
    )


def bert():
    model, _ = zoo.bert()
    return SimpleNamespace(
        model=model,
        blocks="bert.encoder.layer",
        logits=lambda batch: model(**batch).logits,
        before_norm="attention.output.LayerNorm",
        added="attention.output.dense",
        fed="intermediate.dense",
        norms=["attention.output.LayerNorm", "output.LayerNorm"],
        units="output.dense",
        projections=[f"attention.self.{name}" for name in ("query", "key", "value")],
        value=("attention.self.value", slice(None)),
        output="attention.output.dense",
        query_key={f"attention.self.{name}.{kind}": 32 for name in ("query", "key") for kind in ("weight", "bias")},
        embeddings=tuple(f"bert.embeddings.{name}_embeddings." for name in ("word", "position", "token_type")),
        head="nothing: it is tied to the embedding",
        is_causal=False,
        absent={"deescalated_token_similarity", "head_param_norm", "head_grad_norm", "head_update_norm"},
    )


class Captured:
    """What plain hooks saw in one forward pass: hidden states, sums before the norm, units, queries, keys and values."""

    def __init__(self, kind):
        self.states, self.deescalated, self.sums, self.units, self.projected = [], [], [], [], []
        self.added, self.fed, self.before_norms, self.after_norms = [], [], ([], []), ([], [])
        self._handles = []

        def before(module, where):
            self._handles.append(module.register_forward_pre_hook(lambda _, args: where.append(float64(args[0]))))

        def after(module, where):
            self._handles.append(module.register_forward_hook(lambda _, args, output: where.append(float64(output))))

        blocks = kind.model.get_submodule(kind.blocks)
        before(blocks[0], self.states)
        for block in blocks:
            before(block.get_submodule(kind.before_norm), self.sums)
            before(block.get_submodule(kind.units), self.units)
            after(block.get_submodule(kind.added), self.added)
            before(block.get_submodule(kind.fed), self.fed)
            for place, name in enumerate(kind.norms):
                before(block.get_submodule(name), self.before_norms[place])
                after(block.get_submodule(name), self.after_norms[place])
            for name in kind.projections:
                after(block.get_submodule(name), self.projected)
            if kind.is_causal:
                before(block.deescalation, self.states)
                after(block.deescalation, self.deescalated)
            else:
                after(block, self.states)

    def remove(self):
        for handle in self._handles:
            handle.remove()


def batch_of(step, kind):
    ids = torch.randint(3, 100, (4, 12), generator=torch.Generator().manual_seed(step))
    ids[:2] = torch.arange(3, 27).view(2, 12)  # half of each batch is always the same
    if kind.is_causal:
        return {"input_ids": ids}
    return {"input_ids": ids, "attention_mask": (torch.arange(12) < torch.tensor([12, 9, 5, 2])[:, None]).long()}


class Run:
    """A short training with a monitor: the last frame, and what it is about."""

    def __init__(self, make, folder):
        torch.manual_seed(0)
        self.kind = kind = make()
        model = kind.model.eval()  # without dropout; gradients make it a training pass
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        self.losses, self.grad_norms, self.gradients, self.thetas = [], [], [], [self._tensors(lambda p: p)]
        monitor = tsemon.attach(
            model, optimizer, run="r", every=EVERY, measures=NAMES, attention_rows="all", spool_dir=folder
        )
        for step in range(NUM_STEPS):
            batch = batch_of(step, kind)
            self.captured = Captured(kind)
            optimizer.zero_grad()
            logits = kind.logits(batch)
            self.captured.remove()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].roll(1).flatten())
            loss.backward()
            self.grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
            optimizer.step()
            self.losses.append(loss.item())
            self.gradients.append(self._tensors(lambda p: torch.zeros_like(p) if p.grad is None else p.grad))
            self.thetas.append(self._tensors(lambda p: p))
            monitor.step(loss=loss)
        monitor.close()
        assert monitor.status.num_faults == 0
        (*_, self.frame) = frames_in(folder)
        self.logits = float64(logits)
        mask = batch.get("attention_mask")
        self.valid = np.ones((4, 12), bool) if mask is None else mask.bool().numpy()
        self.depth = len(model.get_submodule(kind.blocks))
        self.plain, self.scaled = (self._states_of_first_batch(make, scale) for scale in (1.0, 1024.0))

    def _tensors(self, of):
        return {name: float64(of(p)) for name, p in self.kind.model.named_parameters()}

    def _states_of_first_batch(self, make, scale):
        """In a copy of the model with scaled parameters: the batch that is held for extra passes."""
        kind = make()
        kind.model.load_state_dict(self.kind.model.state_dict())
        captured = Captured(kind)
        with torch.no_grad():
            for p in kind.model.eval().parameters():
                p.mul_(scale)
            kind.logits(batch_of(0, kind))
        return captured.states

    # The tokens of each sample.

    def samples(self, x):
        return [sample[valid] for sample, valid in zip(x, self.valid, strict=True)]

    def per_sample(self, measure, *of_layers):
        """Per layer the mean over samples."""
        layers = zip(*of_layers, strict=True)
        return [
            oracle.mean_of_known([measure(*x) for x in zip(*map(self.samples, layer), strict=True)]) for layer in layers
        ]

    def per_batch(self, measure, states):
        return [measure(self.samples(x)) for x in states]

    def block_inputs(self):
        outputs = self.captured.deescalated or self.captured.states[1:]
        return [self.captured.states[0], *outputs[:-1]]

    def around_norms(self):
        (before_1, before_2), (after_1, after_2) = self.captured.before_norms, self.captured.after_norms
        return before_1, after_1, before_2, after_2

    # Attention.

    def attention(self, layer):
        """Of each sample its heads' scores, visibility, weights, and the values with heads side by side."""
        num_projections = len(self.kind.projections)
        packed = np.concatenate(self.captured.projected[num_projections * layer :][:num_projections], axis=-1)
        query, key, value = packed.reshape(4, 12, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
        found = []
        for sample, valid in enumerate(self.valid):
            q, k, v = (x[sample][:, valid] for x in (query, key, value))
            scores, size = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1]), valid.sum()
            visible = np.tri(size, dtype=bool) if self.kind.is_causal else np.ones((size, size), bool)
            weights = np.stack([oracle.softmax(s, visible) for s in scores])
            values = v.transpose(1, 0, 2).reshape(size, -1)
            found.append(SimpleNamespace(scores=scores, visible=visible, weights=weights, values=values))
        return found

    def per_head(self, measure, over_samples=oracle.mean_of_known):
        """(layers, heads), over samples."""
        layers = map(self.attention, range(self.depth))
        return np.array([[over_samples([measure(a, h) for a in samples]) for h in range(HEADS)] for samples in layers])

    def per_layer(self, measure):
        return [oracle.mean_of_known(list(map(measure, self.attention(layer)))) for layer in range(self.depth)]

    def of_first_sample(self, measure):
        return [measure(self.attention(layer)[0]) for layer in range(self.depth)]

    # Parameters.

    def blocks(self, tensors):
        prefixes = [f"{self.kind.blocks}.{layer}." for layer in range(self.depth)]
        return [[x for name, x in tensors.items() if name.startswith(prefix)] for prefix in prefixes]

    def group(self, tensors, group):
        """All parameters but embeddings and scalars, or one of the two ends."""
        prefix = {"total": "", "embedding": self.kind.embeddings, "head": self.kind.head}[group]
        found = {name: x for name, x in tensors.items() if name.startswith(prefix) and x.size > 1}
        return [x for name, x in found.items() if group != "total" or not name.startswith(self.kind.embeddings)]

    def part(self, tensors, *, of_attention):
        """The parameters of each block that are of attention, or that are not, without norms."""
        kept = {
            name: x
            for name, x in tensors.items()
            if ("attention" in name) is of_attention and not re.search(r"norm\d?\.|LayerNorm", name)
        }
        return self.blocks(kept)

    def of_blocks(self, measure, *tensors):
        return [measure(*of_block) for of_block in zip(*map(self.blocks, tensors), strict=True)]

    def angle(self, measure, *tensors):
        """Of each block, and of the whole."""
        return self.of_blocks(measure, *tensors), measure(*(self.group(of, "total") for of in tensors))

    def query_key_norms(self):
        blocks = [f"{self.kind.blocks}.{layer}." for layer in range(self.depth)]
        rows = self.kind.query_key.items()
        return [oracle.norm([self.gradients[-1][block + name][:n] for name, n in rows]) for block in blocks]

    def value_output(self):
        """The weights of values and output, of each block."""
        (value, rows), output = self.kind.value, self.kind.output
        of_blocks = [
            [self.thetas[-1][f"{self.kind.blocks}.{layer}.{name}.weight"] for name in (value, output)]
            for layer in range(self.depth)
        ]
        return [(value[rows], output) for value, output in of_blocks]

    def value_output_per_head(self, measure):
        """(layers, heads)."""
        return np.array(
            [[measure(h) for h in oracle.of_each_head(*of_block, HEADS)] for of_block in self.value_output()]
        )

    def head_width(self):
        return self.value_output()[0][0].shape[0] // HEADS

    def growth(self):
        norms = np.array([oracle.norm(self.group(theta, "total")) for theta in self.thetas[1::EVERY]])
        return oracle.power_law(np.arange(len(norms)) * float(EVERY), norms)

    def overlap(self):
        now, before = (
            batch_of(step, self.kind)["input_ids"].tolist() for step in (NUM_STEPS - 1, NUM_STEPS - 1 - EVERY)
        )
        return oracle.input_overlap(now, before)

    def distinct(self):
        return oracle.distinct_inputs(batch_of(NUM_STEPS - 1, self.kind)["input_ids"].tolist())


def of_states(measure):
    return lambda run: run.per_sample(measure, run.captured.states)


def of_batches(measure):
    return lambda run: run.per_batch(measure, run.captured.states)


def of_sub_step(step, measure, compare, num_samples=None):
    """The change of `measure` by a sub-step, from the states before it to those after it."""

    def of_run(run):
        states = {
            "residual": (run.block_inputs(), run.captured.sums),
            "feedforward": (run.captured.fed, run.captured.before_norms[1]),
            "norm1": run.around_norms()[:2],
            "norm2": run.around_norms()[2:],
        }[step]
        of_layers = zip(*([run.samples(x)[:num_samples] for x in of_kind] for of_kind in states), strict=True)
        changes = [[compare(measure(y), measure(x)) for x, y in zip(*layer, strict=True)] for layer in of_layers]
        if measure is oracle.hfc_lfc:
            return [np.exp(oracle.mean_of_known(np.log(of_layer))) for of_layer in changes]
        return [oracle.mean_of_known(of_layer) for of_layer in changes]

    return of_run


def of_losses(name, num=EVERY):
    return lambda run: oracle.losses(np.array(run.losses[-num:]))[name]


def of_grad_norms(kind, num=EVERY):
    return lambda run: oracle.losses(np.array(run.grad_norms[-num:]))[f"loss_{kind}"]


def of_group(group, kind):
    return {
        "param": lambda run: oracle.norm(run.group(run.thetas[-1], group)),
        "grad": lambda run: oracle.norm(run.group(run.gradients[-1], group)),
        "update": lambda run: oracle.update_norm(*(run.group(theta, group) for theta in run.thetas[-2:])),
    }[kind]


DEFINITIONS = {
    "token_similarity": of_states(oracle.token_similarity),
    "token_diversity": of_states(oracle.token_diversity),
    "cosine_similarity": of_states(oracle.cosine_similarity),
    "hfc_lfc": of_states(oracle.hfc_lfc),
    "first_hidden_norm_ratio": of_states(oracle.first_norm_ratio),
    "centred_token_similarity": of_batches(oracle.centred_token_similarity),
    "global_diversity": of_batches(oracle.global_diversity),
    "batch_similarity": of_batches(oracle.batch_similarity),
    "batch_rank": of_batches(oracle.batch_rank),
    "hidden_rms": of_batches(oracle.hidden_rms),
    "hidden_max": of_batches(oracle.hidden_max),
    "nonfinite": of_batches(oracle.nonfinite),
    "effective_rank": lambda run: [oracle.effective_rank(run.samples(x)[0]) for x in run.captured.states],
    "deescalated_token_similarity": lambda run: run.per_sample(oracle.token_similarity, run.captured.deescalated),
    "escalation_rate": lambda run: run.per_sample(oracle.escalation_rate, run.block_inputs(), run.captured.sums),
    "residual_gain": lambda run: run.per_sample(oracle.gain, run.block_inputs(), run.captured.sums),
    "attention_escalation_rate": lambda run: run.per_sample(
        oracle.escalation_rate, run.block_inputs(), run.captured.added
    ),
    "attention_gain": lambda run: run.per_sample(oracle.gain, run.block_inputs(), run.captured.added),
    "feedforward_escalation_rate": lambda run: run.per_sample(
        oracle.escalation_rate, run.captured.fed, run.captured.before_norms[1]
    ),
    "feedforward_gain": lambda run: run.per_sample(oracle.gain, run.captured.fed, run.captured.before_norms[1]),
    "norm_escalation_rate": lambda run: run.per_sample(
        lambda a, b, c, d: oracle.escalation_rate(a, b) * oracle.escalation_rate(c, d), *run.around_norms()
    ),
    "norm_gain": lambda run: run.per_sample(lambda _, b, __, d: oracle.rms(b) * oracle.rms(d), *run.around_norms()),
    **{
        name: definition
        for step in ("residual", "feedforward", "norm1", "norm2")
        for name, definition in {
            f"{step}_hfc_lfc_ratio": of_sub_step(step, oracle.hfc_lfc, np.divide),
            f"{step}_cosine_change": of_sub_step(step, oracle.cosine_similarity, np.subtract),
            f"{step}_rank_ratio": of_sub_step(step, oracle.effective_rank, np.divide, num_samples=1),
        }.items()
    },
    "saturation": lambda run: [
        oracle.saturation(*(np.concatenate(run.samples(x)) for x in pair))
        for pair in zip(run.plain, run.scaled, strict=True)
    ],
    "dead_units": lambda run: run.per_batch(oracle.dead_units, run.captured.units),
    "attention_entropy": lambda run: run.per_head(lambda a, h: oracle.attention_entropy(a.scores[h], a.visible)),
    "attention_entropy_min": lambda run: DEFINITIONS["attention_entropy"](run).min(axis=1),
    "attention_entropy_se": lambda run: [0.0] * run.depth,  # nothing was left out
    "importance_entropy": lambda run: run.per_layer(
        lambda a: oracle.normalized_importance_entropy(a.weights.mean(axis=0))
    ),
    "sink_share": lambda run: run.per_head(lambda a, h: oracle.sink_share(a.weights[h])),
    "positions_attended": lambda run: run.per_head(lambda a, h: oracle.positions_attended(a.weights[h])),
    "max_attention_logit": lambda run: run.per_head(
        lambda a, h: oracle.max_attention_logit(a.scores[h], a.visible), max
    ),
    "spectral_gap": lambda run: run.of_first_sample(lambda a: oracle.spectral_gap(a.weights)),
    "first_value_norm_ratio": lambda run: run.per_layer(lambda a: oracle.first_norm_ratio(a.values)),
    "value_top_eigenvalue": lambda run: run.of_first_sample(lambda a: oracle.value_top_eigenvalue(a.values)),
    "value_output_growth": lambda run: [oracle.value_output_growth(*of_block) for of_block in run.value_output()],
    "value_output_negative_share": lambda run: run.value_output_per_head(
        lambda h: oracle.value_output_negative_share(h, run.head_width())
    ),
    "value_output_norm": lambda run: run.value_output_per_head(oracle.value_output_norm),
    "param_norm": lambda run: run.of_blocks(oracle.norm, run.thetas[-1]),
    "attention_param_norm": lambda run: list(map(oracle.norm, run.part(run.thetas[-1], of_attention=True))),
    "feedforward_param_norm": lambda run: list(map(oracle.norm, run.part(run.thetas[-1], of_attention=False))),
    **dict.fromkeys(("grad_norm", "clipped_grad_norm"), lambda run: run.of_blocks(oracle.norm, run.gradients[-1])),
    "grad_norm_qk": Run.query_key_norms,
    "update_norm": lambda run: run.of_blocks(oracle.update_norm, *run.thetas[-2:]),
    "update_ratio": lambda run: run.of_blocks(oracle.update_ratio, *run.thetas[-2:]),
    "trained_update_ratio": lambda run: run.of_blocks(oracle.update_ratio, *run.thetas[-2:]),  # all of a block trains
    "update_alignment": lambda run: run.angle(oracle.update_alignment, *run.thetas[-2:]),
    "gradient_alignment": lambda run: run.angle(oracle.gradient_alignment, run.gradients[-1], run.thetas[-2]),
    "direction_cosine": lambda run: run.angle(oracle.direction_cosine, run.thetas[-1 - EVERY], run.thetas[-1]),
    "gradient_cosine": lambda run: run.angle(oracle.direction_cosine, *run.gradients[-1 - EVERY :: EVERY])[1],
    "total_param_norm": of_group("total", "param"),
    **dict.fromkeys(("total_grad_norm", "total_clipped_grad_norm"), of_group("total", "grad")),
    "step_size": of_group("total", "update"),
    **{
        f"{end}_{kind}_norm": of_group(end, kind)
        for end in ("embedding", "head")
        for kind in ("param", "grad", "update")
    },
    "norm_growth_exponent": lambda run: run.growth()[0],
    "norm_growth_r2": lambda run: run.growth()[1],
    "output_variation": lambda run: oracle.output_variation(np.concatenate(run.samples(run.logits))),
    "input_overlap": Run.overlap,
    "distinct_inputs": Run.distinct,
    **{f"loss_{kind}": of_losses(f"loss_{kind}") for kind in ("mean", "min", "max", "std", "nonfinite")},
    **{f"loss_{kind}": of_losses(f"loss_{kind}", NUM_STEPS) for kind in ("recent", "before", "noise", "start")},
    **{f"grad_norm_{kind}": of_grad_norms(kind) for kind in ("mean", "max", "nonfinite")},
    "grad_norm_recent": of_grad_norms("recent", NUM_STEPS),
}
NAMES = sorted({metric.name for metric in CATALOGUE} - NOT_OF_TENSORS.keys())


@pytest.fixture(scope="module", params=[language_model, bert], ids=lambda make: make.__name__)
def run(request, tmp_path_factory):
    return Run(request.param, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("name", NAMES)
def test_a_frame_has_what_the_definition_gives(name, run):
    if name in run.kind.absent:
        assert name not in run.frame["scalars"]
        assert name not in run.frame["layers"]
        return
    want, tolerance = DEFINITIONS[name](run), USUAL | TOLERANCES.get(name, {})
    layers, whole = want if isinstance(want, tuple) else (want, None) if name in LAYERED else (None, want)
    if name in run.frame["heads"]:
        np.testing.assert_allclose(values_of(run.frame, name, "heads"), layers.ravel(), **tolerance)
        layers = layers.max(axis=1) if name in ("max_attention_logit", "value_output_norm") else layers.mean(axis=1)
    if layers is not None:
        np.testing.assert_allclose(values_of(run.frame, name), layers, **tolerance)
    if whole is not None:
        found = run.frame["scalars"][name]
        np.testing.assert_allclose(math.nan if found is None else found, whole, **tolerance)
