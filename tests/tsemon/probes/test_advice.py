"""What the error for a model without blocks advises, followed to the letter, gives right numbers."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsemon
from tests.frames import frames_in, values_of
from tsemon.errors import NoBlocksFound

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


def feed_forward():
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = feed_forward()

    def forward(self, x):
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.make()

    def forward(self, ids):
        return self.head(self.run(self.embedding(ids)))


class Attributes(Model):
    """Each block is an attribute of its own."""

    def make(self):
        self.first, self.second, self.third = Block(), Block(), Block()

    def run(self, x):
        return self.third(self.second(self.first(x)))


class Inside(nn.Module):
    """A model of another class around it."""

    def __init__(self):
        super().__init__()
        self.inner = Attributes()

    def forward(self, ids):
        return self.inner(ids)


class Single(Model):
    def make(self):
        self.block = Block()

    def run(self, x):
        return self.block(x)


class Keys(Model):
    """The keys of the dict are no numbers."""

    def make(self):
        self.parts = nn.ModuleDict({"early": Block(), "late": Block()})

    def run(self, x):
        return self.parts["late"](self.parts["early"](x))


class PlainList(Model):
    container = staticmethod(list)

    def make(self):
        self.layers = self.container([Block(), Block()])

    def run(self, x):
        for block in self.layers:
            x = block(x)
        return x


class AsAdvised(PlainList):
    container = nn.ModuleList


class InForward(Model):
    def make(self):
        pass

    def run(self, x):
        return Block()(Block()(x))


class MLP(Model):
    def make(self):
        self.net = feed_forward()

    def run(self, x):
        return self.net(x)


class RNN(Model):
    def make(self):
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def run(self, x):
        return self.rnn(x)[0]


class Parts(Model):
    """Attention and feed-forward parts in lists of their own, so no module is a block."""

    def make(self):
        self.attns, self.mlps = (nn.ModuleList(make() for _ in range(2)) for make in (Attention, feed_forward))

    def run(self, x):
        for attention, mlp in zip(self.attns, self.mlps, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return x


class Convolutions(Model):
    """Of states (B, D, T)."""

    def make(self):
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv1d(WIDTH, WIDTH, 1))
            for _ in range(2)
        )

    def run(self, x):
        x = x.mT
        for layer in self.layers:
            x = layer(x)
        return x.mT


def advice(model):
    with pytest.raises(NoBlocksFound) as caught:
        tsemon.attach(model, run="run")
    return str(caught.value)


@pytest.fixture
def similarities(tmp_path):
    """Of each state as tsemon has it, as the definition has it, and the status."""

    def similarities(model, blocks):
        seen, modules = [], [model.get_submodule(name) for name in blocks]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with tsemon.attach(model, optimizer, run="run", every=1, blocks=blocks, spool_dir=tmp_path) as monitor:
            handles = [modules[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))]
            handles += [module.register_forward_hook(lambda *args: seen.append(args[-1])) for module in modules]
            ids = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))
            for _ in range(2):
                seen.clear()
                model(ids).square().mean().backward()
                states = [x[0] if isinstance(x, tuple) else x for x in seen]
                optimizer.step()
                monitor.step()
        assert monitor.status.num_faults == 0
        for handle in handles:
            handle.remove()
        expected = [similarity(x.detach().double()) for x in states]
        frame = frames_in(tmp_path)[-1]
        found = values_of(frame, "token_similarity") if "token_similarity" in frame["layers"] else None
        return found, expected, monitor.status

    return similarities


def similarity(x_BTD):
    shared_B = x_BTD.mean(dim=1).square().sum(dim=-1) * x_BTD.shape[1]
    return (shared_B / x_BTD.square().sum(dim=(1, 2))).mean().item()


class TestTheAdvice:
    @pytest.mark.parametrize(
        ("make", "blocks"),
        [
            (Attributes, ["first", "second", "third"]),
            (Inside, ["inner.first", "inner.second", "inner.third"]),
            (Single, ["block"]),
            (Keys, ["parts.early", "parts.late"]),
        ],
    )
    def test_names_modules_that_work(self, similarities, make, blocks):
        model = make()
        named = re.search(r"blocks=\[(.*)\]\)$", advice(model))[1]
        assert named == ", ".join(map(repr, blocks[:2])) + (", ..." if len(blocks) > 2 else "")
        found, expected, status = similarities(model, blocks)
        assert found == pytest.approx(expected, rel=1e-5)
        assert len(status.attentions) == len(blocks)

    def test_of_a_plain_list_is_to_make_it_a_module_list(self):
        assert "layers holds modules in a plain Python container" in (text := advice(PlainList()))
        assert text.endswith("make it an nn.ModuleList")
        with tsemon.attach(AsAdvised(), run="run") as monitor:
            assert monitor.status.blocks == ["layers.0", "layers.1"]

    def test_of_blocks_that_are_made_in_forward_is_to_make_them_before(self):
        assert "Modules that are made in forward are no part of the model: make them in __init__" in advice(InForward())

    @pytest.mark.parametrize(("make", "blocks"), [(MLP, ["net"]), (RNN, ["rnn"])])
    def test_of_other_models_names_what_passes_hidden_states(self, similarities, make, blocks):
        model = make()
        assert "name the modules whose forward takes and returns hidden states (batch, tokens, width)" in advice(model)
        found, expected, status = similarities(model, blocks)
        assert found == pytest.approx(expected, rel=1e-5)
        assert "no softmax self-attention was found there" in status.not_measured["attention_entropy"]

    def test_names_no_parts_of_blocks(self):
        assert advice(Parts()).endswith("in depth order: attach(..., blocks=[...])")

    def test_of_convolutions_gives_no_wrong_numbers(self, similarities):
        model = Convolutions()
        assert "blocks=['layers.0', 'layers.1']" in advice(model)
        found, _, status = similarities(model, ["layers.0", "layers.1"])
        assert found is None
        why = "the last axis of a state of shape (3, 32, 12) is not its width 32"
        assert why in status.not_measured["token_similarity"]
