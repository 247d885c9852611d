import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tsemon
from tests import zoo
from tests.tsemon.probes.attending import (
    MEASURES,
    ROWS,
    Attending,
    OneAttention,
    on_host,
    parts_of_attention,
    reading_of_attention,
)
from tests.tsemon.probes.probing import reading_of
from tests.tsemon.probes.recording import recorded
from tsemon.errors import InvalidArgument
from tsemon.measures import first_value_norm_ratio as norm_ratio
from tsemon.measures import importance_entropy, positions_attended, second_eigenvalue, value_spectrum
from tsemon.measures.rows import choose
from tsemon.measures.scores import DotProducts, Materialised
from tsemon.probes import find_blocks
from tsemon.probes.attention import AttentionProbe
from tsemon.probes.calls import Calls
from tsemon.probes.mixing import MixingProbe
from tsemon.probes.packing import Packing
from tsemon.probes.tap import Seen

MODELS = (
    zoo.bert,
    zoo.gpt2,
    zoo.llama,
    zoo.vit,
    zoo.torch_encoder,
    zoo.torch_decoder,
    zoo.our_vision_transformer,
    zoo.our_language_model,
)
CAUSAL = (zoo.gpt2, zoo.llama, zoo.torch_decoder, zoo.our_language_model)


def sharpened(make, factor=12.0, **kwargs):
    """In eval mode, with attention that is far from uniform: at its initialisation it is all but that."""
    torch.manual_seed(0)
    model, forward = make(**kwargs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("query", "key", "q_proj", "k_proj", "c_attn", "in_proj_weight")):
                parameter.mul_(factor if parameter.std() < 0.05 else 2.0)
    return model.eval(), forward


def inputs_of(make):
    """A function that runs any model of this kind, in its own precision."""

    def forward(model):
        dtype = next(model.parameters()).dtype
        generator = torch.Generator().manual_seed(1)
        if make in (zoo.vit, zoo.our_vision_transformer):
            channels = 3 if make is zoo.vit else 1
            return model(torch.randn(4, channels, 16, 16, generator=generator).to(dtype))
        if make is zoo.torch_encoder:
            return model(torch.randn(12, 4, 32, generator=generator).to(dtype))
        if make is zoo.torch_decoder:
            x_BTD = torch.randn(4, 12, 32, generator=generator).to(dtype)
            mask = nn.Transformer.generate_square_subsequent_mask(12).to(dtype)
            return model(x_BTD, x_BTD.flip(1), tgt_mask=mask, tgt_is_causal=True)
        return model(zoo.ids())

    return forward


def in_words(weights_BHTT, is_causal):
    """Every measure of one layer's weights, from its definition."""
    tokens = weights_BHTT.shape[-1]
    visible_T = torch.arange(1, tokens + 1) if is_causal else torch.full((tokens,), tokens)
    share_BHT = torch.special.entr(weights_BHTT).sum(-1)[..., visible_T > 1] / visible_T[visible_T > 1].double().log()
    entropy_H = share_BHT.mean(dim=(0, 2))
    return {
        "attention_entropy": entropy_H.mean(),
        "attention_entropy_min": entropy_H.amin(),
        "attention_entropy_se": torch.zeros(()),
        "importance_entropy": importance_entropy(weights_BHTT.mean(dim=1)).mean() / math.log(tokens),
        "sink_share": weights_BHTT[:, :, 1:, 0].mean(),
        "positions_attended": positions_attended(weights_BHTT).mean(),
        "spectral_gap": 1 - second_eigenvalue(weights_BHTT[0]).mean(),
    }


HUGGING_FACE = (zoo.bert, zoo.gpt2, zoo.llama, zoo.vit)


class TestAttentionMeasures:
    @pytest.mark.parametrize(
        ("make", "options"),
        [(make, {"attn_implementation": kind}) for make in HUGGING_FACE for kind in ("sdpa", "eager")]
        + [(make, {}) for make in MODELS if make not in HUGGING_FACE],
        ids=lambda value: getattr(value, "__name__", None) or "".join(value.values()) or "own",
    )
    def test_equal_their_definitions_on_the_models_own_weights_and_values(self, make, options):
        model, _ = sharpened(make, **options)
        forward = inputs_of(make)
        reading, probe = reading_of(model, lambda: forward(model))
        weights, values = recorded(model, forward)
        own = slice(0, None, 2 if make is zoo.torch_decoder else 1)  # every second attends to the memory
        weights, values = weights[own], values[own]
        assert len(weights) == 3
        assert not any(name in probe.not_measured for name in ROWS)
        for layer, (weights_BHTT, values_BHSK) in enumerate(zip(weights, values, strict=True)):
            expected = in_words(weights_BHTT, make in CAUSAL)
            values_BSD = values_BHSK.transpose(1, 2).flatten(2)
            expected["first_value_norm_ratio"] = norm_ratio(values_BSD).mean()
            # Its two key heads are counted once; the model repeats each for the two query heads that share it.
            repeats = 2 if make is zoo.llama else 1
            expected["value_top_eigenvalue"] = value_spectrum(values_BSD[0])[0] / repeats
            assert expected["attention_entropy"] < 0.97, "far enough from uniform to tell right from wrong"
            for name, value in expected.items():
                got = on_host(reading.layers[name])[layer].double()
                # float32 against float64, through up to three layers
                torch.testing.assert_close(got, value.double(), rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")

    def test_of_the_logits_is_the_largest_that_a_query_may_see(self):
        torch.manual_seed(0)
        query, key = torch.randn(2, 1, 3, 10, 8)
        mask = torch.rand(10, 10).tril() - 1e9 * torch.ones(10, 10).triu(1)
        reading = reading_of_attention(query, key, key, attn_mask=mask)
        logits = query @ key.mT / math.sqrt(8) + mask
        torch.testing.assert_close(reading.heads["max_attention_logit"][0], logits.amax(dim=(0, 2, 3)))
        torch.testing.assert_close(reading.layers["max_attention_logit"][0], logits.amax())

    @pytest.mark.parametrize("kind", ["plain", "causal", "hidden keys", "bias", "grouped", "fewer keys", "one head"])
    @pytest.mark.parametrize(("tokens", "num_weights"), [(30, 2**20), (130, 2**20), (130, 130 * 2 * 7), (201, 1)])
    def test_of_the_logits_is_the_maximum_over_all_rows(self, kind, tokens, num_weights, monkeypatch):
        monkeypatch.setattr("tsemon.measures.rows.CHUNK_WEIGHTS", num_weights)
        generator = torch.Generator().manual_seed(tokens)
        heads = 1 if kind == "one head" else 4
        query, key = torch.randn(2, 3, heads, tokens, 8, generator=generator)
        chosen = choose(DotProducts(query, key).size, 8, query.device)
        unweighed = {*range(tokens - 5)} - {*chosen.rows.tolist()}
        query[:, :, max(unweighed)] *= 10
        arguments, visible, bias = {}, torch.ones(tokens, tokens, dtype=torch.bool), 0.0
        if kind == "causal":
            arguments, visible = {"is_causal": True}, visible.tril()
        elif kind == "hidden keys":
            visible = torch.rand(3, 1, tokens, tokens, generator=generator) > 0.5
            arguments = {"attn_mask": visible}
        elif kind == "bias":
            visible = visible.tril()
            bias = torch.randn(heads, tokens, tokens, generator=generator)
            arguments = {"attn_mask": bias.masked_fill(~visible, -1e9)}
        elif kind == "grouped":
            key = key[:, ::2]
            arguments = {"enable_gqa": True}
        elif kind == "fewer keys":
            key, visible = key[:, :, : tokens // 2], visible[:, : tokens // 2]
        is_token = torch.arange(tokens) < torch.tensor([tokens, tokens, tokens - 5])[:, None]
        reading = reading_of_attention(
            query, key, key, rows=8, measures=ROWS, attention_mask=is_token.long(), **arguments
        )
        key = key.double().repeat_interleave(heads // key.shape[1], dim=1)
        logits = query.double() @ key.mT / math.sqrt(8) + bias
        counts = (visible & is_token[:, None, :, None]).expand(logits.shape)
        highest = logits.masked_fill(~counts, -torch.inf)[: chosen.num_samples].amax(dim=(0, 2, 3))
        # a few units in the last place of float32
        torch.testing.assert_close(reading.heads["max_attention_logit"][0].double(), highest, rtol=2e-6, atol=0)
        torch.testing.assert_close(reading.layers["max_attention_logit"][0].double(), highest.amax(), rtol=2e-6, atol=0)

    @pytest.mark.parametrize("tokens", [12, 100])
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_of_the_logits_is_the_maximum_of_scores_that_a_model_computes_by_itself(self, implementation, tokens):
        model, _ = sharpened(zoo.llama, attn_implementation=implementation)
        seen = []
        model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda _, args, output: seen.append(args[0]))
        ids = zoo.ids(tokens=tokens)
        reading, _ = reading_of(model, lambda: model(ids).logits, measures=ROWS, attention_rows=4)
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        attention, x = model.model.layers[1].self_attn.double(), seen[0].detach().double()
        query, key = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))
        cos, sin = model.model.rotary_emb(x, torch.arange(tokens)[None])
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        logits = query @ key.repeat_interleave(2, dim=1).mT / math.sqrt(8)
        is_future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        highest = logits.masked_fill(is_future, -torch.inf).amax()
        torch.testing.assert_close(reading.layers["max_attention_logit"][1].double(), highest, rtol=1e-5, atol=0)

    def test_weigh_all_rows_in_chunks_as_in_one_piece(self, monkeypatch):
        torch.manual_seed(0)
        query, key, value = torch.randn(3, 5, 2, 40, 8)
        valid = torch.arange(40) < torch.tensor([40, 31, 7, 1, 0])[:, None]
        readings = []
        for num_weights in (2**20, 2 * 40 * 3, 1):  # all in one, three rows a chunk, one row a chunk
            monkeypatch.setattr("tsemon.measures.rows.CHUNK_WEIGHTS", num_weights)
            monkeypatch.setattr("tsemon.measures.mixing.CHUNK_WEIGHTS", num_weights)
            readings.append(reading_of_attention(query, key, value, is_causal=True, attention_mask=valid.long()))
        for name in MEASURES:
            for reading in readings[1:]:
                # Sums in another order: a few units in the last place of float32.
                one, other = on_host(readings[0].layers[name]), on_host(reading.layers[name])
                torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert readings[0].layers["attention_entropy"].isfinite().all()

    @pytest.mark.parametrize(
        "make",
        [functools.partial(AttentionProbe, rows="all"), functools.partial(AttentionProbe, rows=4), MixingProbe],
        ids=["all rows", "a few rows", "mixing"],
    )
    def test_never_hold_a_matrix_of_tokens_by_tokens(self, make, monkeypatch):
        monkeypatch.setattr("tsemon.measures.rows.CHUNK_WEIGHTS", 2**14)
        monkeypatch.setattr("tsemon.measures.mixing.CHUNK_WEIGHTS", 2**14)
        query = torch.randn(1, 2, 512, 4, generator=torch.Generator().manual_seed(0))
        (block,) = find_blocks(OneAttention(Attending(None)))
        part = make([block], 1, Packing([block]), Calls([block]))
        part.want(part.METRICS)
        with LargestTensor() as largest:  # not through a hook, which would keep its tensors from other modes
            assert part.look(block, Seen(scores=lambda: DotProducts(query, query)))
        assert 2**14 <= largest.numel < 512**2 / 4

    def test_draw_nothing_from_the_global_random_state(self):
        query = torch.randn(2, 2, 20, 4, generator=torch.Generator().manual_seed(0))
        before = torch.get_rng_state()
        reading_of_attention(query, query, query)
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("rows", ["all", 4])
    def test_read_nothing_back_from_the_device(self, rows):
        """On `meta` nothing has a value, so whatever would wait for the device raises."""
        query = torch.empty(2, 2, 20, 4, device="meta")
        mask = torch.empty(20, 20, device="meta")
        reading = reading_of_attention(query, query, query, attn_mask=mask, rows=rows)
        raw = {name: getattr(value, "raw", value) for name, value in reading.layers.items()}
        assert {value.device.type for value in raw.values()} == {"meta"}
        assert set(raw) == MEASURES

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_are_computed_in_float32_from_halves(self, dtype):
        torch.manual_seed(0)
        query, key, value = torch.randn(3, 2, 2, 20, 8).to(dtype)
        half = reading_of_attention(query, key, value, is_causal=True)
        wide = reading_of_attention(query.float(), key.float(), value.float(), is_causal=True)
        for name, expected in wide.layers.items():
            torch.testing.assert_close(on_host(half.layers[name]), on_host(expected), rtol=1e-5, atol=1e-6)

    def test_leave_padding_out_on_whichever_side_it_is(self):
        torch.manual_seed(0)
        query, key, value = torch.randn(3, 2, 2, 9, 8)
        alone = reading_of_attention(query, key, value, is_causal=True)
        for pad in ((0, 0, 4, 0), (0, 0, 0, 4)):
            valid = F.pad(torch.ones(2, 9, dtype=torch.long), pad[2:]).bool()
            padded = [F.pad(x, pad, value=3.0) for x in (query, key, value)]
            seen = torch.ones(13, 13, dtype=torch.bool).tril() & valid[:, None, None, :]
            for arguments in ({"attention_mask": valid.long()}, {}):  # told, or taken from the mask
                if not arguments and pad[3]:
                    continue  # queries of padding on the right see tokens: only a padding mask tells that they ask nothing
                reading = reading_of_attention(*padded, attn_mask=seen, **arguments)
                names = ROWS if not arguments else reading.layers
                for name in names:
                    got, expected = on_host(reading.layers[name]), on_host(alone.layers[name])
                    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")

    def test_of_one_token_are_undefined_but_for_the_logit_and_the_count(self):
        x = torch.ones(2, 2, 1, 4)
        reading = reading_of_attention(x, x, x)
        known = {name for name, value in reading.layers.items() if on_host(value).isfinite().all()}
        assert known == {"max_attention_logit", "positions_attended", "value_top_eigenvalue"}

    def test_leave_out_rows_that_see_nothing(self):
        torch.manual_seed(0)
        query, key = torch.randn(2, 2, 2, 12, 8)
        visible = torch.ones(12, 12, dtype=torch.bool)
        visible[5:7] = False
        for mask in (visible, torch.zeros(12, 12).masked_fill(~visible, -torch.inf)):
            reading = reading_of_attention(query, key, key, attn_mask=mask)
            weights = (query @ key.mT / math.sqrt(8)).softmax(-1)[:, :, [*range(5), *range(7, 12)]]
            expected = torch.special.entr(weights).sum(-1).mean() / math.log(12)
            torch.testing.assert_close(reading.layers["attention_entropy"][0], expected)
            torch.testing.assert_close(reading.layers["sink_share"][0], weights[:, :, 1:, 0].mean())

    def test_of_a_sequence_that_is_not_finite_do_not_hide_the_others(self):
        torch.manual_seed(0)
        query, key, value = torch.randn(3, 3, 2, 12, 8)
        others = reading_of_attention(query[1:], key[1:], value[1:])
        for x in (query, key, value):
            x[0, :, 3] = torch.nan
        reading = reading_of_attention(query, key, value)
        for name in (
            "attention_entropy",
            "attention_entropy_se",
            "importance_entropy",
            "sink_share",
            "positions_attended",
        ):
            torch.testing.assert_close(reading.layers[name], others.layers[name])


class TestSeveralRanks:
    def test_make_of_their_sums_what_one_makes_of_the_whole_batch(self):
        torch.manual_seed(0)
        query, key = 2 * torch.randn(2, 6, 2, 128, 8)
        names = ROWS | {"first_value_norm_ratio"}
        whole = reading_of_attention(query, key, key, measures=names)
        ranks = [
            parts_of_attention(query[some], key[some], key[some], measures=names) for some in (slice(0, 2), slice(2, 6))
        ]
        for name in ("attention", "values"):
            first, second = (parts[name].collect() for parts in ranks)
            merged = {
                key: torch.maximum(partial.value, second[key].value)
                if partial.merge == "max"
                else partial.value + second[key].value
                for key, partial in first.items()
            }
            for group in ("layers", "heads"):
                for metric, value in getattr(ranks[0][name].finish(merged), group).items():
                    torch.testing.assert_close(value, getattr(whole, group)[metric])


class TestImportanceEntropy:
    def test_of_uniform_causal_attention_is_below_one(self):
        x = torch.zeros(1, 2, 64, 4)
        reading = reading_of_attention(x, x, x, is_causal=True)
        assert reading.layers["importance_entropy"][0] == pytest.approx(3.754 / 4.159, abs=2e-4)  # of 64 tokens

    def test_is_low_by_the_inverse_of_the_rows_that_are_weighed(self):
        generator = torch.Generator().manual_seed(0)
        query, key = (
            2 * torch.randn(8, 4, 256, 16, generator=generator),
            torch.randn(8, 4, 256, 16, generator=generator),
        )
        exact = reading_of_attention(query, key, key, rows="all").layers["importance_entropy"]
        short_16, short_32 = (
            exact - reading_of_attention(query, key, key, rows=rows).layers["importance_entropy"] for rows in (16, 32)
        )
        assert short_32 > 0
        assert 1.7 < short_16 / short_32 < 2.4  # about 1/m, a little more as rows are not drawn with replacement


class TestAttentionEntropySe:
    @pytest.mark.parametrize(
        ("kind", "low", "high"),
        [("alike", 0.8, 1.25), ("rows differ by place", 1.0, 3.0), ("sequences differ", 0.6, 1.4)],
    )
    def test_is_what_the_sampled_entropy_misses_by(self, kind, low, high):
        """Rows from the middles of equal stretches: where entropy changes with the place they miss by less than it says."""
        errors, said = [], []
        for seed in range(40):
            generator = torch.Generator().manual_seed(seed)
            query, key = 2 * torch.randn(2, 10, 4, 128, 8, generator=generator)
            if kind == "rows differ by place":
                query = query * torch.linspace(0.2, 2, 128)[:, None]
            if kind == "sequences differ":
                query = query * torch.exp(0.3 * torch.randn(10, 1, 1, 1, generator=generator))
            exact = reading_of_attention(query, key, key, rows="all", measures=ROWS).layers
            sampled = reading_of_attention(query, key, key, rows=16, measures=ROWS).layers
            assert exact["attention_entropy_se"] == 0
            errors.append((sampled["attention_entropy"] - exact["attention_entropy"]).item())
            said.append(sampled["attention_entropy_se"].item())
        missed = math.sqrt(sum(error**2 for error in errors) / len(errors))
        # 40 squared errors tell their root to 11 %; 8 of 10 sequences are weighed, or their spread would be less well known
        assert low < (sum(said) / len(said)) / missed < high


class TestAttentionRows:
    @pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "some", None])
    def test_are_a_number_or_all(self, wrong):
        with pytest.raises(InvalidArgument, match=r"at least 1 or 'all', got"):
            tsemon.attach(zoo.torch_encoder()[0], run="r", attention_rows=wrong)

    @pytest.mark.parametrize(("rows", "is_exact"), [(4, False), (12, True), ("all", True)])
    def test_are_weighed_as_many_as_attach_was_told(self, rows, is_exact, tmp_path):
        from tests.tsemon.test_monitor import frames_in, values_of

        model, forward = zoo.our_language_model()
        monitor = tsemon.attach(model, run="r", every=1, spool_dir=tmp_path, attention_rows=rows)
        forward()
        monitor.step()
        monitor.close()
        errors = values_of(frames_in(tmp_path)[0], "attention_entropy_se")
        assert all((error == 0) == is_exact for error in errors)


class LargestTensor(TorchDispatchMode):
    """Remembers how large the largest tensor was that anything made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return result


class TestScoresOfASaturatedNetwork:
    """They are far larger than masks."""

    @pytest.fixture
    def scores(self):
        later = ~torch.ones(6, 6).tril().bool()
        scores = 1e12 * torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(0))
        return scores.masked_fill(later, 0.0)  # a mask that multiplies

    def test_are_of_tokens_and_not_of_padding(self, scores):
        positions = torch.arange(6).expand(3, 6)
        assert Materialised(scores).sees(positions).all()
        for mask in (-math.inf, torch.finfo(torch.float32).min):
            padded = scores.clone()
            padded[0, ..., 4:] = mask
            assert Materialised(padded).sees(positions).tolist() == [[True] * 4 + [False] * 2, [True] * 6, [True] * 6]

    def test_show_their_highest_key(self, scores):
        found, visible = Materialised(scores).at(torch.arange(6))
        assert torch.equal(torch.where(visible, found, -torch.inf).amax(3), scores.amax(3))
