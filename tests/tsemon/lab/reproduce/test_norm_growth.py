import json
import math

import numpy as np
import pytest
import torch

from tsemon.lab.reproduce import growth, norm_growth
from tsemon.lab.reproduce.growth import Grown, Setup
from tsemon.measures import param_norm, positions_attended, saturation

TINY = growth.Sizes(
    depth=2,
    width=16,
    heads=2,
    ffn=32,
    context=16,
    batch=4,
    num_steps=24,
    hold=6,
    every=2,
    seeds=range(1),
    num_grid_steps=4,
    rates=(1e-3,),
    decays=(0.01, 100.0),
)


@pytest.fixture(scope="module")
def runs():
    return {(s.block, s.rule): Grown(**json.loads(json.dumps(growth.grown(s, TINY)))) for s in TINY.setups()}


class TestATrainingModel:
    def test_starts_with_the_norm_that_its_weights_have(self, runs):
        model = TINY.model("pre-norm")
        counted = [p for name, p in model.named_parameters() if not name.startswith(("embed", "positions"))]
        # The sample is from after the first step, whose size is its largest difference.
        run = runs["pre-norm", "constant"]
        assert abs(run.norms[0] - param_norm(counted).item()) <= run.step_sizes[0]
        assert run.steps == list(range(0, 24, 2))

    def test_has_an_entry_for_each_layer_and_head(self, runs):
        assert len(runs) == 9
        for run in runs.values():
            assert run.layer_slopes.shape == (2,)
            assert len(run.saturation[0]) == len(run.saturation[1]) == 3
            assert len(run.attended) == len(run.attended_unscaled) == 4

    @pytest.mark.parametrize(("block", "rule"), [("post-norm", "inverse sqrt"), ("pre-norm", "Adafactor")])
    def test_takes_smaller_steps_under_the_falling_rate(self, runs, block, rule):
        held, falling = runs[block, "constant"].step_sizes, runs[block, rule].step_sizes
        assert falling[-1] / falling[0] < 0.75 * held[-1] / held[0]  # the rate is half of it by then: sqrt(6 / 24)

    def test_has_the_rate_of_t5_with_adafactor(self):
        model = TINY.model("pre-norm").double()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = growth.RULES["Adafactor"].optimizer(model, TINY)
        model(growth.held_out_tokens(TINY)).logsumexp(2).sum().backward()
        optimizer.step()
        for old, new in zip(before, model.parameters(), strict=True):
            if old.ndim > 1 and new.grad.abs().sum() > 0 and not (new.grad == 0).any():
                size = ((new - old).square().mean() / old.square().mean()).sqrt().item()
                assert size <= 0.01 * (1 + 1e-6), "Eq. 5 of Adafactor clips the update to 1"


class TestACheckpoint:
    def test_holds_what_tsemon_counts(self):
        model = TINY.model("pre-norm")
        counted = growth.observed(model, TINY, "total_param_norm").scalars["total_param_norm"]
        assert param_norm(growth.checkpoint(model)).item() == pytest.approx(counted, rel=1e-5)  # float32, other sums

    def test_is_held_against_the_one_before(self):
        model = torch.nn.Linear(2, 1, bias=False)
        cosines = []
        for weights in ((1.0, 0.0), (1.0, 1.0), (0.0, 1.0), (0.0, 3.0)):
            model.weight.data[:] = torch.tensor(weights)
            if weights == (1.0, 0.0):
                cosine = growth.cosine_with_the_last_checkpoint(model)
            else:
                cosines.append(cosine(model))
        assert cosines == pytest.approx([0.5**0.5, 0.5**0.5, 1])

    def test_is_taken_each_eighth_of_the_training(self, runs):
        assert all(len(run.checkpoints) == 8 for run in runs.values())


class TestSaturation:
    def test_is_the_cosine_of_the_model_with_the_scaled_one(self):
        model = TINY.model("branch norm").double()
        states = [growth.last_states(some, TINY) for some in (model, growth.scaled(model))]
        # tsemon scales by 1024, this by 1000: both are near the limit.
        expected = saturation(*states).mean().item()
        assert growth.saturations(model, TINY)[-1] == pytest.approx(expected, abs=0.02)

    def test_of_the_branch_norm_block_is_there_before_any_training(self):
        assert growth.saturations(TINY.model("branch norm"), TINY)[-1] > 0.6
        assert growth.saturations(TINY.model("post-norm"), TINY)[-1] < 0.5


class TestHomogeneity:
    def test_grows_with_c_and_needs_no_biases(self):
        found = growth.homogeneity("branch norm", 0, TINY)
        for curve in found.values():
            assert len(curve) == len(growth.FACTORS)
            assert curve[-1] > 0.95
            assert curve[-1] >= curve[0]

    def test_at_c_of_1_is_the_saturation_of_the_model(self):
        found = growth.homogeneity("post-norm", 0, TINY)["with biases"]
        assert found[0] == pytest.approx(growth.saturations(TINY.model("post-norm"), TINY)[-1], abs=0.02)


class TestTheGrid:
    def test_grows_less_the_more_the_weights_decay(self):
        mild, strong = (growth.grid_growth(1e-3, decay, 0, TINY)["growth"] for decay in TINY.decays)
        assert strong == pytest.approx(mild * 0.9**4, rel=0.02), "four times a tenth is taken off"


class TestPositionsAttended:
    def heads(self, block, masked):
        """Positions that each head of the first block attends to, from the scores of the scaled network."""
        model = growth.scaled(TINY.model(block))
        inputs = []
        first = model.blocks[0].attention
        first.register_forward_hook(lambda _, args, __: inputs.append(args[0]))
        model(growth.held_out_tokens(TINY))
        query, key, _ = first.to_query_key_value(inputs[0]).unflatten(2, (6, -1)).transpose(1, 2).chunk(3, dim=1)
        later = ~torch.ones(16, 16).tril().bool()
        scale = 1.0 if block == "authors' code" else 1 / math.sqrt(8)
        scores = (scale * query @ key.transpose(2, 3)).masked_fill(later, masked)
        expected = positions_attended(torch.softmax(scores, dim=3)).mean(dim=0)
        return growth.positions_attended(model, TINY)[0], expected

    def test_are_what_the_measure_counts_in_the_scaled_network(self):
        found, expected = self.heads("post-norm", -math.inf)
        assert found == pytest.approx(expected.tolist(), abs=1e-6)

    def test_are_later_ones_too_where_the_mask_multiplies(self):
        found, expected = self.heads("authors' code", 0.0)
        assert found == pytest.approx(expected.tolist(), abs=1e-6)


class TestFits:
    STEPS = np.arange(0.0, 1000, 10)

    def test_know_growth_in_the_square_root(self):
        fits = growth.Fits.of(self.STEPS, 50 + 0.3 * np.sqrt(self.STEPS))
        assert (fits.sqrt_r2, fits.exponent) == pytest.approx((1, 0.5), abs=1e-6)
        assert fits.linear_r2 < 0.97

    def test_know_growth_in_a_straight_line_whose_r2_of_the_square_root_is_high_too(self):
        fits = growth.Fits.of(self.STEPS, 50 + 0.01 * self.STEPS)
        assert (fits.linear_r2, fits.exponent) == pytest.approx((1, 1), abs=1e-6)
        assert fits.sqrt_r2 > 0.95

    def test_do_not_see_a_change_of_the_exponent_before_the_second_half(self):
        norms = np.where(self.STEPS < 400, self.STEPS / 400, np.sqrt(self.STEPS / 400))
        assert growth.Fits.of(self.STEPS, norms).exponent == pytest.approx(0.5, abs=1e-6)


class TestTheSchedule:
    def test_is_t5s(self):
        rates = [growth.inverse_sqrt(step, hold=100) for step in (0, 99, 399)]
        assert rates == pytest.approx([1, 1, 0.5])


class TestThePage:
    def test_has_all_claims_and_tables(self, monkeypatch):
        monkeypatch.setattr(norm_growth, "QUICK", TINY)
        trials = norm_growth.trials(quick=True, seed=0)
        assert len(trials) == 9 + 3 + 2
        found = {name: json.loads(json.dumps(trial())) for name, trial in trials.items()}
        result = norm_growth.result(True, 0, found)
        assert len(result.claims) == 14
        assert [len(table.rows) for table in result.tables] == [9, 9, 2, 9]
        assert all(plot.figure.axes for plot in result.plots.values())


SIZES = growth.Sizes(seeds=range(2))
STEPS = list(range(0, 400, 10))
RISING, FALLING = np.linspace(0, 0.2, len(STEPS)).tolist(), np.linspace(0.2, 0, len(STEPS)).tolist()


def by_hand(exponent, *, sizes, slopes=(1, 1, 2, 2), **measured):
    """A model that was not trained, and what would have been measured."""
    t = np.array(STEPS, dtype=float)
    norms = 50 + (0.1 if exponent > 0 else -0.001) * t ** abs(exponent)
    return Grown(
        loss=2.0,
        steps=STEPS,
        norms=norms.tolist(),
        step_sizes=list(sizes),
        layer_norms=[(10 + slope * t**0.5).tolist() for slope in slopes],
        exponent=exponent,
        attended_unscaled=measured["attended"],
        **measured,
    )


AGREEING = {"alignments": FALLING, "checkpoints": (0.9, 0.99), "saturation": ([0, 0.1], [0, 0.99])}
OPPOSED = {"alignments": RISING, "checkpoints": (0.99, 0.9), "saturation": ([0, 0.9], [0, 0.4])}
HELD = np.ones(len(STEPS))
T5_RATE = (100 / np.maximum(np.array(STEPS) + 1, 100)) ** 0.5


def runs_of(*, agree):
    measured = AGREEING if agree else OPPOSED

    def one(setup):
        exponent = (0.9 if setup.rule == "constant" else 0.5) if agree else -1.0
        sizes = T5_RATE if agree and setup.rule != "constant" else HELD
        attended = (1.0, 31.0) if agree else (10.0, 10.0)
        return by_hand(
            exponent, sizes=sizes, slopes=(1, 1, 2, 2) if agree else (2, 2, 1, 1), attended=attended, **measured
        )

    low, high = [0.1] * len(growth.FACTORS), [0.99] * len(growth.FACTORS)
    curves = {"without": high, "with biases": high} if agree else {"without": low, "with biases": high}
    return norm_growth.Runs(
        sizes=SIZES,
        of_setup={setup: one(setup) for setup in SIZES.setups()},
        curves={(block, seed): curves for block in norm_growth.BLOCKS_OF_CURVES for seed in range(2)},
        grid={
            (rate, decay, seed): (1.1 if decay < 0.01 or (agree and decay == 0.01) else 0.9)
            if agree
            else 0.9 + (decay > 0.9)
            for rate in SIZES.rates
            for decay in SIZES.decays
            for seed in range(2)
        },
    )


class TestTheVerdicts:
    def test_are_yes_where_all_is_as_the_paper_says(self):
        verdicts = [claim.agrees for claim in norm_growth.claims(runs_of(agree=True))]
        # 0.01 cannot both let the norm grow and be above the threshold: the paper says both.
        assert verdicts == ["yes", "yes", "yes", norm_growth.OURS, *["yes"] * 9, "no"]

    def test_are_no_where_nothing_is(self):
        verdicts = [claim.agrees for claim in norm_growth.claims(runs_of(agree=False))]
        assert verdicts == ["no", "no", "no", norm_growth.OURS, *["no"] * 10]

    def test_want_a_difference_larger_than_the_spread(self):
        runs = runs_of(agree=True)
        noisy = dict(runs.grid) | {(rate, 0.01, 0): 1.5 for rate in SIZES.rates}
        noisy |= {(rate, 0.01, 1): 0.9 for rate in SIZES.rates}
        claims = norm_growth.claims(norm_growth.Runs(**vars(runs) | {"grid": noisy}))
        assert claims[-2].agrees == "in part"


def test_a_setup_has_a_name_of_its_own():
    assert len(set(map(str, SIZES.setups()))) == len(list(SIZES.setups())) == 18
    assert str(Setup(block="post-norm", rule="constant", seed=1)) == "post-norm, constant, seed 1"
