import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tsemon.lab.reproduce import deep_transformer_xl as xl
from tsemon.lab.reproduce.deep_transformer_xl import POST, PRE, PRINTED, full, prefix
from tsemon.lab.train import standard_library_text, text_streams

TINY = xl.Sizes(
    depths=(2, 3), taus=(0.3, 1.0), seeds=range(1), width=16, context=8, batch=4, num_steps=12, every=4, num_val_rows=8
)


def model(variant, seed=0):
    return TINY.model(variant, 3, seed)


@pytest.fixture(scope="module")
def found():
    """What the trials of the deepest models find, here and one after the other."""
    return {variant: xl.trained(variant, 3, 0, TINY) for variant in (POST, PRE, PRINTED, prefix(0.3), prefix(1.0))}


def predictions(variant):
    """At once and token by token, of one segment after another."""
    batches = text_streams(standard_library_text(10_000), TINY.context, 2)
    with torch.no_grad():
        memory = model(variant)(next(batches)[0])[1]
        tokens = next(batches)[0]
        return xl.at_once(model(variant), tokens, memory), xl.token_by_token(model(variant), tokens, memory)


class TestTokenByToken:
    @pytest.mark.parametrize("variant", [POST, PRE, prefix(0.3)], ids=str)
    def test_is_what_a_causal_model_gives_at_once(self, variant):
        at_once, one_by_one = predictions(variant)
        torch.testing.assert_close(at_once, one_by_one, rtol=1e-4, atol=1e-4)  # float32, other shapes

    @pytest.mark.parametrize("variant", [PRINTED, full(0.3)], ids=str)
    def test_is_not_what_the_full_mean_gives_at_once_but_for_the_last_token(self, variant):
        at_once, one_by_one = predictions(variant)
        assert (at_once - one_by_one)[:, :-1].abs().max() > 1e-3
        torch.testing.assert_close(at_once[:, -1], one_by_one[:, -1], rtol=1e-4, atol=1e-4)


class TestAModel:
    def test_is_evaluated_both_ways(self, found):
        for variant in (POST, PRE, prefix(0.3)):
            assert found[variant]["token_by_token"] == pytest.approx(found[variant]["at_once"], rel=1e-4)  # float32
        assert found[PRINTED]["token_by_token"] != pytest.approx(found[PRINTED]["at_once"], rel=1e-4)

    def test_has_a_loss_for_each_step_and_a_gradient_for_each_block(self, found):
        assert all((len(one["losses"]), len(one["gradients"])) == (12, 3) for one in found.values())

    def test_starts_from_the_weights_of_the_others_with_this_seed(self):
        post, mean, other = model(POST).state_dict(), model(prefix(0.3)).state_dict(), model(POST, 1).state_dict()
        assert all(torch.equal(value, mean[name]) for name, value in post.items())
        assert not all(torch.equal(value, other[name]) for name, value in post.items())

    def test_has_a_large_gradient_where_tau_zeroes_the_first_token(self, found):
        assert found[prefix(1.0)]["gradients"][0] > 2 * found[prefix(0.3)]["gradients"][0]

    def test_differs_in_the_mean_alone(self):
        assert replace(model(prefix(0.3)).config, full_mean=True) == model(full(0.3)).config

    def test_as_printed_has_the_mean_of_all_tokens_and_tau_1(self):
        assert (PRINTED.tau, PRINTED.full_mean) == (1.0, True)
        assert model(PRINTED).config.tau_at == "feed_forward"


class TestFrequencyLoss:
    def test_is_the_entropy_of_the_bytes(self):
        counts = np.bincount(standard_library_text(xl.TRAIN_BYTES).numpy())
        shares = counts[counts > 0] / counts.sum()
        assert xl.frequency_loss() == pytest.approx(-(shares * np.log(shares)).sum())
        assert xl.frequency_loss() < math.log(256)


class TestTheTrials:
    @pytest.mark.parametrize("quick", [True, False])
    def test_are_all_variants_at_each_depth_with_each_seed(self, quick):
        sizes = xl.QUICK if quick else xl.Sizes()
        found = xl.trials(quick, 0)
        assert len(found) == len(sizes.variants()) * len(sizes.depths) * len(sizes.seeds)
        assert f"full mean, tau 1, depth {sizes.depth}, seed 0" in found

    def test_are_three_of_each_kind(self):
        assert len(xl.Sizes().seeds) >= 3


def by_hand(losses, *, gradients=None):
    """Trainings that did not take place: by variant the losses in training, at once and token by token, of each seed."""
    sizes = replace(TINY, seeds=range(2), depths=(3,))
    of_run = {}
    for variant in sizes.variants():
        training, at_once, token_by_token = losses[variant]
        for seed in range(2):
            shift = 0.001 * seed
            of_run[variant, 3, seed] = xl.Outcome(
                losses=[training + shift] * 12,
                at_once=at_once + shift,
                token_by_token=token_by_token + shift,
                steps=[0, 4, 8],
                diversity=[0.5] * 3,
                gradients=(gradients or {}).get(variant, [1.0, 1.0, 1.0]),
            )
    return xl.Outcomes(sizes, of_run)


FAILED, LEARNED = (3.2, 3.2, 3.2), (2.4, 2.5, 2.5)


class TestTheVerdicts:
    def test_are_yes_where_the_printed_model_trains_as_pre_norm_does(self):
        losses = dict.fromkeys((PRE, full(0.3), PRINTED, prefix(0.3)), LEARNED) | {POST: FAILED, prefix(1.0): FAILED}
        claims = xl.claims(by_hand(losses))
        assert [claim.agrees for claim in claims] == ["yes"] * 3 + [xl.OURS] * 2
        assert "depth 3: prefix mean, tau 0.3, 2.500 ± 0.001" in claims[-1].seen
        assert claims[-1].reading == "tau 0.3 learns at depth 3; tau 1 learns at depth none"

    def test_are_no_where_it_fails(self):
        losses = dict.fromkeys((PRE, POST, full(0.3), prefix(0.3), prefix(1.0)), LEARNED) | {PRINTED: FAILED}
        claims = xl.claims(by_hand(losses, gradients={PRINTED: [1e5, 1.0, 1.0]}))
        assert [claim.agrees for claim in claims[:3]] == ["no"] * 3

    def test_need_a_difference_larger_than_the_spread(self):
        losses = dict.fromkeys(TINY.variants(), LEARNED) | {POST: (3.1, 3.1, 3.1)}
        outcomes = by_hand(losses)
        noisy = {
            run: replace(one, losses=[loss + run[2] for loss in one.losses]) for run, one in outcomes.of_run.items()
        }
        assert xl.claims(outcomes)[0].agrees == "yes"
        assert xl.claims(xl.Outcomes(outcomes.sizes, noisy))[0].agrees == "no"


class TestThePage:
    def test_shows_all_variants(self):
        outcomes = by_hand(dict.fromkeys(TINY.variants(), LEARNED))
        assert [row[0] for row in xl.table(outcomes, 3).rows] == list(map(str, TINY.variants()))
        assert xl.training_plot(outcomes).figure.axes
        assert len(xl.tau_plot(outcomes).figure.axes) == 2
