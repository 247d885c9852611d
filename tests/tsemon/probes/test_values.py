import pytest
import torch
from torch import nn

from tests.tsemon.probes.attending import Attending, on_host, reading_of_attention, reading_of_call
from tests.tsemon.probes.probing import reading_of
from tsemon.measures import first_value_norm_ratio, value_spectrum

VALUES = {"first_value_norm_ratio", "value_top_eigenvalue"}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_are_those_of(reading, values_BHSK, rtol=1e-9):
    values_BSD = values_BHSK.double().transpose(1, 2).flatten(2)
    ratio, top = (on_host(reading.layers[name])[0].double() for name in sorted(VALUES))
    torch.testing.assert_close(ratio, first_value_norm_ratio(values_BSD).mean(), rtol=1e-5, atol=0)  # float32 sums
    torch.testing.assert_close(top, value_spectrum(values_BSD[0])[0], rtol=rtol, atol=0)  # float64 on the host


class TestValues:
    @pytest.mark.parametrize("how", ["matmul", "@", "bmm", "einsum", "einsum, other layout", "dropout between"])
    def test_are_what_materialised_weights_are_multiplied_with(self, how):
        query, value = drawn(3, 2, 7, 4), drawn(3, 2, 7, 5, seed=1)

        def attend():
            weights = (query @ query.mT).softmax(-1)
            if how == "matmul":
                torch.matmul(weights, value)
            elif how == "@":
                weights @ value
            elif how == "bmm":
                torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).view_as(value)
            elif how == "einsum":
                torch.einsum("bhts,bhsk->bthk", weights, value)
            elif how == "einsum, other layout":
                torch.einsum("bhts,bshk->bthk", weights, value.transpose(1, 2))
            elif how == "dropout between":
                torch.dropout(weights, 0.5, train=True) @ value

        if how == "bmm":  # as heads are part of the batch there, the softmax is, too

            def attend():
                weights = (query @ query.mT).flatten(0, 1).softmax(-1)
                torch.bmm(weights, value.flatten(0, 1))

        module = Attending(attend)
        module.num_heads = 2
        assert_are_those_of(reading_of_call(module, measures=VALUES), value)

    def test_are_not_taken_from_another_product(self):
        query, value = drawn(3, 2, 7, 4), drawn(3, 2, 7, 5, seed=1)

        def talking_heads():
            weights = (query @ query.mT).softmax(-1)
            torch.einsum("bhts,hg->bgts", weights, torch.ones(2, 2)) @ value

        assert_are_those_of(reading_of_call(talking_heads, measures=VALUES), value)

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_are_seen_inside_multihead_attention(self, need_weights):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.attn = nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.1)

            def forward(self, x):
                return x + self.attn(x, x, x, need_weights=need_weights)[0]

        torch.manual_seed(0)
        model, x = nn.Sequential(Block()), drawn(3, 10, 16)
        bmm = torch.bmm
        reading, probe = reading_of(model, lambda: model(x), measures=VALUES)
        assert torch.bmm is bmm
        attn = model[0].attn
        values = (x @ attn.in_proj_weight[32:].T + attn.in_proj_bias[32:]).detach()
        assert_are_those_of(reading, values.unsqueeze(1), rtol=1e-6)  # the projection itself is in float32
        assert probe.not_measured == {}

    def test_of_heads_that_are_repeated_for_grouped_queries_count_once(self):
        query, value = drawn(2, 4, 6, 8), drawn(2, 2, 6, 8, seed=1)
        grouped = reading_of_attention(query, value, value, measures=VALUES, enable_gqa=True)
        repeated_value = value.repeat_interleave(2, dim=1)
        repeated = reading_of_attention(query, repeated_value, repeated_value, measures=VALUES)
        for reading in (grouped, repeated):
            assert_are_those_of(reading, value)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_leave_padding_out(self, side):
        value, num_padded = drawn(2, 2, 300, 3), torch.tensor([[120], [0]])
        place = torch.arange(300) if side == "left" else torch.arange(300).flip(0)
        valid = place >= num_padded
        values = [heads[:, is_valid].transpose(0, 1).flatten(1) for heads, is_valid in zip(value, valid, strict=True)]
        value = torch.where(valid[:, None, :, None], value, torch.inf)
        reading = reading_of_attention(value, value, value, measures=VALUES, attention_mask=valid.long())
        ratio, top = (on_host(reading.layers[name])[0].item() for name in sorted(VALUES))
        assert ratio == pytest.approx(
            sum(first_value_norm_ratio(x[None].double()).item() for x in values) / 2, rel=1e-5
        )
        assert top == pytest.approx(value_spectrum(values[0].double())[0].item(), rel=1e-9)

    def test_of_a_long_sequence_stand_for_it_evenly_spread(self):
        value = drawn(1, 1, 1024, 4) * torch.linspace(0.1, 3, 1024)[:, None]
        reading = reading_of_attention(value, value, value, measures=VALUES)
        spread = value[:, :, 2::4]  # from the middle of each of 256 stretches of four
        (top,) = on_host(reading.layers["value_top_eigenvalue"])
        assert top.item() == pytest.approx(value_spectrum(spread[0, 0])[0].item(), rel=1e-9)
        assert top.item() == pytest.approx(
            value_spectrum(value[0, 0])[0].item(), rel=0.3
        )  # noise, of which it is a quarter

    def test_that_are_not_finite_have_no_eigenvalue_and_raise_nothing(self):
        value = drawn(2, 2, 6, 3)
        value[0, 0, 0, 0] = torch.nan
        reading = reading_of_attention(value, value, value, measures=VALUES)
        assert on_host(reading.layers["value_top_eigenvalue"]).isnan().all()
        assert reading.layers["first_value_norm_ratio"].isfinite().all(), "that of the other sequence"
