import numpy as np
import pytest
import torch
from transformers import AutoModel, LlamaConfig, Qwen2Config

from tsemon.lab.reproduce.observing import forward
from tsemon.lab.reproduce.pre_norm import (
    NUM_TOKENS,
    Decoded,
    claims,
    decoder,
    draw,
    encoder,
    rises_ever_more_slowly,
    sized,
)
from tsemon.lab.reproduce.random_encoder import caught, random_encoder, random_tokens
from tsemon.measures import second_eigenvalue, token_similarity

X_BTD = random_tokens(0, 64)


class TestEncoder:
    @pytest.fixture
    def model(self):
        return random_encoder(0, norm="pre", depth=3, width=64, heads=4, ffn=64)

    def test_has_the_norms_of_what_the_blocks_pass_on(self, model):
        found = encoder(model, X_BTD)
        with caught(model) as seen:
            forward(model, X_BTD)
        assert found["|X|"] == pytest.approx([seen[f"blocks.{layer}"][0].norm().item() for layer in range(3)], rel=1e-5)
        expected = [token_similarity(seen[f"blocks.{layer}"][1]).item() for layer in range(3)]
        assert found["token similarity"] == pytest.approx(expected, rel=1e-4)
        # unit variance in each of 64 * 64 entries; the norm's epsilon is 1e-5
        assert found["|LN(X)|"] == pytest.approx([64.0] * 3, rel=1e-4)

    def test_is_what_eq_20_expects_on_average(self):
        draws = [random_encoder(seed, norm="pre", depth=1, width=64, heads=4, ffn=4) for seed in range(10)]
        ratios = torch.tensor([encoder(model, X_BTD)["|Y|^2 / Eq. 20"][0] for model in draws])
        assert ratios.mean().item() == pytest.approx(1, abs=4 * ratios.std().item() / 10**0.5)


class TestSized:
    @pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config])
    def test_keeps_the_packages_proportions_and_start(self, kind):
        config, default = sized(kind, 512), kind()
        assert config.intermediate_size / config.hidden_size == default.intermediate_size / default.hidden_size
        assert config.initializer_range == 0.02
        assert config.num_key_value_heads == config.num_attention_heads == 4


class TestDraw:
    @pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config])
    def test_starts_a_layer_as_the_package_does(self, kind):
        torch.manual_seed(0)
        layer = AutoModel.from_config(sized(kind, 256)).layers[0]
        before = {name: (value.mean().item(), value.std().item()) for name, value in layer.named_parameters()}
        weight = layer.mlp.up_proj.weight.clone()
        draw(layer, 0.02)
        for name, value in layer.named_parameters():
            # 65,536 draws or more of N(0, 0.02^2), or the same constant throughout
            assert (value.mean().item(), value.std().item()) == pytest.approx(before[name], abs=5e-4)
        assert not torch.equal(weight, layer.mlp.up_proj.weight)


class TestDecoder:
    def test_passes_each_layers_output_to_the_next(self):
        config = sized(LlamaConfig, 128)
        found = decoder(config, 2)
        torch.manual_seed(0)
        model = AutoModel.from_config(config, attn_implementation="eager")
        model.norm = torch.nn.Identity()
        x_BTD = model.embed_tokens(torch.randint(config.vocab_size, (1, NUM_TOKENS)))
        similarity, gap = [token_similarity(x_BTD).item()], []
        for _ in range(2):
            draw(model.layers[0], 0.02)
            output = model(inputs_embeds=x_BTD, use_cache=False, output_attentions=True)
            x_BTD = output.last_hidden_state
            similarity.append(token_similarity(x_BTD).item())
            gap.append(1 - second_eigenvalue(output.attentions[0]).mean().item())
        assert found.similarity == pytest.approx(similarity, rel=1e-4)
        assert found.gap == pytest.approx(gap, rel=1e-4)


LAYERS = np.arange(41.0)
SATURATING, LINEAR = 1 - np.exp(-LAYERS / 5), LAYERS / 45


class TestRisingEverMoreSlowly:
    @pytest.mark.parametrize(
        ("t_sim", "expected"),
        [
            (SATURATING, True),
            (0.1 * SATURATING, False),  # hardly at all
            (LINEAR, False),
            (SATURATING - 0.01 * np.maximum(LAYERS - 20, 0), False),  # falls at the end
        ],
    )
    def test_is_fast_at_first_and_never_down_at_the_end(self, t_sim, expected):
        assert rises_ever_more_slowly(t_sim) is expected


class TestTheVerdicts:
    @pytest.mark.parametrize(
        ("t_sim", "norm", "normed", "branch", "eq_20", "similarity", "gap", "expected"),
        [
            (SATURATING[1:], LAYERS[1:], 1, 1, 1, 0.7 * SATURATING, 0.5, "yes"),
            (-LINEAR[1:], 1 / LAYERS[1:], LAYERS[1:], 1, 2, LINEAR, 0.2, "no"),
        ],
    )
    def test_hold_the_blocks_against_each_claim(self, t_sim, norm, normed, branch, eq_20, similarity, gap, expected):
        each = {
            "token similarity": t_sim,
            "|X|": norm,
            "|LN(X)|": normed,
            "|P LN(X) W|": branch,
            "|Y|^2 / Eq. 20": eq_20,
        }
        encoded = {name: values * np.ones(40) for name, values in each.items()}
        decoded = {"llama 512": Decoded(similarity=similarity, gap=np.full(40, gap))}
        assert [claim.agrees for claim in claims(encoded, decoded)] == [expected] * 6
