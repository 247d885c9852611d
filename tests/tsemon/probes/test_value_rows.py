"""Packed projections in every order of their rows, under one name, beside norms that the test sums itself."""

import functools
import itertools
import threading

import pytest
import torch
from torch import nn
from torch._C import _len_torch_function_stack
from torch.nn import functional as F

from tests.tsemon.probes.probing import probe_of
from tsemon.probes.value_rows import Alike, rows_of_copy, rows_of_view, sums_of

D, H, K = 32, 4, 8
WANTED = {"grad_norm_qk"}
ORDERS = {
    "query, key, value": lambda y: y.unflatten(-1, (3, H, K)).movedim(2, 0),
    "value, query, key": lambda y: [y.unflatten(-1, (3, H, K))[:, :, part] for part in (1, 2, 0)],
    "head by head": lambda y: y.unflatten(-1, (H, 3 * K)).chunk(3, -1),
    "alternating": lambda y: y.unflatten(-1, (H, K, 3)).movedim(-1, 0),
}
IS_VALUE_R = {
    "query, key, value": torch.arange(3 * D) >= 2 * D,
    "value, query, key": torch.arange(3 * D) < D,
    "head by head": torch.arange(3 * D) % (3 * K) >= 2 * K,
    "alternating": torch.arange(3 * D) % 3 == 2,
}


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def of_copies(q, k, v):
    return F.scaled_dot_product_attention(
        q, k, torch.cat([v, v[:, :, :0]], dim=2)
    )  # as a cache of keys and values does


def in_float64(q, k, v):
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double()).float()


def by_hand(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / K**0.5, dim=-1) @ v


def merged(q, k, v):
    size = q.shape
    q, k, v = (x.reshape(-1, *size[2:]) for x in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), v).view(size)


class Attention(nn.Module):
    def __init__(self, order, attend):
        super().__init__()
        self.num_heads, self.order, self.attend = H, order, attend
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = (part.transpose(1, 2) for part in ORDERS[self.order](self.qkv(x)))
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, *how):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(D), Attention(*how)
        self.norm2, self.mlp = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, *how):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(*how) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class FewKeys(nn.Module):
    """Queries of twice the model's width, keys and values of half of it."""

    order = "query, key, value"

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).split([2 * D, D // 2, D // 2], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, K)).transpose(1, 2) for part in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class WithoutBias(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight), self.bias


def attention_with_tuple(attention, x):
    y, _ = attention.qkv(x)
    q, k, v = (part.transpose(1, 2) for part in ORDERS[attention.order](y))
    return attention.proj(fused(q, k, v).transpose(1, 2).flatten(2))


def take_later(reading):
    for note in reading.later:
        note.finish(note.raw)


def under_meta(function, *args):
    with torch.device("meta"):
        function(*args)


def sampled(probe, model, optimizer, call=None, take_later=take_later):
    """A sample's norms with what the test expects, and what the host does with it."""
    probe.arm(WANTED)
    (call or model)(torch.randn(5, 7, D)).square().mean().backward()
    expected = [norm_of_others(block.attn.qkv, IS_VALUE_R[block.attn.order]) for block in model.blocks]
    optimizer.step()
    optimizer.zero_grad()
    reading = probe.collect()
    probe.disarm()
    take_later(reading)
    return reading.layers["grad_norm_qk"], torch.tensor(expected)


def norm_of_others(projection, is_value_R):
    gradients = [p.grad[~is_value_R].flatten() for p in projection.parameters() if p.grad is not None]
    return torch.cat(gradients).norm().item()


def trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return probe_of(model, optimizer), optimizer


class TestQueriesAndKeysOfAPackedProjection:
    @pytest.mark.parametrize(("order", "attend"), [*itertools.product(ORDERS, (fused, by_hand))])
    def test_are_the_rows_that_no_value_views_in_the_first_sample(self, order, attend):
        model = Model(order, attend)
        probe, optimizer = trained(model)
        for _ in range(2):
            torch.testing.assert_close(*sampled(probe, model, optimizer), rtol=1e-5, atol=0)
            assert not probe.not_measured
            assert "unchecked" not in probe.how["parameters"]

    @pytest.mark.parametrize(("order", "attend"), [*itertools.product(ORDERS, (of_copies, in_float64, merged))])
    def test_are_the_other_rows_of_copied_values_from_the_second_sample_on(self, order, attend):
        model = Model(order, attend)
        probe, optimizer = trained(model)
        norms, _ = sampled(probe, model, optimizer)
        assert norms.isnan().all()
        assert "not known yet which rows of a packed projection" in probe.not_measured["grad_norm_qk"]
        for _ in range(2):
            torch.testing.assert_close(*sampled(probe, model, optimizer), rtol=1e-5, atol=0)
            assert not probe.not_measured

    def test_are_not_known_before_the_host_has_compared(self):
        model = Model("head by head", of_copies)
        probe, optimizer = trained(model)
        for _ in range(3):
            probe.arm(WANTED)
            model(torch.randn(5, 7, D)).square().mean().backward()
            optimizer.step()
            assert probe.collect().layers["grad_norm_qk"].isnan().all()
            probe.disarm()

    @pytest.mark.parametrize("order", ["query, key, value", "head by head"])
    def test_are_the_usual_ones_where_values_are_changed_on_the_way(self, order):
        """As in a residual over values, of which nobody can say from which rows they come."""
        model = Model(order, lambda q, k, v: F.scaled_dot_product_attention(q, k, 0.5 * v))
        probe, optimizer = trained(model)
        sampled(probe, model, optimizer)
        norms, expected = sampled(probe, model, optimizer)
        assert torch.allclose(norms, expected, rtol=1e-5) == (order == "query, key, value")
        assert not probe.not_measured
        assert "the usual rows of queries and keys in 3 blocks, unchecked" in probe.how["parameters"]

    def test_are_unknown_where_the_rows_of_values_contradict_the_name(self):
        """Half of the keys' rows are values, and the other half does not make all that is left."""
        model = Model("query, key, value", lambda q, k, v: torch.cat([fused(q, v, k[..., 4:]), k[..., 4:]], dim=-1))
        probe, optimizer = trained(model)
        for _ in range(2):
            norms, _ = sampled(probe, model, optimizer)
            assert norms.isnan().all()
            assert "makes values in more or in fewer rows than its name says" in probe.not_measured["grad_norm_qk"]

    def test_are_unknown_where_the_name_leaves_keys_out(self):
        """All rows are three times the model's width, as if there were as many keys as queries."""
        model = Model("query, key, value", fused)
        for block in model.blocks:
            block.attn = FewKeys()
        probe, optimizer = trained(model)
        for _ in range(2):
            norms, _ = sampled(probe, model, optimizer)
            assert norms.isnan().all()
            assert "makes values in more or in fewer rows than its name says" in probe.not_measured["grad_norm_qk"]

    @pytest.mark.parametrize(("zero", "num_unknown"), [((1, 2), 1), ((0,), 2)])
    def test_are_known_as_soon_as_the_values_are_not_all_zero(self, zero, num_unknown):
        """Some recipes begin with weights of zero, and then rows of equal numbers are no evidence."""
        model = Model("value, query, key", of_copies)
        with torch.no_grad():
            for block in model.blocks:
                for part in zero:
                    block.attn.qkv.weight.chunk(3)[part].zero_()
                    block.attn.qkv.bias.chunk(3)[part].zero_()
        probe, optimizer = trained(model)
        for _ in range(num_unknown):
            norms, _ = sampled(probe, model, optimizer)
            assert norms.isnan().all()
            assert "not known yet which rows of a packed projection" in probe.not_measured["grad_norm_qk"]
            for block in model.blocks:
                block.attn.qkv.bias.data += torch.linspace(0, 1, 3 * D)
        torch.testing.assert_close(*sampled(probe, model, optimizer), rtol=1e-5, atol=0)
        assert not probe.not_measured

    def test_are_found_whatever_device_is_the_default(self):
        model = Model("head by head", of_copies)
        probe, optimizer = trained(model)
        sampled(probe, model, optimizer, take_later=functools.partial(under_meta, take_later))
        torch.testing.assert_close(*sampled(probe, model, optimizer), rtol=1e-5, atol=0)

    def test_are_unknown_for_some_samples_where_no_pass_shows_attention(self):
        model = Model("query, key, value", fused)
        probe, optimizer = trained(model)
        for block in model.blocks:
            block.attn.attend = lambda q, k, v: v + q.mean() + k.mean()  # no attention at all
        found = [bool(sampled(probe, model, optimizer)[0].isnan().all()) for _ in range(5)]
        assert found == [True, True, True, False, False]

    def test_of_a_compiled_model_come_from_the_extra_pass(self):
        model = Model("head by head", fused)
        model.compile(backend="eager")
        probe, optimizer = trained(model)
        norms, _ = sampled(probe, model, optimizer)
        assert norms.isnan().all()  # it came after the gradients were read
        assert "not known yet which rows of a packed projection" in probe.not_measured["grad_norm_qk"]
        torch.testing.assert_close(*sampled(probe, model, optimizer), rtol=1e-5, atol=0)

    def test_of_attention_that_blocks_share_count_in_the_first_of_them(self):
        model = Model("value, query, key", fused)
        for block in model.blocks:
            block.attn = model.blocks[0].attn
        probe, optimizer = trained(model)
        norms, expected = sampled(probe, model, optimizer)
        torch.testing.assert_close(norms[0], expected[0], rtol=1e-5, atol=0)
        assert norms[1:].isnan().all()

    def test_are_found_in_a_projection_that_returns_a_tuple(self):
        """As Megatron's do, with a bias that somebody else adds."""
        model = Model("value, query, key", fused)
        for block in model.blocks:
            block.attn.qkv = WithoutBias(D, 3 * D)
            block.attn.forward = functools.partial(attention_with_tuple, block.attn)
        probe, optimizer = trained(model)
        torch.testing.assert_close(*sampled(probe, model, optimizer), rtol=1e-5, atol=0)

    def test_are_found_while_another_thread_evaluates_the_model(self):
        model = Model("head by head", fused)
        probe, optimizer = trained(model)
        attend, is_training = model.blocks[0].attn.attend, threading.current_thread()

        def while_another_evaluates(q, k, v):
            if threading.current_thread() is is_training:
                other = threading.Thread(target=torch.no_grad()(model), args=[torch.randn(2, 7, D)])
                other.start()
                other.join()
            return attend(q, k, v)

        model.blocks[0].attn.attend = while_another_evaluates
        for _ in range(2):
            torch.testing.assert_close(*sampled(probe, model, optimizer), rtol=1e-5, atol=0)
            assert not probe.not_measured

    def test_are_found_within_the_one_mode_of_all_who_listen(self):
        """Each mode costs time in every call, and code compiled inside the attention is compiled again for each number."""
        found = list[int]()
        model = Model("head by head", lambda *qkv: found.append(_len_torch_function_stack()) or fused(*qkv))
        probe, _ = trained(model)
        probe.arm({*WANTED, "attention_entropy", "first_value_norm_ratio"})
        model(torch.randn(5, 7, D))
        probe.disarm()
        assert found == [1] * len(model.blocks)

    def test_leave_no_tap_once_they_are_known(self):
        model = Model("head by head", fused)
        probe, optimizer = trained(model)
        sampled(probe, model, optimizer)
        probe.arm(WANTED)
        assert all("forward" not in vars(module) and not module._forward_hooks for module in model.modules())
        probe.disarm()


class TestRowsOfView:
    @pytest.mark.parametrize("order", ORDERS)
    def test_are_where_the_view_lies(self, order):
        output = torch.randn(5, 7, 3 * D)
        values = ORDERS[order](output)[2].transpose(1, 2)
        assert torch.equal(rows_of_view(values, output), IS_VALUE_R[order])

    def test_of_shared_heads_are_theirs(self):
        output = torch.randn(5, 7, 64)
        values = output[..., 48:].unflatten(-1, (2, 1, 8)).expand(-1, -1, -1, 2, -1).movedim(1, 3)
        assert rows_of_view(values, output).nonzero()[:, 0].tolist() == [*range(48, 64)]

    def test_are_found_wherever_the_output_and_the_tokens_begin(self):
        output = torch.randn(5 + 5 * 7 * 3 * D)[5:].view(5, 7, 3 * D)
        values = ORDERS["value, query, key"](output)[2][:, 3:].transpose(1, 2)
        assert torch.equal(rows_of_view(values, output), IS_VALUE_R["value, query, key"])

    def test_are_unknown_in_a_view_that_has_other_rows_of_each_token(self):
        output = torch.randn(4, 6, 12)
        assert rows_of_view(output.view(4, 1, 9, 8), output) is None

    def test_are_unknown_in_what_is_no_view(self):
        output = torch.randn(4, 6, 12)
        assert rows_of_view(output.clone()[:, None], output) is None
        assert rows_of_view(output.transpose(0, 1)[:, None], output.transpose(0, 1)) is None


class TestRowsOfCopy:
    def rows_of(self, values_BHSK, output_BTR):
        return rows_of_copy(sums_of(values_BHSK, (0, 2)), sums_of(output_BTR.flatten(0, -2), (0,)))

    def test_are_those_with_the_same_numbers(self):
        output = torch.randn(5, 7, 96)
        values = output[..., torch.randperm(96)[:32]].unflatten(-1, (4, 8)).transpose(1, 2)
        found = self.rows_of(values.flip(0, 2), output)
        assert found.sum() == 32
        assert {*output[..., found].flatten().tolist()} == {*values.flatten().tolist()}

    def test_are_unknown_where_one_entry_is_of_no_row(self):
        output = torch.randn(5, 7, 96)
        values = output[..., :32].unflatten(-1, (4, 8)).transpose(1, 2).clone()
        assert self.rows_of(values, output) is not None
        values[0, 0, 0, 0] *= 1.001
        assert self.rows_of(values, output) is None

    def test_are_not_told_apart_while_values_are_in_rows_that_are_alike(self):
        with pytest.raises(Alike):
            self.rows_of(torch.zeros(5, 4, 7, 8), torch.zeros(5, 7, 96))
        output = torch.randn(5, 7, 96)
        output[..., 10] = output[..., 50]
        with pytest.raises(Alike):
            self.rows_of(output[..., :32].unflatten(-1, (4, 8)).transpose(1, 2), output)

    def test_do_not_hang_on_other_rows_that_are_alike(self):
        output = torch.randn(5, 7, 96)
        output[..., 40:] = 0.0
        found = self.rows_of(output[..., :32].unflatten(-1, (4, 8)).transpose(1, 2), output)
        assert torch.equal(found, torch.arange(96) < 32)

    def test_do_not_hang_on_the_sign(self):
        output = torch.randn(5, 7, 96)
        assert self.rows_of(-output[..., :32].unflatten(-1, (4, 8)).transpose(1, 2), output) is None
