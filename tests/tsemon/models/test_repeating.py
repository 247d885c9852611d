import pytest
import torch

import tsemon
from tests.frames import frames_in, values_of
from tests.tsemon.models.variants import inputs_for, repeating
from tsemon.errors import InvalidArgument, ShapeError
from tsemon.measures import cosine_similarity, effective_rank, hfc_lfc

KINDS = ["sharpening", "smoothing"]
RANGES = {"sharpening": (-1, 0), "smoothing": (0, 1)}


def make(seed=0, **fields):
    torch.manual_seed(seed)
    return repeating(**fields).double()


def symmetric_attention(tokens, seed):
    """A (1, T, T): positive, symmetric, its rows and columns sum to one."""
    weights = torch.rand(tokens, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    weights = (weights + weights.T) / (4 * tokens)  # rows sum to a half or so
    return (weights + torch.diag(1 - weights.sum(1)))[None]


def spread_eigenvalues(model):
    """Corollary 3 is for eigenvalues in [-1, 0) and in (0, 1]; half of those that the model starts with are clipped to 0."""
    is_sharpening = model.config.reparameterisation == "sharpening"
    torch.nn.init.uniform_(model.blocks[0].attention.psi, *((-1, -0.2) if is_sharpening else (0.2, 1)))


def states_after_each_layer(config, model, x, weights):
    """Eq. 2 written out for one sequence, by H itself and not by its factors."""
    layer = model.blocks[0]
    basis = layer.attention.basis
    h = basis @ torch.diag(layer.attention.psi.clamp(*RANGES[config.reparameterisation])) @ torch.linalg.inv(basis)

    def normed(norm, x):
        centred = x - x.mean(1, keepdim=True)
        return norm.weight * centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()

    states = [x]
    for _ in range(config.depth):
        inner = normed(layer.norm_before, x) if config.norm == "pre" else x
        x = x + weights @ inner @ h
        x = normed(layer.norm_after, x) if config.norm == "post" else x
        states.append(x)
    return torch.stack(states)


@pytest.mark.parametrize("kind", KINDS)
class TestARepeatingTransformer:
    @pytest.mark.parametrize("norm", [None, "post", "pre"])
    @pytest.mark.parametrize("gamma", ["positive", "negative"])
    def test_equals_the_iteration_written_out(self, x_BTD, kind, norm, gamma):
        model = make(reparameterisation=kind, norm=norm, gamma=gamma)
        query_key = model.to_query_key.weight
        for x, y in zip(x_BTD, model(x_BTD), strict=True):
            weights = (x @ query_key[:12].T @ query_key[12:] @ x.T / 12**0.5).exp()
            weights = weights / weights.sum(1, keepdim=True)
            expected = states_after_each_layer(model.config, model, x, weights)[-1]
            # H is multiplied out: its inverse's condition number, some hundreds, times 1e-16, for each of three layers.
            torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("seed", range(5))
    def test_sharpens_or_smooths_as_corollary_3_says(self, kind, seed):
        model = make(seed, reparameterisation=kind, depth=120, width=8)
        spread_eigenvalues(model)
        x_BTD = torch.randn(1, 10, 8, dtype=torch.float64)
        first, last = hfc_lfc(x_BTD), hfc_lfc(model(x_BTD, symmetric_attention(10, seed)))
        assert last > 100 * first if kind == "sharpening" else last < first / 100

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize(
        ("norm", "gamma", "is_reversed"),
        [
            (None, "positive", False),
            ("post", "positive", False),
            ("post", "negative", False),
            ("pre", "positive", False),
            ("pre", "negative", True),
        ],
    )
    def test_goes_as_figure_4_shows_where_h_is_symmetric(self, kind, norm, gamma, is_reversed, seed):
        model = make(seed, reparameterisation=kind, norm=norm, gamma=gamma, orthogonal=True, depth=48, width=64)
        spread_eigenvalues(model)
        x_BTD = torch.randn(4, 16, 64, dtype=torch.float64)
        first, last = hfc_lfc(x_BTD).mean(), hfc_lfc(model(x_BTD)).mean()
        assert last > 1.5 * first if (kind == "sharpening") != is_reversed else last < first / 10

    @pytest.mark.parametrize("gamma", ["positive", "negative"])
    @pytest.mark.parametrize("norm", ["pre", "post"])
    def test_has_norms_of_one_sign_that_are_not_trained(self, kind, norm, gamma):
        layer = make(reparameterisation=kind, norm=norm, gamma=gamma).blocks[0]
        fixed = layer.norm_before if norm == "pre" else layer.norm_after
        assert ((fixed.weight > 0) == (gamma == "positive")).all()
        assert fixed.weight.unique().numel() == 12
        assert fixed.bias is None
        assert not fixed.weight.requires_grad

    def test_shows_its_layers_to_the_monitor(self, kind, tmp_path):
        model = make(reparameterisation=kind, depth=4)
        x_BTD = inputs_for(repeating, torch.float64)[:1]
        with tsemon.attach(model, run="r", every=1, spool_dir=tmp_path, layout="BTC") as monitor:
            model(x_BTD)
            monitor.step()
        (frame,) = frames_in(tmp_path)
        states_LTD = states_after_each_layer(model.config, model, x_BTD[0], model.weights_BTT(x_BTD)[0])
        for measure in (hfc_lfc, cosine_similarity, effective_rank):
            found_L = torch.tensor(values_of(frame, measure.__name__))
            # Values travel in float32, and the rank is taken by way of the Gram matrix, which squares what is rounded.
            torch.testing.assert_close(found_L, measure(states_LTD).float(), rtol=1e-4, atol=1e-5)


class TestTheArguments:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"depth": 0}, "depth 0"),
            ({"width": 0}, "width 0"),
            ({"norm": "branch"}, "norm 'branch'"),
            ({"gamma": "zero"}, "gamma 'zero'"),
            ({"reparameterisation": "sharp"}, "got 'sharp'"),
            ({"reparameterisation": None}, "got None"),
        ],
    )
    def test_are_refused_where_they_do_not_fit(self, fields, words):
        with pytest.raises(InvalidArgument, match=words):
            repeating(**fields)

    def test_have_the_width_of_the_model(self):
        with pytest.raises(ShapeError, match=r"tokens, 12\), got \(2, 7, 8\)"):
            repeating()(torch.ones(2, 7, 8))
