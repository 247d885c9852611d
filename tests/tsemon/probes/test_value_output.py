"""The value and output weights of attention, against what the attention does with equal tokens: their product."""

import pytest
import torch
import transformers
from torch import nn

from tests import zoo
from tests.tsemon.probes.probing import probe_of, reading_of
from tests.tsemon.probes.test_query_key import HUGGING_FACE
from tests.tsemon.probes.test_value_rows import ORDERS, Model, fused
from tsemon.catalogue import TIERS
from tsemon.measures import value_output_growth, value_output_negative_share
from tsemon.models import (
    CausalLanguageModel,
    CausalLanguageModelConfig,
    ReparameterisationConfig,
    ReparameterisedAttention,
)
from tsemon.probes import find_blocks
from tsemon.probes.value_output import NEGATIVE_SHARE, NORM, SPECTRA
from tsemon.sample import Sample

NAME = "value_output_growth"
D = 32
SIZES = {**zoo.SIZES, "vocab_size": 100}
OPT = {"vocab_size": 100, "hidden_size": D, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 64}
MODELS = {name: of for name, of in HUGGING_FACE.items() if "DeepSeek" not in name} | {
    "Llama, grouped queries": ("Llama", {**SIZES, "num_key_value_heads": 2}),
    "OPT": ("OPT", {**OPT, "word_embed_proj_dim": D}),
    "MPT": ("Mpt", {"vocab_size": 100, "d_model": D, "n_heads": 4, "n_layers": 2}),
}


def hugging_face(name, sizes):
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    return model


def assert_is_growth_of(products, growths):
    """Up to rounding the same power iteration, which is off by up to 8 % from the eigenvalues."""
    products = [h_DD.detach().double() for h_DD in products]
    of_whole = [value_output_growth(h_DD.T, torch.eye(D).double()) for h_DD in products]
    torch.testing.assert_close(growths.double(), torch.stack(of_whole), rtol=1e-4, atol=0.0)
    exact = [(1 + torch.linalg.eigvals(h_DD)).abs().max() for h_DD in products]
    torch.testing.assert_close(growths.double(), torch.stack(exact), rtol=0.09, atol=0.0)


def product_of(model, block):
    """H: all rows of attention weights sum to 1, so equal tokens x become x H, however the attention splits into heads."""
    attention, calls = block.attention, []
    handle = attention.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    model(torch.randint(3, 99, (D, 3)), **({} if "Bert" in type(model).__name__ else {"use_cache": False}))
    handle.remove()
    ((args, kwargs),) = calls

    def of_tokens(x_BTD):
        if "hidden_states" in kwargs:
            output = attention(*args, **kwargs | {"hidden_states": x_BTD})
        else:
            output = attention(x_BTD, *args[1:], **kwargs)
        return (output[0] if isinstance(output, tuple) else output)[:, 0]

    basis_BTD = torch.eye(D)[:, None].repeat(1, 3, 1)
    return of_tokens(basis_BTD) - of_tokens(torch.zeros_like(basis_BTD))


def growths_of(model, forward=lambda: None, measures=(NAME,)):
    return reading_of(model, forward, measures=set(measures))[0].layers[NAME]


def why_not(model):
    reading, probe = reading_of(model, lambda: None, measures={NAME})
    return reading.layers.get(NAME), probe.not_measured[NAME]


class TestTheGrowth:
    @pytest.mark.parametrize("name", MODELS)
    @torch.no_grad()
    def test_is_that_of_equal_tokens_in_attention(self, name):
        model = hugging_face(*MODELS[name])
        assert_is_growth_of([product_of(model, block) for block in find_blocks(model)], growths_of(model))

    def test_is_that_of_the_weights_of_bert_without_the_residual_and_norm_in_its_attention(self):
        model = hugging_face("Bert", SIZES)
        attentions = [layer.attention for layer in model.encoder.layer]
        products = [a.self.value.weight.T @ a.output.dense.weight.T for a in attentions]
        assert_is_growth_of(products, growths_of(model))

    def test_is_that_of_a_model_of_ours(self):
        torch.manual_seed(0)
        sizes = {"vocab": 100, "context": 12, "depth": 3, "width": D, "heads": 4, "ffn": 64}
        model = CausalLanguageModel(CausalLanguageModelConfig(**sizes))
        attentions = [block.attention for block in model.blocks]
        products = [a.to_query_key_value.weight[2 * D :].T @ a.to_output.weight.T for a in attentions]
        assert_is_growth_of(products, growths_of(model))

    @pytest.mark.parametrize("sizes", [{}, {"kdim": 24}], ids=["packed", "keys of another width"])
    def test_is_that_of_multihead_attention(self, sizes):
        torch.manual_seed(0)
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 64, batch_first=True), 2)
        for layer in model.layers:
            layer.self_attn = nn.MultiheadAttention(D, 4, batch_first=True, **sizes)
        attentions = [layer.self_attn for layer in model.layers]
        values = [a.in_proj_weight[2 * D :] if not sizes else a.v_proj_weight for a in attentions]
        products = [v.T @ a.out_proj.weight.T for v, a in zip(values, attentions, strict=True)]
        assert_is_growth_of(products, growths_of(model))

    @pytest.mark.parametrize("order", ORDERS)
    def test_is_of_the_rows_that_a_pass_shows_to_make_values(self, order):
        torch.manual_seed(0)
        model = Model(order, fused)
        x_BTD = torch.eye(D)[:, None].repeat(1, 3, 1)
        products = []
        for block in find_blocks(model):
            with torch.no_grad():
                of_basis, of_zeros = (block.attention(x)[:, 0] for x in (x_BTD, torch.zeros_like(x_BTD)))
            products.append(of_basis - of_zeros)
        found = growths_of(model, lambda: model(torch.randn(4, 6, D)), measures=(NAME, "grad_norm_qk"))
        assert_is_growth_of(products, found)

    def test_is_known_once_for_a_module_that_several_blocks_apply(self):
        model, _ = zoo.albert()
        first, *others = growths_of(model).tolist()
        assert others == [first] * len(others)

    def test_reads_nothing_back_from_the_device(self):
        with torch.device("meta"):
            model = CausalLanguageModel(
                CausalLanguageModelConfig(vocab=100, context=16, depth=3, width=D, heads=4, ffn=64)
            )
        assert growths_of(model).device.type == "meta"


def spectra_of(model, forward=lambda: None):
    """(blocks, heads), on the host."""
    reading, _ = reading_of(model, forward, measures=set(SPECTRA))
    frame = Sample(reading, {}, 0, lambda error: pytest.fail(str(error))).to_frame(0)
    return {
        name: (torch.tensor(frame.layers[name].tolist()), torch.tensor(frame.heads[name].tolist()).view(-1, 4))
        for name in SPECTRA
    }


def spectra_from(heads):
    """Of H (blocks, heads, D, D): by numpy's whole matrices, where most eigenvalues are zero."""
    eigenvalues = torch.linalg.eigvals(heads.detach().double())
    is_negative = eigenvalues.real < -1e-6 * eigenvalues.abs().amax(dim=-1, keepdim=True)
    return is_negative.sum(dim=-1) / (D // 4), torch.linalg.matrix_norm(heads.detach().double(), 2)


def heads_from(values, outputs):
    """H of four heads: from nn.Linear's weights of each block."""
    return torch.stack(
        [
            torch.stack(
                [v.T @ o.T for v, o in zip(value.double().chunk(4), output.double().chunk(4, dim=1), strict=True)]
            )
            for value, output in zip(values, outputs, strict=True)
        ]
    )


class TestTheSpectrumOfEachHead:
    def assert_is_of(self, heads, found):
        share, norm = spectra_from(heads)
        torch.testing.assert_close(found[NEGATIVE_SHARE][1].double(), share.double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(found[NEGATIVE_SHARE][0].double(), share.double().mean(dim=1), rtol=0, atol=1e-6)
        torch.testing.assert_close(found[NORM][1].double(), norm, rtol=1e-5, atol=0)
        torch.testing.assert_close(found[NORM][0].double(), norm.amax(dim=1), rtol=1e-5, atol=0)

    def test_is_on_demand(self):
        assert {TIERS[name] for name in SPECTRA} == {"demand"}

    def test_is_that_of_llama_whose_queries_share_values(self):
        model = hugging_face(*MODELS["Llama, grouped queries"])
        attentions = [layer.self_attn for layer in model.layers]
        values = [a.v_proj.weight.view(2, 1, D // 4, D).expand(-1, 2, -1, -1).reshape(D, D) for a in attentions]
        self.assert_is_of(heads_from(values, [a.o_proj.weight for a in attentions]), spectra_of(model))

    def test_is_that_of_gpt_2_whose_weights_are_transposed_and_packed(self):
        model = hugging_face("GPT2", {"vocab_size": 100, "n_embd": D, "n_head": 4, "n_layer": 2})
        attentions = [block.attn for block in model.h]
        values, outputs = ([a.c_attn.weight.T[2 * D :] for a in attentions], [a.c_proj.weight.T for a in attentions])
        self.assert_is_of(heads_from(values, outputs), spectra_of(model))

    def test_is_that_of_multihead_attention(self):
        torch.manual_seed(0)
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 64, batch_first=True), 2)
        attentions = [layer.self_attn for layer in model.layers]
        values, outputs = ([a.in_proj_weight[2 * D :] for a in attentions], [a.out_proj.weight for a in attentions])
        self.assert_is_of(heads_from(values, outputs), spectra_of(model))

    def test_is_that_of_weights_that_attention_computes(self):
        torch.manual_seed(0)
        sizes = {"vocab": 100, "context": 16, "depth": 2, "width": D, "heads": 4, "ffn": 64}
        config = CausalLanguageModelConfig(**sizes, norm="pre", reparameterisation="smoothing", projection="transpose")
        model = CausalLanguageModel(config)
        attentions = [block.attention for block in model.blocks]
        values, outputs = ([a.basis.T for a in attentions], [a.output_weight_DD().T for a in attentions])
        self.assert_is_of(heads_from(values, outputs), spectra_of(model))

    @pytest.mark.parametrize(("kind", "share"), [("sharpening", 1.0), ("smoothing", 0.0)])
    def test_tells_a_sharpening_model_from_a_smoothing_one(self, kind, share):
        """V L V' has eigenvalues of one sign in each head, too: a head's H is V_h L_h V_h'."""
        attention = ReparameterisedAttention(
            D, 4, config=ReparameterisationConfig(reparameterisation=kind, projection="transpose")
        )
        nn.init.uniform_(attention.psi, *((-1.0, -0.1) if kind == "sharpening" else (0.1, 1.0)))
        found = value_output_negative_share(attention.basis.T, attention.output_weight_DD().T, 4)
        assert found.tolist() == [share] * 4

    def test_is_known_once_for_a_module_that_several_blocks_apply(self):
        model, _ = zoo.albert()
        layers, heads = spectra_of(model)[NORM]
        assert layers.tolist() == [layers[0].item()] * len(layers)
        assert heads.isfinite().all()

    def test_is_unknown_if_the_number_of_heads_is(self):
        model = hugging_face(*MODELS["Llama, grouped queries"])
        attention = model.layers[1].self_attn
        attention.v_proj = nn.Linear(D, D, bias=False)
        attention.config = None
        reading, probe = reading_of(model, lambda: None, measures={*SPECTRA, NAME})
        why = "not measured in 1 of 3 blocks: the number of heads is unknown in LlamaAttention"
        assert [probe.not_measured[name] for name in SPECTRA] == [why] * 2
        assert NAME not in probe.not_measured
        assert reading.layers[NAME].isfinite().all()

    def test_is_not_mixed_with_heads_of_another_width(self):
        torch.manual_seed(0)
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 64, batch_first=True), 2)
        model.layers[1].self_attn = nn.MultiheadAttention(D, 8, batch_first=True)
        _, probe = reading_of(model, lambda: None, measures=set(SPECTRA))
        assert probe.not_measured[NORM].endswith("its heads have another width than the heads of earlier blocks")

    def test_of_a_head_that_is_not_finite_leaves_its_layer_unknown(self):
        model = hugging_face(*MODELS["Llama, grouped queries"])
        with torch.no_grad():
            model.layers[1].self_attn.o_proj.weight[0, 0] = torch.inf
        for layers, heads in spectra_of(model).values():
            assert layers.isnan().tolist() == [False, True, False]
            assert heads[1].isnan().tolist() == [True, False, False, False]

    def test_is_unknown_if_the_numbers_of_heads_and_their_width_disagree(self):
        model = hugging_face(*MODELS["Llama, grouped queries"])
        attention = model.layers[0].self_attn
        attention.v_proj, attention.head_dim = nn.Linear(D, D, bias=False), 4
        _, probe = reading_of(model, lambda: None, measures=set(SPECTRA))
        assert "the number of heads is unknown" in probe.not_measured[NORM]

    def test_of_one_of_the_two_alone_is_the_same(self):
        model = hugging_face(*MODELS["Llama, grouped queries"])
        both = spectra_of(model)
        reading, _ = reading_of(model, lambda: None, measures={NORM})
        frame = Sample(reading, {}, 0, lambda error: pytest.fail(str(error))).to_frame(0)
        assert set(frame.layers) == set(frame.heads) == {NORM}
        assert frame.layers[NORM].tolist() == both[NORM][0].tolist()

    def test_reads_nothing_back_from_the_device(self):
        with torch.device("meta"):
            model = CausalLanguageModel(
                CausalLanguageModelConfig(vocab=100, context=16, depth=3, width=D, heads=4, ffn=64)
            )
        reading, _ = reading_of(model, lambda: None, measures=set(SPECTRA))
        assert reading.layers[NEGATIVE_SHARE].raw.device.type == "meta"


class TestTheReason:
    @pytest.mark.parametrize(
        "computed", [(torch.ones(D), torch.ones(D, D)), (torch.ones(D, D).int(), torch.ones(D, D))]
    )
    def test_is_what_attention_computes_instead_of_weights(self, computed):
        model, _ = zoo.our_language_model()
        for block in model.blocks:
            block.attention.value_output_weights = lambda: computed
        _, probe = reading_of(model, lambda: model(zoo.ids()), measures={NAME})
        assert "not two plain matrices of floats" in probe.not_measured[NAME]

    def test_is_none_if_something_else_has_that_name(self):
        model, _ = zoo.our_language_model()
        for block in model.blocks:
            block.attention.value_output_weights = nn.Parameter(torch.ones(2))
        reading, _ = reading_of(model, lambda: model(zoo.ids()), measures={NAME})
        assert reading.layers[NAME].isfinite().all()

    def test_is_latent_attention(self):
        model = hugging_face(*HUGGING_FACE["DeepSeek-V3"])
        assert why_not(model) == (
            None,
            "not measured in 3 of 3 blocks: values are made in two steps (latent attention) in DeepseekV3Attention",
        )

    def test_is_a_projection_whose_rows_are_unknown(self):
        sizes = {"vocab_size": 100, "n_embd": D, "n_head": 4, "n_layer": 2, "rotary_dim": 4}
        assert "cannot tell queries and keys from values in qkv_proj" in why_not(hugging_face("CodeGen", sizes))[1]

    def test_is_an_adapter(self):
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(zoo.llama()[0], peft.LoraConfig(target_modules=["v_proj"], r=2))
        assert "an adapter adds to the value or output weights in LlamaAttention" in why_not(model)[1]

    def test_is_an_adapter_inside_a_linear_layer(self):
        model, _ = zoo.llama()
        find_blocks(model)[0].attention.o_proj.lora_A = nn.Parameter(torch.zeros(2, D))
        assert "an adapter adds to the value or output weights" in why_not(model)[1]

    def test_is_a_parametrization_of_multihead_attention(self):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 64, batch_first=True), 2)
        nn.utils.parametrizations.weight_norm(model.layers[0].self_attn, "in_proj_weight")
        assert "not measured in 1 of 2 blocks: the value or output weights are parametrized" in why_not(model)[1]

    def test_is_a_parametrization(self):
        model, _ = zoo.llama()
        nn.utils.parametrizations.weight_norm(find_blocks(model)[1].attention.o_proj)
        growths, why = why_not(model)
        assert growths.isnan().tolist() == [False, True, False]
        assert why == ("not measured in 1 of 3 blocks: the value or output weights are parametrized in LlamaAttention")

    def test_is_quantization(self):
        model, _ = zoo.llama()
        weight = torch.zeros(D, D, dtype=torch.int8)
        find_blocks(model)[0].attention.o_proj.weight = nn.Parameter(weight, requires_grad=False)
        assert "the value or output weights are quantized" in why_not(model)[1]

    def test_is_a_flattened_weight(self):
        model, _ = zoo.llama()
        find_blocks(model)[0].attention.o_proj.weight = nn.Parameter(torch.zeros(D * D))
        assert "the value or output weights are sharded or flattened" in why_not(model)[1]

    def test_is_a_weight_that_is_no_parameter(self):
        model, _ = zoo.llama()
        output = find_blocks(model)[0].attention.o_proj
        weight = output.weight.detach()
        del output.weight
        output.weight = weight
        assert "a value or output layer has no parameter of its own" in why_not(model)[1]

    def test_is_an_output_layer_that_does_not_fit(self):
        model, _ = zoo.llama()
        find_blocks(model)[0].attention.o_proj = nn.Linear(D, 24)
        assert "the values (16 of width 32) do not fit the output layer (24, 32)" in why_not(model)[1]

    def test_is_the_unknown_width_of_a_head_that_several_queries_share(self):
        model, _ = zoo.llama()
        attention = find_blocks(model)[0].attention
        del attention.head_dim
        attention.config = None
        assert "queries share values, and the width of a head is unknown" in why_not(model)[1]

    def test_is_two_output_layers(self):
        model, _ = zoo.llama()
        find_blocks(model)[0].attention.out_proj = nn.Linear(D, D)
        assert "expected one output layer in LlamaAttention, found 2" in why_not(model)[1]

    def test_is_none_for_a_layer_without_a_usual_name_if_it_is_the_only_one(self):
        model, _ = zoo.llama()
        attention = find_blocks(model)[0].attention
        attention.back_to_width = attention.o_proj
        del attention.o_proj
        reading, probe = reading_of(model, lambda: None, measures={NAME})
        assert not probe.not_measured
        assert reading.layers[NAME].isfinite().all()

    def test_is_not_needed_where_nothing_of_it_is_wanted(self):
        model, forward = zoo.llama()
        probe = probe_of(model)
        probe.arm({"param_norm"})
        forward()
        assert NAME not in probe.collect().layers
        assert NAME not in probe.not_measured
