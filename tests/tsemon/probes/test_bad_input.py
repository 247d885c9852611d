"""Bad input gives NaN and its reason: each number is that of an oracle in float64, and training stays bit-equal."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsemon
from tests.frames import frames_in, values_of

WIDTH, HEADS, DEPTH = 32, 4, 2
OF_STATES = ("token_similarity", "cosine_similarity", "hidden_rms", "hidden_max", "first_hidden_norm_ratio")
OF_ATTENTION = (
    *("attention_entropy", "attention_entropy_min", "max_attention_logit", "sink_share", "positions_attended"),
    "first_value_norm_ratio",
)
DERIVED = (
    *("token_diversity", "centred_token_similarity", "global_diversity", "escalation_rate", "hfc_lfc"),
    *("effective_rank", "batch_similarity", "batch_rank"),
)
"""Further metrics of the same states."""
OTHERS = ("importance_entropy", "attention_entropy_se", "spectral_gap", "value_top_eigenvalue", "saturation")
MEASURES = (*OF_STATES, *OF_ATTENTION, *DERIVED, *OTHERS, "dead_units", "output_variation", "grad_norm")


class Attention(nn.Module):
    """Of states (B, T, D), (T, B, D) or (T, D). Remembers what it computed."""

    def __init__(self, kind):
        super().__init__()
        self.qkv, self.out, self.kind = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x, mask, layout):
        x = x.transpose(0, 1) if layout == "TBC" else x[None] if layout == "TC" else x
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        self.seen = tuple(y.detach() for y in (query, key, value)), mask
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(query, key, value, mask)
        elif self.kind == "softmax":
            scores = query @ key.mT / (WIDTH // HEADS) ** 0.5
            scores = scores if mask is None else scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            y = scores.softmax(dim=-1) @ value
        else:  # without a softmax
            weights = (query @ key.mT / 10).sigmoid()
            y = (weights if mask is None else weights * mask) @ value / 10
        y = self.out(y.transpose(1, 2).flatten(2))
        return y.transpose(0, 1) if layout == "TBC" else y[0] if layout == "TC" else y


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = nn.LayerNorm(WIDTH), Attention(kind), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x, mask, layout):
        before = x.detach().clone()
        x = x + self.attn(self.norm_1(x), mask, layout)
        x = x + self.mlp(self.norm_2(x))
        self.seen = before, x.detach().clone()
        return x


class Model(nn.Module):
    """Of ids (B, T), or (T) if the states have no batch axis."""

    def __init__(self, kind="sdpa", seed=0):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(DEPTH))
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            nn.init.normal_(p, std=0.3, generator=generator)

    def forward(self, ids, mask=None, layout="BTC"):
        x = self.embedding(ids)
        x = x.transpose(0, 1).contiguous() if layout == "TBC" else x[0] if layout == "TC" else x
        for block in self.blocks:
            x = block(x, mask, layout)
        return self.head(x)


def ids_of(*shape):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


def oracle(model, layout, valid=None):
    """Of what the blocks have computed, in float64."""
    states = [model.blocks[0].seen[0], *(block.seen[1] for block in model.blocks)]
    states = [x.transpose(0, 1) if layout == "TBC" else x[None] if layout == "TC" else x for x in states]
    found = {name: [] for name in (*OF_STATES, *OF_ATTENTION)}
    for x in states:
        is_token_BT = torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
        rows = [row[of].double() for row, of in zip(x, is_token_BT, strict=True)]
        for name, value in of_state([row for row in rows if len(row)]).items():
            found[name].append(value)
    for block in model.blocks if model.blocks[0].attn.kind != "none" else ():
        for name, value in of_attention(*block.attn.seen, valid).items():
            found[name].append(value)
    return found


def mean(values):
    return torch.stack(values).nanmean().item() if values else math.nan


def of_state(rows):
    return {
        "token_similarity": mean([len(x) * x.mean(dim=0).square().sum() / x.square().sum() for x in rows]),
        "cosine_similarity": mean([cosine(x) for x in rows]),
        "hidden_rms": torch.cat(rows).square().mean().sqrt().item() if rows else math.nan,
        "hidden_max": torch.cat(rows).abs().max().item() if rows else math.nan,
        "first_hidden_norm_ratio": mean([first_ratio(x.norm(dim=-1)) for x in rows]),
    }


def cosine(x):
    unit, num = F.normalize(x, dim=-1), len(x)
    return ((unit @ unit.T).sum() - num) / (num * (num - 1)) if num > 1 else torch.tensor(math.nan).double()


def first_ratio(lengths):
    return lengths[0] / lengths[1:].mean() if len(lengths) > 1 else torch.tensor(math.nan).double()


def of_attention(tensors, mask, valid):
    query, key, value = (x.double() for x in tensors)
    batch, _, tokens, width = query.shape
    scores = query @ key.mT / width**0.5
    visible = (torch.ones(tokens, tokens, dtype=torch.bool) if mask is None else mask).expand(scores.shape)
    rows = torch.ones(batch, tokens, dtype=torch.bool) if valid is None else valid
    counts = visible.any(dim=-1) & rows[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1).nan_to_num()
    num_keys = visible.sum(dim=-1)
    share = (torch.special.entr(weights).sum(dim=-1) / num_keys.log()).masked_fill(~counts | (num_keys < 2), torch.nan)
    entropy = share.nanmean(dim=-1).nanmean(dim=0)
    firsts = rows.int().argmax(dim=-1)
    sink = weights.gather(-1, firsts[:, None, None, None].expand(-1, HEADS, tokens, 1))[..., 0]
    is_first = torch.arange(tokens) == firsts[:, None]
    sink = sink.masked_fill(~counts | is_first[:, None], torch.nan)
    attended = (weights > 1e-5).sum(dim=-1).double().masked_fill(~counts, torch.nan)
    largest = scores.masked_fill(~visible | ~counts[..., None], -torch.inf)
    lengths = [v.transpose(0, 1).flatten(1).norm(dim=-1)[of] for v, of in zip(value, rows, strict=True)]
    return {
        "attention_entropy": entropy.nanmean().item(),
        "attention_entropy_min": entropy.nan_to_num(math.inf).min().item() if not entropy.isnan().all() else math.nan,
        "max_attention_logit": largest.max().item() if largest.numel() and largest.max().isfinite() else math.nan,
        "sink_share": sink.nanmean(dim=-1).nanmean(dim=0).nanmean().item(),
        "positions_attended": attended.nanmean(dim=-1).nanmean(dim=0).nanmean().item(),
        "first_value_norm_ratio": mean([first_ratio(of) for of in lengths if len(of)]),
    }


@pytest.fixture
def trained(tmp_path):
    """Frames, the reasons after each step and what the oracle says of each step."""

    def trained(model, batches, valid=None, **options):
        twin, expected = copy.deepcopy(model), []
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        options = {"attention_rows": "all", "measures": MEASURES, **options}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with tsemon.attach(model, optimizer, run="run", every=1, spool_dir=folder, **options) as monitor:
            for batch in batches:
                step(model, optimizer, batch)
                expected.append(oracle(model, batch[2], valid) if batch[0].numel() else {})
                monitor.step()
        assert monitor.status.num_faults == 0
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
        for batch in batches:
            step(twin, optimizer, batch)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0, equal_nan=True)
        frames = frames_in(folder)
        assert_right_or_nan(frames, expected)
        assert_each_nan_has_a_reason(frames[-1], monitor.status)
        return frames, monitor.status

    return trained


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(*batch).square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def values_in(frame, name):
    """None of a metric that the frame lacks."""
    if name in frame["scalars"]:
        return [math.nan if frame["scalars"][name] is None else frame["scalars"][name]]
    return values_of(frame, name) if name in frame["layers"] else []


def is_missing(frame, name):
    return all(map(math.isnan, values_in(frame, name)))


def assert_right_or_nan(frames, expected):
    for number, (frame, of_step) in enumerate(zip(frames, expected, strict=True)):
        for name in (*OF_STATES, *OF_ATTENTION):
            values = values_in(frame, name)
            rights = of_step.get(name, [math.nan] * len(values))
            for value, right in zip(values, rights if values else [], strict=True):
                assert math.isnan(value) or value == pytest.approx(right, rel=2e-5), (number, name, values, rights)


def assert_each_nan_has_a_reason(frame, status):
    for name in MEASURES:
        if any(map(math.isnan, values_in(frame, name))) or name not in status.measured:
            assert status.not_measured.get(name), name
            assert "compile" not in status.not_measured[name]


def assert_missing(frames, status, names, why):
    for name in names:
        assert is_missing(frames[-1], name), name
        assert why in status.not_measured[name], (name, status.not_measured[name])


def batches_of(*shape, layout="BTC", mask=None, num=2):
    return [(ids_of(*shape), mask, layout)] * num


KINDS = ["sdpa", "softmax", "none"]
UNSEEN = "Attention called no function that tsemon knows as attention"


class TestALayoutThatIsGiven:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("shape", "layout", "given"),
        [
            ((3, 12), "BTC", "TBC"),
            ((3, 12), "TBC", "BTC"),
            ((8, 8), "BTC", "TBC"),
            ((8, 8), "TBC", "BTC"),
            ((3, 12), "BTC", "TC"),
            ((1, 12), "TC", "BTC"),
            ((1, 12), "TC", "TBC"),
        ],
    )
    def test_wrongly_leaves_states_unmeasured(self, trained, kind, shape, layout, given):
        frames, status = trained(Model(kind), batches_of(*shape, layout=layout), layout=given)
        assert_missing(frames, status, (*OF_STATES, *DERIVED), f"attach(layout={given!r}) says ")
        assert is_missing(frames[0], "token_similarity")
        if kind == "none":
            assert_missing(frames, status, OF_ATTENTION, UNSEEN)
        else:
            assert not is_missing(frames[-1], "attention_entropy")  # its queries show its sequences


class TestDocumentsThatAreGiven:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("documents", "why"),
        [
            (
                lambda ids, *_: ids[:, 1:],
                "attach(documents=...) returned a tensor of shape (3, 11) for 3 rows of 12 tokens",
            ),
            (
                lambda ids, *_: ids[:2],
                "attach(documents=...) returned a tensor of shape (2, 12) for 3 rows of 12 tokens",
            ),
            (lambda ids, *_: ids.float(), "attach(documents=...) must return a tensor (batch, tokens) of bool or int"),
        ],
    )
    def test_wrongly_leave_nothing_that_depends_on_them(self, trained, kind, documents, why):
        frames, status = trained(Model(kind), batches_of(3, 12), documents=documents)
        others = ("dead_units", "output_variation", "saturation")
        assert_missing(frames, status, (*OF_STATES, *DERIVED, *others), why)
        assert_missing(frames, status, OF_ATTENTION, UNSEEN if kind == "none" else why)
        assert values_in(frames[-1], "grad_norm")


class TestAMaskThatHidesEverything:
    @pytest.mark.parametrize("kind", ["sdpa", "softmax"])
    def test_leaves_nothing(self, trained, kind):
        mask, valid = torch.zeros(3, 1, 12, 12, dtype=torch.bool), torch.zeros(3, 12, dtype=torch.bool)
        frames, status = trained(Model(kind), batches_of(3, 12, mask=mask), valid)
        assert "100% of tokens are padding, from the keys that attention hides" in status.how["layout"]
        names = (*OF_STATES, *OF_ATTENTION, *DERIVED, "dead_units", "importance_entropy")
        assert_missing(frames, status, names, "values are not finite, or sequences are single tokens")
        assert_missing(frames, status, ["output_variation"], "fewer than two predictions are finite and of tokens")
        for frame in frames:
            assert all(is_missing(frame, name) for name in names)

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("kind", ["sdpa", "softmax"])
    def test_of_one_sample_leaves_the_others(self, trained, kind, is_causal):
        mask, valid = torch.ones(3, 1, 12, 12, dtype=torch.bool), torch.ones(3, 12, dtype=torch.bool)
        mask = mask.tril() if is_causal else mask
        mask[1], valid[1] = False, False
        frames, status = trained(Model(kind), batches_of(3, 12, mask=mask), valid)
        assert "33% of tokens are padding, from the keys that attention hides" in status.how["layout"]
        for name in (*OF_STATES, *OF_ATTENTION):
            assert not any(map(math.isnan, values_in(frames[-1], name))), name


class TestShapesAtTheEdge:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("layout", ["BTC", "TBC"])
    @pytest.mark.parametrize("shape", [(4, 1), (1, 1), (1, 12), (4, 4)])
    def test_give_right_numbers_or_reasons(self, trained, kind, layout, shape):
        frames, status = trained(Model(kind), batches_of(*shape, layout=layout))
        assert not is_missing(frames[-1], "token_similarity")
        if shape[1] == 1:
            names = ["cosine_similarity", "first_hidden_norm_ratio", "escalation_rate"]
            names += [] if kind == "none" else ["first_value_norm_ratio", "spectral_gap"]
            assert_missing(frames, status, names, "sequences have one token, and no other to compare it with")
        if shape == (1, 1):
            assert_missing(frames, status, ["dead_units"], "the batch has one token")
        if shape[0] == 1:
            names = ["batch_similarity", "centred_token_similarity", "batch_rank"]
            assert_missing(frames, status, names, "the batch has one sequence")

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("layout", ["BTC", "TBC"])
    @pytest.mark.parametrize("shape", [(4, 0), (0, 12), (0, 0)])
    def test_of_no_tokens_give_reasons(self, trained, kind, layout, shape):
        frames, status = trained(Model(kind), batches_of(*shape, layout=layout))
        assert_missing(
            frames, status, (*OF_STATES, *DERIVED), "and at least one token, which would be its hidden state"
        )
        assert_missing(frames, status, OF_ATTENTION, UNSEEN if kind == "none" else "its sequences have no tokens")
        assert_missing(frames, status, ["dead_units", "output_variation"], "the pass had no tokens")

    @pytest.mark.parametrize("kind", KINDS)
    def test_of_no_tokens_do_not_spoil_other_samples(self, trained, kind):
        empty, full = batches_of(4, 0, num=1), batches_of(3, 12, num=1)
        frames, _ = trained(Model(kind), [*empty, *full, *empty, *full, *full])
        assert [is_missing(frame, "token_similarity") for frame in frames] == [True, False, True, False, False]


class TestALayoutThatChanges:
    """Between BTC and TBC with as many sequences as tokens, no shape would show it."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("shape", "first", "then"),
        [
            ((3, 12), "BTC", "TBC"),
            ((3, 12), "TBC", "BTC"),
            *(
                ((size, 12), *pair)
                for size in (3, 12)
                for pair in (("BTC", "TC"), ("TC", "BTC"), ("TBC", "TC"), ("TC", "TBC"))
            ),
        ],
    )
    def test_is_measured_or_contradicted(self, trained, kind, shape, first, then):
        of_shape = {"BTC": shape, "TBC": shape, "TC": (1, 12)}
        batches = [(ids_of(*of_shape[layout]), None, layout) for layout in (first, first, then, then, then)]
        frames, status = trained(Model(kind), batches)
        if not is_missing(frames[1], "token_similarity"):
            names = (*OF_STATES, "token_diversity", "escalation_rate")
            assert_missing(frames, status, names, "states whose axes change place are not measured")
