"""Where the tokens lie in the hidden states: the same numbers, whichever axis they are on."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsemon
from tests.frames import frames_in, values_of
from tsemon.errors import InvalidArgument

OF_STATES = ("token_similarity", "centred_token_similarity", "batch_similarity", "effective_rank", "escalation_rate")


class Attention(nn.Module):
    def __init__(self, tokens_first):
        super().__init__()
        self.qkv, self.out, self.tokens_first = nn.Linear(32, 96), nn.Linear(32, 32), tokens_first

    def forward(self, x):
        x = x.transpose(0, 1) if self.tokens_first else x
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(y.transpose(0, 1) if self.tokens_first else y)


class UnseenAttention(nn.Module):
    """As linear attention for one, it has no softmax."""

    def __init__(self, tokens_first):
        super().__init__()
        self.mix, self.axis = nn.Linear(32, 32), 0 if tokens_first else 1

    def forward(self, x):
        return self.mix(x).cumsum(dim=self.axis)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = nn.LayerNorm(32), attention, nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """A language model of ids (B, T) whose blocks pass (T, B, D) or (B, T, D) on."""

    def __init__(self, tokens_first, attention=Attention):
        super().__init__()
        self.tokens_first = tokens_first
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.blocks = nn.ModuleList(Block(attention(tokens_first)) for _ in range(3))

    def forward(self, ids):
        x = self.embedding(ids)
        x = x.transpose(0, 1).contiguous() if self.tokens_first else x
        for block in self.blocks:
            x = block(x)
        return self.head(x.transpose(0, 1) if self.tokens_first else x)


@pytest.fixture
def trained(tmp_path):
    """Frames and status of a short training on batches of these shapes."""

    def trained(tokens_first, *shapes, attention=Attention, **options):
        torch.manual_seed(0)
        model = Model(tokens_first, attention)
        optimizer = torch.optim.AdamW(model.parameters())
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        with tsemon.attach(model, optimizer, run="gpt", every=1, spool_dir=folder, **options) as monitor:
            for shape in shapes:
                optimizer.zero_grad()
                ids = torch.randint(50, shape)
                F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
                optimizer.step()
                monitor.step()
        return frames_in(folder), monitor.status

    return trained


def states_of(frame):
    return {name: values_of(frame, name) for name in OF_STATES if name in frame["layers"]}


def assert_alike(one, another):
    assert {*states_of(one)} == {*states_of(another)} >= {*OF_STATES} - {"effective_rank"}  # not of each sample
    for name, values in states_of(one).items():
        assert values == pytest.approx(states_of(another)[name], rel=1e-5, nan_ok=True), name


def assert_not_measured(status, why):
    assert not {*OF_STATES} & {*status.measured}
    for name in OF_STATES:
        assert why in status.not_measured[name], name


class TestTheLayout:
    @pytest.mark.parametrize("num_sequences", [1, 3])
    def test_is_told_from_attention(self, trained, num_sequences):
        shapes = [(num_sequences, 12)] * 2
        (batch_first, status), (tokens_first, other) = trained(False, *shapes), trained(True, *shapes)
        for one, another in zip(batch_first, tokens_first, strict=True):
            assert_alike(one, another)
        assert status.how["layout"].startswith("batch first, from attention of 12 queries on a state of shape (")
        assert other.how["layout"].startswith("tokens first, from attention of 12 queries on a state of shape (12, ")

    @pytest.mark.parametrize("tokens_first", [False, True])
    def test_is_told_from_token_ids_where_attention_is_not_seen(self, trained, tokens_first):
        frames, status = trained(tokens_first, (3, 12), attention=UnseenAttention)
        assert values_of(frames[0], "batch_similarity")[0] < 0.5  # over 12 sequences of 3 it is another
        assert "token ids of shape (3, 12)" in status.how["layout"]
        assert states_of(frames[0])["token_similarity"] == pytest.approx(
            states_of(trained(not tokens_first, (3, 12), attention=UnseenAttention)[0][0])["token_similarity"]
        )

    def test_is_asked_of_fewer_sequences_where_there_are_as_many_as_tokens(self, trained):
        (batch_first, _), (tokens_first, status) = trained(False, *[(12, 12)] * 2), trained(True, *[(12, 12)] * 2)
        assert states_of(tokens_first[0]) == {}
        assert_alike(tokens_first[1], batch_first[1])
        assert "a state of shape (12, 4, 32)" in status.how["layout"]

    def test_is_not_guessed(self, trained):
        frames, status = trained(True, (2, 2))
        assert states_of(frames[0]) == {}
        why = "it is not known which axis of a state of shape (2, 2, 32) holds the tokens"
        assert all(why in status.not_measured[name] for name in ("token_similarity", "escalation_rate"))
        given, _ = trained(True, (2, 2), layout="TBC")
        assert {*states_of(given[0])} == {*OF_STATES}

    @pytest.mark.parametrize("attention", [Attention, UnseenAttention])
    @pytest.mark.parametrize("tokens_first", [True, False])
    def test_is_found_by_an_experiment_where_nothing_says_it(self, trained, tokens_first, attention):
        shapes = [(3, 3)] * 2
        frames, status = trained(tokens_first, *shapes, attention=attention)
        given, _ = trained(tokens_first, *shapes, attention=attention, layout="TBC" if tokens_first else "BTC")
        assert states_of(frames[0]) == {}
        assert_alike(frames[1], given[1])
        assert "an experiment: one token was changed" in status.how["layout"]

    def test_that_is_given_wrongly_is_contradicted(self, trained):
        frames, status = trained(True, (3, 12), (3, 12), layout="BTC")
        assert [states_of(frame) for frame in frames] == [{}, {}]
        assert_not_measured(status, "attach(layout='BTC') says batch first, attention of 12 queries on a state of ")

    def test_must_be_one_that_there_is(self, trained):
        with pytest.raises(InvalidArgument, match=r"'BTC' for \(batch, tokens, width\), 'TBC' for .*, got 'NCHW'"):
            trained(True, layout="NCHW")

    def test_of_a_single_token_is_any(self, trained):
        frames, _ = trained(True, (1, 1))
        assert states_of(frames[0])["token_similarity"] == pytest.approx([1.0] * 4)
        assert all(map(math.isnan, states_of(frames[0])["escalation_rate"]))

    def test_makes_no_difference_to_saturation(self, trained):
        for shape in ((3, 12), (12, 12)):
            (batch_first, _), (tokens_first, _) = trained(False, shape), trained(True, shape)
            expected = pytest.approx(values_of(batch_first[0], "saturation"), abs=2e-2)  # of other tokens
            assert values_of(tokens_first[0], "saturation") == expected
