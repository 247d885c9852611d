"""Each way in which a value can be missing gives its own reason, and names only causes that are possible there."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsemon
from tests import zoo
from tests.tsemon.probes.probing import ALL, probe_of, raise_fault, reading_of
from tsemon.probes import Probe, find_blocks
from tsemon.probes.states import NO_STATE

OF_ATTENTION = ("attention_entropy", "max_attention_logit", "first_value_norm_ratio", "value_top_eigenvalue")


@pytest.fixture(autouse=True)
def nothing_compiled():
    """As in a process in which no other test has compiled anything."""
    torch._dynamo.utils.counters.clear()


class SelfAttention(nn.Module):
    """Attends in the way that it is given."""

    def __init__(self, attend):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.attend = attend

    def forward(self, x_BTD):
        return self.attend(
            *(p(x_BTD).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.query, self.key, self.value))
        )


class Block(nn.Module):
    def __init__(self, attend=None, feed_forward=True):
        super().__init__()
        self.attention = SelfAttention(attend or plain)
        self.norm = nn.LayerNorm(16)
        self.feed_forward = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) if feed_forward else None

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.attention(x_BTD)
        return x_BTD + self.feed_forward(self.norm(x_BTD)) if self.feed_forward else self.norm(x_BTD)


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Block(), Block()])
        self.is_skipped = False

    def forward(self, x_BTD):
        for block in self.blocks[self.is_skipped :]:
            x_BTD = block(x_BTD)
        return x_BTD

    def encode(self, x_BTD):
        return Model.forward(self, x_BTD)


def joined(heads_BHTK):
    return heads_BHTK.transpose(1, 2).flatten(2)


def plain(query, key, value):
    return joined(F.scaled_dot_product_attention(query, key, value))


def by_hand(query, key, value):
    """Neither a softmax nor an attention that PyTorch has."""
    weights = (query @ key.mT).exp()
    return joined((weights / weights.sum(dim=-1, keepdim=True)) @ value)


def without_product(query, key, value):
    weights = (query @ key.mT).softmax(dim=-1)
    return joined((weights[..., None] * value[:, :, None]).sum(dim=-2))


def fewer_keys(query, key, value):
    return plain(query, key[:, :, ::2], value[:, :, ::2])


def x_BTD(tokens=6):
    return torch.randn(3, tokens, 16, generator=torch.Generator().manual_seed(0))


def reasons(model, forward=None, optimizer=None):
    _, probe = reading_of(model, forward or (lambda: model(x_BTD())), optimizer, layout="BTC")
    return probe.not_measured


class TestAReason:
    def test_of_an_unknown_kernel_names_the_kernels_that_are_known(self):
        found = reasons(Model(Block(by_hand), Block()))
        for name in OF_ATTENTION:
            assert "in 1 of 2 blocks: SelfAttention called no function that tsemon knows as attention" in found[name]
        assert found.keys() & {"token_similarity", "dead_units", "escalation_rate"} == set()
        assert not any("compile" in why for why in found.values())

    def test_of_values_that_were_not_seen_is_about_values(self):
        found = reasons(Model(Block(without_product), Block(without_product)))
        assert found["first_value_norm_ratio"].startswith(
            "values were not seen in 2 of 2 blocks: SelfAttention made weights"
        )
        assert "attention_entropy" not in found

    def test_of_a_block_without_a_feed_forward_part_says_so(self):
        found = reasons(Model(Block(feed_forward=False), Block()))
        assert found["dead_units"] == (
            "units were not seen in 1 of 2 blocks: no linear layer leads a feed-forward part back to the block's width"
        )

    def test_of_a_block_that_was_skipped_says_so(self):
        model = Model()
        model.is_skipped = True
        found = reasons(model)
        skipped = "the pass did not call Block (skipped, or run by another method than forward)"
        assert found["attention_entropy"] == f"attention was not seen in 1 of 2 blocks: {skipped}"
        assert found["dead_units"] == f"units were not seen in 1 of 2 blocks: {skipped}"
        assert found["token_similarity"] == f"2 of 3 hidden states were not seen: {skipped}"

    def test_of_states_of_five_axes_is_their_shape(self):
        class Video(Block):
            def forward(self, x_BFHWD):
                return super().forward(x_BFHWD.flatten(1, 3)).view(x_BFHWD.shape)

        model = Model(Video(), Video())
        found = reasons(model, lambda: model(x_BTD().view(3, 1, 2, 3, 16)))
        assert found["token_similarity"] == f"3 of 3 hidden states were not seen: {NO_STATE}"
        assert NO_STATE in found["escalation_rate"]
        assert NO_STATE in found["saturation"]

    def test_of_an_evaluation_is_that_it_has_no_gradients(self):
        model = Model()
        with torch.no_grad():
            found = reasons(model)
        for name in ("token_similarity", "attention_entropy", "dead_units", "output_variation", "input_overlap"):
            assert "ran without gradients, as an evaluation does" in found[name]
        assert not any("compile" in why for why in found.values())

    def test_of_a_model_called_by_another_method_asks_nothing_about_compilation(self):
        model = Model()
        probe = probe_of(model)
        for is_first in (True, False):
            probe.arm(ALL)
            model.encode(x_BTD())
            probe.collect()
            probe.disarm()
            assert ("token_similarity" in probe.not_measured) == is_first
            if is_first:
                assert "or by another method than forward" in probe.not_measured["token_similarity"]
            assert not any("compile" in why for why in probe.not_measured.values())
        assert "the model runs them from another method than forward" in probe.not_measured["input_overlap"]
        assert "the model runs them from another method than forward" in probe.not_measured["output_variation"]

    def test_of_a_run_without_a_pass_is_that(self):
        probe = probe_of(Model())
        for _ in range(2):
            probe.arm(ALL)
            probe.collect()
            probe.disarm()
        assert probe.not_measured["token_similarity"].startswith(
            "3 of 3 hidden states were not seen: neither Model nor its first block was called"
        )
        assert "compile" not in probe.not_measured["saturation"]

    def test_of_a_compiled_function_is_that_it_may_be_one(self):
        model = Model()
        compiled = torch.compile(lambda x: model(x) * 1, backend="eager")
        compiled(x_BTD()).sum().backward()
        found = reasons(model, lambda: compiled(x_BTD()))
        assert "If a function that torch.compile made calls the model" in found["token_similarity"]

    def test_of_a_block_without_attention_is_that(self):
        model = Model(Block(), Block())
        model.blocks[1].attention = nn.Sequential(nn.Linear(16, 16))
        model.blocks[1].mixer = model.blocks[1].__dict__["_modules"].pop("attention")
        model.blocks[1].forward = lambda x: x + model.blocks[1].mixer(x)
        probe = Probe(model, [], find_blocks(model, blocks=list(model.blocks)), raise_fault)
        probe.arm(ALL)
        model(x_BTD())
        probe.collect()
        for name in ("attention_entropy", "first_value_norm_ratio", "escalation_rate"):
            assert "in 1 of 2 blocks: no softmax self-attention was found there" in probe.not_measured[name]
        assert "in 1 of 2 blocks: the pass did not call feed_forward.2" in probe.not_measured["dead_units"]

    def test_of_single_tokens_and_of_fewer_keys_is_their_number(self):
        model = Model()
        found = reasons(model, lambda: model(x_BTD(tokens=1)))
        assert found["attention_entropy"] == "in 2 of 2 blocks sequences have one token, which has no choice"
        assert "max_attention_logit" not in found
        found = reasons(Model(Block(fewer_keys), Block()))
        assert found["spectral_gap"].startswith("1 of 2 blocks have queries and keys of different numbers")

    def test_of_a_user_s_quantity_of_keys_is_about_keys(self):
        def size(x, valid):
            return x.square().mean()

        eager = lambda q, k, v: joined((q @ k.mT).softmax(dim=-1) @ v)  # noqa: E731
        model = Model(Block(eager), Block(eager))
        quantity = tsemon.Quantity(name="key_size", of="keys", function=size)
        probe = Probe(model, [], find_blocks(model), raise_fault, quantities=[quantity])
        probe.arm({"key_size"})
        model(x_BTD())
        probe.collect()
        assert (
            "computes scores by itself, from queries and keys that tsemon does not see"
            in probe.not_measured["key_size"]
        )

    def test_of_an_optimizer_that_made_no_step_asks_nothing_about_compilation(self):
        model = Model()
        probe = probe_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        probe.arm(ALL)
        model(x_BTD()).sum().backward()
        probe.collect()
        reason = "the optimizer given to attach() made no step since the last call of monitor.step()"
        assert probe.not_measured["update_norm"] == probe.not_measured["grad_norm"] == reason

    def test_of_a_sparse_gradient_in_a_block_is_that(self):
        model, forward = zoo.our_language_model()
        for block in model.blocks:
            block.table = nn.Embedding(5, 32, sparse=True)
            block.register_forward_hook(lambda b, _, output: output + b.table(torch.zeros(12, dtype=torch.long)))
        reading, probe = reading_of(model, forward, torch.optim.SGD(model.parameters(), lr=0.1))
        assert reading.layers["grad_norm"].isnan().all()
        assert reading.scalars["total_grad_norm"].isnan()
        assert probe.not_measured["grad_norm"] == "3 groups of parameters have a sparse gradient"
