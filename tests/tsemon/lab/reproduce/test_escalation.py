import numpy as np
import pytest
import torch

from tsemon.lab.reproduce.escalation import STEPS, WITHOUT_BIASES, WITHOUT_RELU, experiment, trial
from tsemon.lab.reproduce.observing import forward
from tsemon.lab.reproduce.random_encoder import caught, head_mix, random_encoder, random_tokens
from tsemon.measures import escalation_rate, second_eigenvalue, token_similarity

SIZES = {"depth": 3, "width": 64, "heads": 4, "ffn": 64}


class TestTrial:
    @pytest.fixture
    def model(self):
        return random_encoder(3, **SIZES)

    @pytest.fixture
    def found(self, model):
        return trial(model, random_tokens(3, 64))

    @pytest.fixture
    def seen(self, model):
        with caught(model) as seen:
            forward(model, random_tokens(3, 64))
        return seen

    def test_has_the_similarity_of_the_blocks_outputs(self, found, seen):
        expected = [token_similarity(seen[f"blocks.{layer}"][1]).item() for layer in range(3)]
        assert found["token similarity"] == pytest.approx(expected, rel=1e-5)  # the frame is float32

    def test_sees_step_1_between_the_blocks_input_and_what_the_norm_gets(self, found, seen):
        x, y = seen["blocks.1"][0], seen["blocks.1.norm1"][0]
        similarity = token_similarity(x).item()
        by_proposition_3 = 1 + (found["step 1"][1] - 1) * similarity
        assert by_proposition_3 == pytest.approx(escalation_rate(x, y).item(), rel=1e-4)
        assert found["escalation rate"][1] == pytest.approx(by_proposition_3, rel=1e-4)

    def test_has_four_steps_that_make_up_the_block(self, found, seen):
        # xi is a ratio of energies, so ratios of steps multiply to that of the block: odds after over odds before
        before, after = (token_similarity(x).item() for x in seen["blocks.1"])
        odds = after / (1 - after) / (before / (1 - before))
        assert np.prod([found[step][1] for step in STEPS]) == pytest.approx(odds, rel=1e-4)

    def test_leaves_parts_out_of_step_3(self, model, found):
        assert found[WITHOUT_BIASES] != pytest.approx(found["step 3"][:1], rel=1e-6)
        for linear in (model.blocks[0].feed_forward.expand, model.blocks[0].feed_forward.contract):
            torch.nn.init.zeros_(linear.bias)
        plain = trial(model, random_tokens(3, 64))
        assert plain[WITHOUT_BIASES] == pytest.approx(plain["step 3"][:1], rel=1e-6)
        assert plain[WITHOUT_RELU] < plain[WITHOUT_BIASES]

    def test_has_the_second_eigenvalue_of_the_attention_that_ran(self, model, found, seen):
        p_BHTT = head_mix(model.blocks[2].attention, seen["blocks.2.attention.to_query_key_value"][1])
        # Arnoldi's method stops after 32 of 64 steps
        assert found["lambda_2"][2] == pytest.approx(second_eigenvalue(p_BHTT).mean().item(), rel=0.02)


class TestExperiment:
    def test_stacks_trials_of_three_variants_that_share_their_weights(self):
        full, by_width, causal = experiment(range(2), **SIZES)
        blocks = {name: 1 if name in (WITHOUT_BIASES, WITHOUT_RELU) else 3 for name in full}
        assert {name: values.shape for name, values in full.items()} == {name: (2, n) for name, n in blocks.items()}
        assert (by_width["delta"] < 0.7 * full["delta"]).all()  # scores half as large
        assert (causal["delta"] > 1).all()  # of uniform causal attention of 64 tokens 1.235

    def test_repeats_itself(self):
        first, second = (experiment(range(1), **SIZES)[0] for _ in range(2))
        assert all(np.array_equal(first[name], second[name]) for name in first)
