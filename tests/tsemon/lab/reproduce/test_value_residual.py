import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tsemon.lab.reproduce import value_residual
from tsemon.lab.reproduce.observing import Frame
from tsemon.lab.reproduce.result import NOT_TESTABLE, OURS
from tsemon.lab.reproduce.value_residual_page import (
    claim_of_svformer,
    claims_of_attention,
    claims_of_loss,
    claims_of_values,
    overtaken,
    relative,
    result,
    smoothed,
    uniform_entropy,
    uniform_sink_share,
)
from tsemon.lab.reproduce.value_rules import (
    LAMBDAS,
    Runs,
    Sizes,
    Trained,
    first_spectrum,
    model_of,
    seen_of,
    train,
    train_all,
    with_bos,
)
from tsemon.lab.train.text import text_batches
from tsemon.measures import first_token_importance, first_value_norm_ratio
from tsemon.models import Llama

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
    return train_all(replace(SIZES, seeds=range(2)), TEXT, num_val=3)


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
        for runs in trained.seeds:
            assert [run.loss[0] for run in runs.values()] == pytest.approx([np.log(257)] * 5, abs=0.1)
            assert runs["vanilla"].start.layers["sink_share"][0] == runs["resformer"].start.layers["sink_share"][0]

    def test_starts_each_seed_with_other_weights(self, trained):
        first, second = trained.of("vanilla")
        assert (first.start.layers["token_similarity"] != second.start.layers["token_similarity"]).any()

    def test_records_every_step_and_stops_the_short_ones(self, trained):
        for runs in trained.seeds:
            assert {rule: len(run.loss) for rule, run in runs.items()} == {
                **dict.fromkeys(SIZES.rules, 8),
                "cross-layer": 5,
            }

    def test_gives_the_same_again(self, trained):
        again = train("resformer", 1, SIZES, TEXT, num_val=3)
        assert (again.loss == trained.seeds[1]["resformer"].loss).all()

    def test_survives_being_kept(self, trained):
        run = trained.seeds[0]["vanilla"]
        kept = Trained.of(json.loads(json.dumps(run.numbers())))
        assert (kept.loss == run.loss).all()
        assert (kept.spectrum == run.spectrum).all()
        assert all((kept.end.layers[name] == of).all() for name, of in run.end.layers.items())

    def test_shares_one_value_in_svformer(self, trained):
        ratios = trained.seeds[0]["svformer"].end.layers["first_value_norm_ratio"]
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
        start = trained.seeds[0]["vanilla"].start.layers
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
        for seed, runs in enumerate(trained.seeds):
            vanilla, short = runs["vanilla"].loss, runs["cross-layer"].loss
            assert smoothed(vanilla, 3)[0] == pytest.approx(vanilla[:3].mean())
            expected = short[2:].mean() - vanilla[2:5].mean()
            assert relative(trained, "cross-layer", 3)[seed][-1] == pytest.approx(expected)
            assert not relative(trained, "vanilla", 3)[seed].any()


class TestTheResult:
    def test_has_a_row_for_each_model_in_each_table(self, trained):
        other = replace(SIZES, model=MODEL | {"width": 32})
        shown = result(trained, SIZES, data="random bytes", others=[(other, trained)])
        assert all([row[0] for row in table.rows] == trained.rules for table in shown.tables)
        assert all(len(row) == len(table.columns) for table in shown.tables for row in table.rows)
        paper = [claim.paper for claim in shown.claims]
        assert len(set(paper)) == len(paper)
        (gain,) = (claim.seen for claim in shown.claims if claim.agrees == OURS)
        assert "at width 16" in gain
        assert "at width 32" in gain

    def test_is_of_trials_that_have_names_of_their_own(self):
        full = value_residual.trials(quick=False, seed=0)
        assert len(full) == 3 * (10 + 2)
        assert next(iter(full)) == "vanilla, width 128, seed 0"


class TestTheLambdas:
    @pytest.mark.parametrize("weight", [1, 2, 3])
    def test_weigh_the_first_value(self, weight):
        assert model_of(f"lambda {weight}", SIZES).config.value_weights == (1, weight)

    def test_have_the_one_that_is_a_rule(self):
        rule = Llama.from_preset("resformer-lambda-2m", **MODEL)
        assert model_of("lambda 2", SIZES).config == rule.config


def with_loss(**less_vanillas):
    """Runs of four steps, by how far they are off the vanilla model's loss."""
    frame = Frame(step=0, scalars={}, layers={}, heads={})
    return Runs(
        [
            {
                rule.replace("_", " "): Trained(
                    loss=5 + seed + np.array(off), start=frame, end=frame, val_loss=5, spectrum=np.ones(1)
                )
                for rule, off in {"vanilla": [0, 0, 0, 0], "svformer": [0, 0, 0, 0], **less_vanillas}.items()
            }
            for seed in range(2)
        ]
    )


def with_layers(start, vanilla, resformer):
    frames = [
        Frame(step=0, scalars={}, layers={name: np.array(of) for name, of in layers.items()}, heads={})
        for layers in (start, vanilla, resformer)
    ]
    trained = {
        rule: Trained(loss=np.ones(1), start=frames[0], end=end, val_loss=1, spectrum=np.ones(1))
        for rule, end in zip(("vanilla", "resformer"), frames[1:], strict=True)
    }
    return Runs([trained, trained])


def verdicts(claims):
    return [claim.agrees for claim in claims]


class TestTheVerdictsOnLoss:
    SHORT = replace(SIZES, window=1, rules=("vanilla", "resformer", "svformer"), short_rules=(*LAMBDAS,), short_steps=2)

    @pytest.mark.parametrize(
        ("resformer", "expected"), [([-1, -1, -1, -1], "yes"), ([-1, 1, -1, -1], "in part"), ([-1, -1, -1, 1], "no")]
    )
    def test_on_resformer_ask_for_all_steps(self, resformer, expected):
        sizes = replace(SIZES, window=1, rules=("vanilla", "resformer", "svformer"), short_rules=())
        claims = claims_of_loss(with_loss(resformer=resformer), sizes)
        assert verdicts(claims)[0] == expected

    @pytest.mark.parametrize(("neutreno", "expected"), [(0, "yes"), (-2, "no")])
    def test_on_other_rules_are_of_those_that_were_trained(self, neutreno, expected):
        trained = with_loss(resformer=[-1] * 4, neutreno=[neutreno] * 4)
        claim = list(claims_of_loss(trained, replace(SIZES, window=1, short_rules=())))[1]
        assert (claim.paper, claim.agrees) == ("ResFormer outperforms NeuTRENO (Fig. 7, right)", expected)

    @pytest.mark.parametrize(
        ("first", "second", "third", "expected"), [(0, -3, 0, "yes"), (0, -3, -4, "in part"), (-3, 0, -4, "no")]
    )
    def test_on_lambda_hold_2_against_its_neighbours_and_eq_7(self, first, second, third, expected):
        trained = with_loss(resformer=[0, -1, -9, -9], lambda_1=[0, first], lambda_2=[0, second], lambda_3=[0, third])
        assert verdicts(claims_of_loss(trained, self.SHORT))[-1] == expected

    @pytest.mark.parametrize(
        ("svformer", "at", "expected"),
        [
            ([-1, -1, 1, 1], 2, "yes"),
            ([-1, 1, -1, 1], 3, "yes"),
            ([-1, 1, 1, -1], None, "in part"),  # above for a while only
            ([1, -1, -1, 1], 3, "in part"),
            ([1, 1, 1, 1], None, "no"),
        ],
    )
    def test_on_svformer_take_the_early_steps_and_the_last_change_of_sign(self, svformer, at, expected):
        assert overtaken(np.array(svformer)) == at
        assert claim_of_svformer([np.array(svformer)], window=1).agrees == expected

    def test_want_a_difference_larger_than_the_spread(self):
        runs = with_loss(resformer=[-1] * 4)
        noisy = Runs([runs.seeds[0], {**runs.seeds[1], "resformer": runs.seeds[1]["vanilla"]}])
        sizes = replace(SIZES, window=1, rules=("vanilla", "resformer", "svformer"), short_rules=())
        assert verdicts(claims_of_loss(noisy, sizes))[0] == "no"


class TestTheVerdictsOnLayers:
    @pytest.mark.parametrize(
        ("start", "vanilla", "resformer", "expected"),
        [
            ((0.1, 0.9, 0), (-0.4, 5), -0.1, ["yes", "yes", "yes"]),
            ((0.1, 0.9, 0), (-0.1, 1), -0.4, ["yes", "no", NOT_TESTABLE]),
            ((0.5, 0.5, -0.1), (0, 1), 0, ["no", NOT_TESTABLE, NOT_TESTABLE]),
        ],
    )
    def test_on_attention_hold_it_against_uniform_attention(self, start, vanilla, resformer, expected):
        first, last, off = start
        even = uniform_entropy(16)
        seen = with_layers(
            {"token_similarity": [first, last], "importance_entropy": [(even + off) / np.log(16)] * 2},
            {
                "importance_entropy": [(even + vanilla[0]) / np.log(16)] * 2,
                "sink_share": [vanilla[1] * uniform_sink_share(16)] * 2,
            },
            {"importance_entropy": [(even + resformer) / np.log(16)] * 2},
        )
        assert verdicts(claims_of_attention(seen, 16)) == expected

    @pytest.mark.parametrize(
        ("vanilla", "resformer", "expected"),
        [
            ((0.3, 5, 1), (0.9, 2, 2), ["yes", "yes", "yes"]),
            ((0.3, 5, 2), (0.2, 6, 1), ["no", "no", "no"]),
            ((1, 1, 2), (1, 1, 2), [NOT_TESTABLE, NOT_TESTABLE, "no"]),
        ],
    )
    def test_on_values_hold_resformer_against_vanilla(self, vanilla, resformer, expected):
        names = ("first_value_norm_ratio", "first_hidden_norm_ratio", "value_top_eigenvalue")
        ends = [{name: [1, of, of] for name, of in zip(names, run, strict=True)} for run in (vanilla, resformer)]
        assert verdicts(claims_of_values(with_layers({}, *ends))) == expected
