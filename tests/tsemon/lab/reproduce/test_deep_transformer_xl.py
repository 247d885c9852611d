import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tsemon.lab.reproduce import deep_transformer_xl as xl
from tsemon.lab.reproduce.observing import Frame, Recording
from tsemon.lab.reproduce.training import Training
from tsemon.lab.train import standard_library_text, text_streams

TINY = xl.Sizes(depth=3, width=16, context=8, batch=4, num_steps=12, every=4, num_val_rows=8)


@pytest.fixture(scope="module")
def outcomes():
    return {variant: xl.trained(variant, TINY) for variant in xl.VARIANTS}


def predictions(variant):
    """At once and token by token, of one segment after another."""
    model = TINY.model(variant)
    batches = text_streams(standard_library_text(10_000), TINY.context, 2)
    with torch.no_grad():
        memory = model(next(batches)[0])[1]
        tokens = next(batches)[0]
        return xl.at_once(model, tokens, memory), xl.token_by_token(model, tokens, memory)


class TestTokenByToken:
    @pytest.mark.parametrize("variant", ["post-norm", "pre-norm", xl.PREFIX])
    def test_is_what_a_causal_model_gives_at_once(self, variant):
        at_once, one_by_one = predictions(variant)
        torch.testing.assert_close(at_once, one_by_one, rtol=1e-4, atol=1e-4)  # float32, other shapes

    def test_is_not_what_the_full_mean_gives_at_once_but_for_the_last_token(self):
        at_once, one_by_one = predictions(xl.FULL)
        assert (at_once - one_by_one)[:, :-1].abs().max() > 1e-3
        torch.testing.assert_close(at_once[:, -1], one_by_one[:, -1], rtol=1e-4, atol=1e-4)


class TestAVariant:
    def test_is_evaluated_both_ways(self, outcomes):
        for name in ("post-norm", "pre-norm", xl.PREFIX):
            assert outcomes[name].honest == pytest.approx(outcomes[name].teacher_forced, rel=1e-4)  # float32
        assert outcomes[xl.FULL].honest != pytest.approx(outcomes[xl.FULL].teacher_forced, rel=1e-4)

    def test_has_a_loss_for_each_step(self, outcomes):
        assert all(outcome.training.losses.shape == (12,) for outcome in outcomes.values())

    def test_starts_from_the_weights_of_the_others(self):
        post, prefix = (TINY.model(name).state_dict() for name in ("post-norm", xl.PREFIX))
        assert all(torch.equal(value, prefix[name]) for name, value in post.items())


class TestTheGradientAtStepZero:
    def test_is_much_larger_where_tau_zeroes_the_first_token(self):
        assert xl.first_gradients(TINY, xl.PREFIX, tau=1.0)[0] > 2 * xl.first_gradients(TINY, xl.PREFIX)[0]


class TestFrequencyLoss:
    def test_is_the_entropy_of_the_bytes(self):
        counts = np.bincount(standard_library_text(xl.TRAIN_BYTES).numpy())
        shares = counts[counts > 0] / counts.sum()
        assert xl.frequency_loss() == pytest.approx(-(shares * np.log(shares)).sum())
        assert xl.frequency_loss() < math.log(256)


class TestThePage:
    def test_compares_all_variants(self, outcomes):
        assert len(xl.claims(TINY, outcomes, xl.first_gradients(TINY, xl.PREFIX, tau=1.0))) == 5
        assert [row[0] for row in xl.table(TINY, outcomes).rows] == list(xl.VARIANTS)


def by_hand(honest, *, at_once=None, diversity=0.5):
    """A training that did not take place: its losses on other text, and the last block's diversity."""
    layers = {"token_diversity": np.array([diversity])}
    recording = Recording(None, [Frame(step=0, scalars={}, layers=layers, heads={})])
    training = Training(losses=np.full(12, honest), recording=recording, evaluations=(np.zeros(0), np.zeros(0)))
    return xl.Outcome(training=training, honest=honest, teacher_forced=at_once or honest)


class TestTheVerdicts:
    @pytest.mark.parametrize(
        ("answer", "outcomes", "exploding"),
        [
            ("yes", [by_hand(3.2, diversity=1e-5), by_hand(2.5), by_hand(2.55), by_hand(2.6)], (1.0, 1.0)),
            ("no", [by_hand(2.5), by_hand(2.5), by_hand(3.2, at_once=3), by_hand(3.3, at_once=2)], (1e5, 1.0)),
        ],
    )
    def test_are_as_the_figures(self, answer, outcomes, exploding):
        claims = xl.claims(TINY, dict(zip(xl.VARIANTS, outcomes, strict=True)), np.array(exploding))
        assert [claim.agrees for claim in claims] == [answer] * 5


class TestTheTwoMeans:
    def test_differ_in_nothing_else(self):
        prefix, full = (TINY.model(name).config for name in (xl.PREFIX, xl.FULL))
        assert replace(prefix, full_mean=True) == full
