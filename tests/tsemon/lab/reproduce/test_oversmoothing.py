import json

import numpy as np
import pytest
import torch

from tsemon.lab.reproduce import oversmoothing
from tsemon.lab.reproduce.oversmoothing import (
    accuracy_table,
    claims_of_text,
    claims_of_training,
    depth_plot,
    eigenvalue_plot,
    share_tables,
    text_table,
)
from tsemon.lab.reproduce.oversmoothing_repeating import KINDS as KINDS_REPEATED
from tsemon.lab.reproduce.oversmoothing_repeating import MATRICES, NORMS, claims_of_repetition, repeating_curve
from tsemon.lab.reproduce.oversmoothing_theory import (
    ATTENTION,
    Pairs,
    claims_of_theory,
    in_the_limit,
    random_attention,
    random_pairs,
    random_weights,
)
from tsemon.lab.reproduce.oversmoothing_training import (
    PRINTED,
    READING,
    SUBLAYERS,
    Models,
    Setup,
    Sizes,
    Trained,
    accuracy,
    is_raised,
    measured,
    setups,
    sublayer_passes,
    train,
    train_one,
)
from tsemon.lab.reproduce.result import NOT_TESTABLE, OURS
from tsemon.lab.train.images import digits
from tsemon.measures import hfc_lfc

SIZES = Sizes(width=24, depths=(2,), text_depth=3, context=16, seeds=range(2), steps=10, batch_size=8)
REPEATED = {"depth": 12, "width": 16, "num_tokens": 8, "seeds": range(2)}


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.fixture(scope="module")
def model(data):
    return train(Setup(kind="original", depth=2), data, SIZES)


class TestPassesThroughSublayers:
    def test_are_those_of_the_blocks_equations(self, model, data):
        passes = sublayer_passes(model, data.val_images[:4])
        (x, y), (y_again, z) = passes["attention"][0], passes["MLP"][0]
        block = model.blocks[0]
        with torch.no_grad():
            torch.testing.assert_close(y, x + block.attention(block.norm1(x)))
            torch.testing.assert_close(z, y_again + block.feed_forward(block.norm2(y_again)))
        assert torch.equal(y, y_again)
        assert torch.equal(z, passes["attention"][1][0])

    def test_hold_two_norms_a_block_and_leave_no_hook(self, model, data):
        passes = sublayer_passes(model, data.val_images[:4])
        assert {sublayer: len(passes[sublayer]) for sublayer in SUBLAYERS} == {"attention": 2, "LayerNorm": 4, "MLP": 2}
        assert not any(module._forward_hooks for module in model.modules())

    def test_end_where_the_probes_measure(self, model, data):
        images, labels = data.val_images[:16], data.val_labels[:16]
        states = [after_BTD for _, after_BTD in sublayer_passes(model, images)["MLP"]]
        curve = measured(model, images, accuracy(model, images, labels)).curves["hfc_lfc"]
        # Sums run in another order.
        assert curve[1:] == pytest.approx([hfc_lfc(x_BTD).mean().item() for x_BTD in states], rel=1e-5)

    def test_raise_what_is_larger_behind_them(self):
        x_BTD = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
        smoother_BTD = x_BTD + 10
        assert is_raised(hfc_lfc, smoother_BTD, x_BTD)
        assert not is_raised(hfc_lfc, x_BTD, smoother_BTD)


class TestTraining:
    def test_without_norm_weights_has_none(self, data):
        model = train(Setup(kind="sharpening", depth=2, norm_affine=False), data, SIZES)
        assert all(block.norm1.weight is None for block in model.blocks)
        assert model.blocks[0].attention.clipped_psi_D().max() <= 0

    def test_takes_the_projection_that_is_printed_or_the_other_one(self, data):
        printed, reading = (
            train(Setup(kind="smoothing", depth=2, projection=projection), data, SIZES)
            for projection in (PRINTED, READING)
        )
        assert [model.blocks[0].attention.projection for model in (printed, reading)] == ["transpose", "inverse"]

    def test_finds_what_can_be_kept_and_read_again(self):
        found = train_one(Setup(kind="smoothing", depth=2), SIZES)
        assert Trained(**json.loads(json.dumps(found))) == Trained(**found)
        assert set(found["shares"]["hfc_lfc"]) == set(SUBLAYERS)
        assert len(found["curves"]["hfc_lfc"]) == 3

    @pytest.mark.parametrize("kind", ["original", "sharpening"])
    def test_is_of_text_too(self, kind):
        found = Trained(**train_one(Setup(kind=kind, depth=3, data="text"), SIZES))
        assert set(found.shares["effective_rank"]) == set(SUBLAYERS)
        assert len(found.curves["effective_rank"]) == 4
        assert 0 <= found.accuracy <= 1
        assert len(found.eigenvalues) == (3 * SIZES.width if kind == "original" else 0)

    def test_has_a_name_of_its_own_for_each_model(self):
        for quick in (True, False):
            sizes = oversmoothing.QUICK if quick else oversmoothing.FULL
            assert (
                len(oversmoothing.trials(quick, 0))
                == len([*setups(sizes)])
                == len(sizes.seeds) * (5 * (len(sizes.depths) + 1) + 3)
            )
        assert len(oversmoothing.FULL.seeds) >= 3
        assert oversmoothing.FULL.depths == (12, 24, 48)


class TestRandomPairs:
    @pytest.mark.parametrize("kind", ATTENTION)
    def test_have_positive_rows_that_sum_to_one(self, kind):
        a_NTT = random_attention(kind, 5, 6, torch.Generator().manual_seed(0))
        assert (a_NTT > 0).all()
        torch.testing.assert_close(a_NTT.sum(dim=2), torch.ones(5, 6, dtype=torch.float64))

    def test_have_symmetric_attention_where_it_is_said(self):
        a_NTT = random_attention("symmetric", 5, 6, torch.Generator().manual_seed(0))
        torch.testing.assert_close(a_NTT, a_NTT.mT)

    @pytest.mark.parametrize(("kind", "low", "high"), [("sharpening", -1, 0), ("smoothing", 0, 1)])
    def test_have_weights_with_real_eigenvalues_of_their_sign(self, kind, low, high):
        eigenvalues = torch.linalg.eigvals(random_weights(kind, 5, 4, torch.Generator().manual_seed(0)))
        # The basis is not orthogonal: eigenvalues are found to 1e-9 only.
        assert eigenvalues.imag.abs().max() < 1e-9
        assert low - 1e-9 <= eigenvalues.real.min() <= eigenvalues.real.max() <= high + 1e-9

    def test_follow_the_update_they_stand_for(self, monkeypatch):
        monkeypatch.setattr("tsemon.lab.reproduce.oversmoothing_theory.DOUBLINGS", 2)
        generator = torch.Generator().manual_seed(0)
        a, h = random_attention("Dirichlet rows", 3, 4, generator), random_weights("normal", 3, 5, generator)
        x = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
        expected = x
        for _ in range(4):
            expected = expected + a @ expected @ h
        limit = in_the_limit(a, h, x)
        unit, expected_unit = (y / torch.linalg.matrix_norm(y)[:, None, None] for y in (limit, expected))
        torch.testing.assert_close(unit, expected_unit)

    def test_smooth_exactly_where_the_eigenvalue_one_dominates(self):
        for pairs in random_pairs(4, num_tokens=5, width=4).values():
            assert pairs.smoothed("perron") == pairs.count("perron")
            assert pairs.smoothed("lowest") == pairs.smoothed("other") == 0

    def test_are_all_of_one_type_where_corollary_3_holds(self):
        pairs = random_pairs(4, num_tokens=5, width=4)
        assert all(pairs[kind, "smoothing"].count("perron") == 4 for kind in ATTENTION)
        assert pairs["symmetric", "sharpening"].count("lowest") == 4


class TestARepeatingModel:
    def test_smooths_and_sharpens_as_its_eigenvalues_say(self):
        smoothing, sharpening = (
            repeating_curve(kind, "no norm", "A and H symmetric", **REPEATED) for kind in ("smoothing", "sharpening")
        )
        assert smoothing[-1] < 0.2 * smoothing[0]
        assert sharpening[-1] > sharpening[0]

    def test_does_not_know_the_sign_of_post_norm_weights(self):
        curves = [
            repeating_curve("smoothing", f"post-LN, gamma {sign} 0", "A of Eq. 1", **REPEATED) for sign in (">", "<")
        ]
        # In float32; collapsed tokens amplify rounding.
        assert curves[0] == pytest.approx(curves[1], rel=1e-2)


def models_by_hand(original, sharpening, smoothing, *, accuracy=0.9, of_text=None):
    """Models that were not trained: share of attention layers that raise each measure, and how each ends, at once."""
    of_kind = {"original": original, "sharpening": sharpening, "smoothing": smoothing}
    of_setup = {}
    for setup in setups(SIZES):
        of_data = of_text if of_text and setup.data == "text" else of_kind
        values = [value + 0.01 * setup.seed for value in of_data[setup.kind]]
        named = dict(zip(("hfc_lfc", "cosine_similarity", "effective_rank"), values, strict=True))
        of_setup[setup] = Trained(
            shares={name: dict.fromkeys(SUBLAYERS, value) for name, value in named.items()},
            curves={name: [0.5, 0.5, value] for name, value in named.items()},
            accuracy=accuracy,
            eigenvalues=[1.0] if setup.data == "text" else [-1.0],
        )
    return Models(of_setup, SIZES.depths[0])


SHARP, MIDDLE, SMOOTH = (1.0, 0.0, 1.0), (0.5, 0.5, 0.5), (0.0, 1.0, 0.0)


class TestTheVerdictsOnTraining:
    def test_are_yes_where_kinds_do_as_they_are_made_and_no_where_they_do_the_opposite(self):
        right, wrong = models_by_hand(MIDDLE, SHARP, SMOOTH), models_by_hand(MIDDLE, SMOOTH, SHARP)
        verdicts = [[claim.agrees for claim in claims_of_training(one, (2,))] for one in (right, wrong)]
        assert [found[:3] for found in verdicts] == [["yes"] * 3, ["no"] * 3]

    def test_are_in_part_where_only_one_kind_does(self):
        claims = list(claims_of_training(models_by_hand(MIDDLE, SHARP, MIDDLE), (2,)))
        assert [claim.agrees for claim in claims[:3]] == ["yes", "no", "in part"]

    def test_are_none_on_other_data_or_on_what_no_paper_says(self):
        claims = list(claims_of_training(models_by_hand(MIDDLE, SHARP, SMOOTH), (2,)))
        assert [claim.agrees for claim in claims[3:]] == [NOT_TESTABLE] * 3
        several = list(claims_of_training(models_by_hand(MIDDLE, SHARP, SMOOTH), (2, 2)))
        assert [claim.agrees for claim in several[3:]] == [NOT_TESTABLE] * 3 + [OURS]

    def test_come_with_the_mean_and_the_spread_of_all_seeds(self):
        claim = next(iter(claims_of_training(models_by_hand(MIDDLE, SHARP, SMOOTH), (2,))))
        assert claim.seen.startswith(
            "shares of HFC/LFC, cosine similarity and effective rank: 1.005 ± 0.007, 0.005 ± 0.007"
        )


def models_of_text(original, smoothing, **options):
    """Vision models of which nothing is to be said, and these text encoders."""
    of_text = {"original": original, "sharpening": MIDDLE, "smoothing": smoothing}
    return models_by_hand(MIDDLE, MIDDLE, MIDDLE, of_text=of_text, **options)


class TestTheVerdictsOnText:
    @pytest.mark.parametrize(
        ("smoothing", "verdicts"),
        [((0.2, 0.2, 0.2), ["yes", "yes"]), ((0.2, 0.8, 0.8), ["in part", "no"]), ((0.8, 0.8, 0.8), ["no", "no"])],
    )
    def test_are_as_the_curves_end(self, smoothing, verdicts):
        assert [claim.agrees for claim in claims_of_text(models_of_text(MIDDLE, smoothing), 3)][:2] == verdicts

    def test_are_none_if_the_models_only_know_the_most_frequent_byte(self):
        claims = list(claims_of_text(models_of_text(MIDDLE, SMOOTH, accuracy=0.01), 3))
        assert [claim.agrees for claim in claims[:2]] == [NOT_TESTABLE] * 2

    def test_are_on_the_signs_of_the_eigenvalues_of_both_kinds_of_data(self):
        *_, claim = claims_of_text(models_of_text(MIDDLE, SMOOTH), 3)
        assert claim.agrees == "in part"
        assert claim.seen.endswith("1.000 ± 0.000 in vision transformers, 0.000 ± 0.000 in text encoders")


class TestThePage:
    def test_shows_text_beside_the_papers_figures(self):
        accuracy, *rows = text_table(models_of_text(SHARP, SMOOTH), 3).rows
        assert accuracy[2:] == ("0.900 ± 0.000",) * 3
        assert len(rows) == 9
        assert rows[0] == (
            *("HFC/LFC", "attention", "1.005 ± 0.007 (0.667)"),
            *("0.505 ± 0.007 (0.467)", "0.005 ± 0.007 (0.200)"),
        )

    def test_draws_the_eigenvalues_of_both_kinds_of_data(self):
        assert len(eigenvalue_plot(models_of_text(MIDDLE, SMOOTH), 3).figure.axes) == 2

    def test_shows_both_projections(self):
        models = models_by_hand(MIDDLE, SHARP, SMOOTH)
        first = next(iter(share_tables(models)))
        assert first.columns[1:6] == (
            "original", "sharpening, transpose", "sharpening, inverse", "smoothing, transpose", "smoothing, inverse",
        )  # fmt: skip
        assert first.rows[0][2] == "1.005 ± 0.007 (1.000)"
        assert len(accuracy_table(models, (2,)).rows) == 1
        assert len(depth_plot(models).figure.axes) == 3


def curves_by_hand(smoothing, sharpening):
    """From 1 to these values: without a norm, post-LN and pre-LN with positive and with negative weights."""
    ends = {
        kind: dict(zip(NORMS, (none, post, post, pre, flipped), strict=True))
        for kind, (none, post, pre, flipped) in {"smoothing": smoothing, "sharpening": sharpening}.items()
    }
    return {
        (m, kind, norm): np.array([1.0, ends[kind][norm]])
        for m in MATRICES
        for kind in KINDS_REPEATED
        for norm in NORMS
    }


class TestTheVerdictsOnRepetition:
    @pytest.mark.parametrize(
        ("answer", "smoothing", "sharpening"),
        [
            ("yes", (1e-6, 1e-6, 0.1, 1.0), (100, 10, 5.0, 0.5)),
            ("no", (0.5, 0.5, 1.0, 0.1), (0.5, 0.5, 0.1, 1.0)),
        ],
    )
    def test_are_as_the_curves_end(self, answer, smoothing, sharpening):
        claims = claims_of_repetition(curves_by_hand(smoothing, sharpening))
        assert [claim.agrees for claim in claims] == [answer] * 3


def pairs_by_hand(kind, hfc_lfc, *, real):
    return Pairs(kinds=(kind,), hfc_lfc_N=torch.tensor([hfc_lfc]), spectrum_is_real_N=torch.tensor([real]))


class TestTheVerdictsOnTheTheory:
    @pytest.mark.parametrize(
        ("answer", "of_weights", "real"),
        [
            ("yes", {"normal": ("perron", 0.0), "sharpening": ("lowest", 1.0), "smoothing": ("perron", 0.0)}, True),
            ("no", {"normal": ("other", 0.0), "sharpening": ("perron", 1.0), "smoothing": ("lowest", 0.0)}, False),
        ],
    )
    def test_are_as_the_eigenvalues(self, answer, of_weights, real):
        pairs = {(a, w): pairs_by_hand(*of_weights[w], real=real) for a in ATTENTION for w in of_weights}
        assert [claim.agrees for claim in claims_of_theory(pairs)] == [answer] * 3

    def test_come_with_the_number_of_sharpening_pairs_that_lose_all(self):
        kinds = {"normal": ("perron", 0.0), "sharpening": ("lowest", 0.0), "smoothing": ("perron", 1.0)}
        pairs = {(a, w): pairs_by_hand(*kinds[w], real=True) for a in ATTENTION for w in kinds}
        assert "goes to 0 in 0 of the former and in 3 of the latter" in list(claims_of_theory(pairs))[2].seen
