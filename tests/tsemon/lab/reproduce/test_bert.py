import numpy as np
import pytest
import torch
from transformers import AlbertConfig, AlbertModel, BertConfig, BertForMaskedLM

from tsemon.lab.reproduce.bert import (
    ALBERT,
    ALBERT_DEFAULT,
    BERT,
    DROPOUT,
    OFF,
    ON,
    SHAPE,
    albert,
    bert,
    claims,
    narrowed,
    reached,
)
from tsemon.lab.reproduce.observing import Frame
from tsemon.measures import cosine_similarity, token_diversity, token_similarity

TINY = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 100}
MEASURES = {
    "token_similarity": token_similarity,
    "cosine_similarity": cosine_similarity,
    "token_diversity": token_diversity,
}


def by_hand(frame, hidden_states):
    for name, measure in MEASURES.items():
        expected = [measure(x_BTD).mean().item() for x_BTD in hidden_states]
        assert frame.layers[name] == pytest.approx(expected, rel=1e-4, abs=1e-6)  # float32, sums in another order


class TestBert:
    @pytest.fixture
    def config(self):
        return BertConfig(**TINY, **OFF, num_hidden_layers=3)

    def test_measures_the_hidden_states_that_the_package_returns(self, config):
        frame = bert(config)
        torch.manual_seed(0)
        model = BertForMaskedLM(config)
        ids_BT = torch.randint(100, (2, *SHAPE))[0]
        by_hand(frame, model(ids_BT, output_hidden_states=True).hidden_states)

    def test_has_the_norm_of_each_layers_gradient(self, config):
        frame = bert(config, has_gradients=True)
        torch.manual_seed(0)
        model = BertForMaskedLM(config)
        ids_BT, labels_BT = torch.randint(100, (2, *SHAPE))
        model(ids_BT, labels=labels_BT).loss.backward()
        expected = [
            torch.cat([p.grad.flatten() for p in layer.parameters()]).norm().item()
            for layer in model.bert.encoder.layer
        ]
        assert frame.layers["grad_norm"] == pytest.approx(expected, rel=1e-4)

    def test_runs_with_dropout_where_there_is_some(self, config):
        with_dropout = bert(BertConfig(**TINY, **ON, num_hidden_layers=3))
        assert not np.allclose(
            with_dropout.layers["token_similarity"], bert(config).layers["token_similarity"], rtol=0.01
        )


class TestAlbert:
    def test_measures_each_pass_through_the_shared_layer(self):
        config = AlbertConfig(**TINY, **OFF, num_hidden_layers=4)
        frame = albert(config)
        torch.manual_seed(0)
        model = AlbertModel(config)
        ids_BT = torch.randint(100, SHAPE)
        by_hand(frame, model(ids_BT, output_hidden_states=True).hidden_states)


class TestNarrowed:
    def test_keeps_what_sets_the_rate(self):
        sizes = narrowed({"hidden_size": 768}, 3)
        assert sizes["hidden_size"] * sizes["initializer_range"] ** 2 == pytest.approx(768 * 0.02**2)


class TestTheVerdicts:
    @pytest.mark.parametrize(
        ("rate", "cosine_off", "gradient", "expected"),
        [(1.094, 0.01, 2.0, "yes"), (1.01, 0.05, 4.0, "no")],  # 1.01^100 leaves a third of the diversity
    )
    def test_hold_the_layers_against_each_claim(self, rate, cosine_off, gradient, expected):
        t_div = rate ** -np.arange(101.0)
        layers = {
            "token_similarity": 1 - t_div,
            "cosine_similarity": 1 - t_div + cosine_off,
            "token_diversity": t_div,
            "grad_norm": np.linspace(1, gradient, 100),
        }
        frame = Frame(step=0, scalars={}, layers=layers, heads={})
        found = dict.fromkeys((BERT, DROPOUT, ALBERT, ALBERT_DEFAULT), frame)
        assert [claim.agrees for claim in claims(found)] == [expected] * 5


class TestReached:
    def test_says_where_or_that_it_never_is(self):
        assert reached(np.array([0.1, 0.5, 0.95, 0.92]), 0.9) == "0.9 first at layer 2"
        assert reached(np.array([0.1, 0.5]), 0.9) == "0.9 in no layer"
