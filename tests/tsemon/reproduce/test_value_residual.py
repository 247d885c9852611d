from dataclasses import replace

import numpy as np
import pytest
import torch

from tsemon.measures import first_token_importance, first_value_norm_ratio
from tsemon.models import Llama
from tsemon.reproduce.value_residual_page import (
    claims_of_loss,
    overtaking,
    relative,
    result,
    smoothed,
    uniform_entropy,
    uniform_sink_share,
)
from tsemon.reproduce.value_rules import LAMBDAS, Sizes, first_spectrum, seen_of, train, train_all, with_bos
from tsemon.train.text import text_batches

MODEL = {"vocab": 257, "context": 16, "depth": 2, "width": 16, "heads": 2, "ffn": 32}
SIZES = Sizes(
    model=MODEL,
    rules=("vanilla", "resformer", "svformer", "neutreno"),
    short_rules=("cross-layer",),
    batch_size=2,
    steps=8,
    short_steps=5,
    warmup=2,
    window=3,
)
TEXT = torch.randint(256, (2000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.fixture(scope="module")
def trained():
    return train_all(SIZES, TEXT, num_val=3)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Llama.from_preset("vanilla-2m", **MODEL)


class TestBatchesWithBos:
    def test_have_it_in_front_and_tell_every_other_token(self):
        plain = next(text_batches(TEXT, 15, 2, seed=0))
        inputs, targets = next(with_bos(text_batches(TEXT, 15, 2, seed=0), 256))
        assert inputs.shape == targets.shape == (2, 16)
        assert inputs[:, 0].tolist() == [256, 256]
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert torch.equal(inputs[:, 1:], plain[0])
        assert torch.equal(targets[:, -1], plain[1][:, -1])


class TestTrainingAll:
    def test_starts_all_rules_with_the_same_first_batch_and_weights(self, trained):
        # Values hardly matter at the start: weights of 0.02 leave logits near 0.
        assert [run.loss[0] for run in trained.values()] == pytest.approx([np.log(257)] * 5, abs=0.1)
        assert trained["vanilla"].start.layers["sink_share"][0] == trained["resformer"].start.layers["sink_share"][0]

    def test_records_every_step_and_stops_the_short_ones(self, trained):
        assert {rule: len(run.loss) for rule, run in trained.items()} == {
            **dict.fromkeys(SIZES.rules, 8),
            "cross-layer": 5,
        }

    def test_gives_the_same_again(self, trained):
        again = train_all(SIZES, TEXT, num_val=3)
        assert all((run.loss == again[rule].loss).all() for rule, run in trained.items())

    def test_shares_one_value_in_svformer(self, trained):
        ratios = trained["svformer"].end.layers["first_value_norm_ratio"]
        assert ratios[0] == pytest.approx(ratios[1], rel=1e-6)


class TestWhatIsSeen:
    def test_is_what_the_measures_give_on_the_first_layers_values(self, model):
        tokens_BT = torch.randint(257, (3, 16), generator=torch.Generator().manual_seed(1))
        block = model.blocks[0]
        with torch.no_grad():
            values_BTD = block.attention.to_value(block.norm1(model.embed(tokens_BT)))
        frame = seen_of(model, tokens_BT)
        expected = first_value_norm_ratio(values_BTD).mean().item()
        assert frame.layers["first_value_norm_ratio"][0] == pytest.approx(expected, rel=1e-5)
        # The trace of the second moment is the mean squared length.
        assert first_spectrum(model, tokens_BT).sum() == pytest.approx(
            values_BTD.square().sum(-1).mean().item(), rel=1e-5
        )

    def test_is_near_uniform_at_random(self, trained):
        start = trained["vanilla"].start.layers
        assert start["importance_entropy"] * np.log(16) == pytest.approx(uniform_entropy(16), abs=0.01)
        assert start["sink_share"] == pytest.approx(uniform_sink_share(16), abs=0.01)


class TestTheBaselines:
    def test_are_those_of_uniform_causal_attention(self):
        assert uniform_entropy(128) == pytest.approx(4.4386, abs=1e-4)
        rows = torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None]
        first = first_token_importance(rows).item()
        assert (7 * uniform_sink_share(8) + 1) / 8 == pytest.approx(first, rel=1e-6)  # row 1 sees nothing else


class TestRelativeLoss:
    def test_is_the_difference_of_means_over_a_window(self, trained):
        vanilla, short = trained["vanilla"].loss, trained["cross-layer"].loss
        assert smoothed(vanilla, 3)[0] == pytest.approx(vanilla[:3].mean())
        assert relative(trained, "cross-layer", 3)[-1] == pytest.approx(short[2:].mean() - vanilla[2:5].mean())
        assert not relative(trained, "vanilla", 3).any()


class TestOvertaking:
    @pytest.mark.parametrize(
        ("curve", "expected", "words"),
        [
            ([-0.1, -0.2, -0.1, 0.1, 0.2], "yes", "surpassed from step 13 on"),
            ([-0.1, -0.2, 0.1, -0.1, -0.1], "in part", "not surpassed"),  # noise does not surpass
            ([0.1, 0.2, 0.1, -0.1, -0.1], "no", "not surpassed"),
        ],
    )
    def test_is_judged_at_the_start_and_at_the_end(self, curve, expected, words):
        claim = overtaking(np.array(curve), window=10)
        assert claim.agrees == expected
        assert words in claim.seen


class TestTheVariants:
    def test_weigh_the_first_value_by_lambda(self):
        batches = with_bos(text_batches(TEXT, 15, 2, seed=0), 256)
        losses = {rule: train(rule, SIZES, [next(batches)], next(batches)).loss for rule in ("vanilla", *LAMBDAS)}
        assert len({float(loss[0]) for loss in losses.values()}) == 4

    @pytest.mark.parametrize(("best", "expected"), [("lambda 2", "yes"), ("lambda 3", "in part")])
    def test_are_compared_with_each_other(self, trained, best, expected):
        runs = {rule: replace(trained["cross-layer"], loss=np.full(5, float(rule != best))) for rule in LAMBDAS}
        runs["lambda 1"] = replace(runs["lambda 1"], loss=np.full(5, 2.0))
        claims = {claim.paper[:23]: claim for claim in claims_of_loss({**trained, **runs}, SIZES)}
        assert claims["Of the variants A_n (V_"].agrees == expected


class TestTheResult:
    def test_has_a_row_for_each_model_in_each_table(self, trained):
        shown = result(trained, SIZES, data="random bytes")
        assert all([row[0] for row in table.rows] == list(trained) for table in shown.tables)
        assert all(len(row) == len(table.columns) for table in shown.tables for row in table.rows)
        paper = [claim.paper for claim in shown.claims]
        assert len(set(paper)) == len(paper)
