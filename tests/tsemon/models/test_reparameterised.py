import pytest
import torch

from tests.tsemon.models.written_out import EXACT
from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models import BlockConfig, ReparameterisationConfig, ReparameterisedAttention, RepeatingTransformerConfig

KINDS = ["sharpening", "smoothing"]
RANGES = {"sharpening": (-1, 0), "smoothing": (0, 1)}


def make(kind, heads=1, psi=None, *, path="sdpa", causal=False, scale=None, **rules):
    torch.manual_seed(0)
    config = ReparameterisationConfig(reparameterisation=kind, **rules)
    attention = ReparameterisedAttention(12, heads, causal, scale=scale, path=path, config=config).double()
    if psi is not None:
        attention.load_state_dict(attention.state_dict() | {"psi": psi})
    return attention


@pytest.fixture
def psi():
    """Inside, outside and on the ends of both ranges."""
    return torch.tensor([-2, -1, -0.75, -0.5, -0.25, -0.1, 0, 0.1, 0.25, 0.75, 1, 2], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
class TestReparameterisedAttention:
    def test_holds_the_eigenvalues_of_its_weights_to_the_clipped_psi(self, psi, kind):
        attention = make(kind, psi=psi)
        eigenvalues = torch.linalg.eigvals(attention.basis @ attention.output_weight_DD())
        expected = psi.clamp(*RANGES[kind])
        # Eigenvalues of a matrix that is not symmetric are as exact as its eigenvectors' condition number lets them be.
        torch.testing.assert_close(eigenvalues.real.sort().values, expected.sort().values, rtol=0, atol=1e-9)
        assert eigenvalues.imag.abs().max() < 1e-9

    @pytest.mark.parametrize("scale", [None, 1.0])
    def test_equals_its_equation_for_one_head(self, x_BTD, psi, kind, scale):
        attention = make(kind, psi=psi, scale=scale)
        basis, weight, bias = attention.basis, *attention.to_query_key.parameters()
        h = basis @ torch.diag(psi.clamp(*RANGES[kind])) @ torch.linalg.inv(basis)
        for x, y in zip(x_BTD, attention(x_BTD), strict=True):
            query, key = (x @ weight.T + bias).split(12, 1)
            weights = ((12**-0.5 if scale is None else scale) * query @ key.T).exp()
            # The product is taken in another order: the inverse's condition number, some hundreds, times 1e-16.
            torch.testing.assert_close(y, weights / weights.sum(1, keepdim=True) @ x @ h, rtol=1e-10, atol=1e-10)

    def test_applies_the_weights_of_all_heads_at_once(self, x_BTD, kind):
        attention = make(kind, heads=3)
        torch.nn.init.zeros_(attention.to_query_key.weight)
        torch.nn.init.zeros_(attention.to_query_key.bias)
        mean = x_BTD.mean(1, keepdim=True).expand_as(x_BTD)  # what equal scores attend to, in each head
        h = attention.basis @ attention.output_weight_DD()
        torch.testing.assert_close(attention(x_BTD), mean @ h, rtol=1e-10, atol=1e-10)  # as above

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("scale", [None, 1.0])
    def test_gives_the_same_fused_and_written_out(self, x_BTD, kind, causal, scale):
        fused, plain = (
            make(kind, heads=3, causal=causal, scale=scale, path=path)(x_BTD) for path in ("sdpa", "materialised")
        )
        torch.testing.assert_close(fused, plain, **EXACT)

    def test_learns_through_the_inverse(self, kind):
        attention = make(kind).requires_grad_(False)
        basis = attention.basis.clone().requires_grad_()
        psi = torch.full((12,), -0.5 if kind == "sharpening" else 0.5, dtype=torch.float64, requires_grad=True)
        x = torch.randn(1, 4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

        def loss(basis, psi):
            return torch.func.functional_call(attention, {"basis": basis, "psi": psi}, x).square().sum()

        assert torch.autograd.gradcheck(loss, (basis, psi))

    def test_leaves_psi_where_it_is_clipped(self, x_BTD, psi, kind):
        attention = make(kind, psi=psi)
        attention(x_BTD).square().sum().backward()
        low, high = RANGES[kind]
        outside = (psi < low) | (psi > high)
        assert (attention.psi.grad[outside] == 0).all()
        assert (attention.psi.grad[~outside] != 0).all()

    def test_runs_in_bfloat16_and_under_autocast(self, x_BTD, kind):
        attention = make(kind, heads=3, psi=torch.linspace(-1, 1, 12).double())
        expected = attention(x_BTD)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = attention.float()(x_BTD.float())
        half = attention.bfloat16()(x_BTD.bfloat16())
        assert mixed.dtype == half.dtype == torch.bfloat16
        # V and its inverse are each rounded to 8 bits, and what is off in the one is stretched by the other.
        scale = expected.abs().max().item()
        torch.testing.assert_close(mixed.double(), expected, rtol=0, atol=0.05 * scale)
        torch.testing.assert_close(half.double(), expected, rtol=0, atol=0.05 * scale)
        half.square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in attention.parameters())

    def test_starts_as_the_paper_has_it(self, kind):
        torch.manual_seed(0)
        attention = ReparameterisedAttention(300, 3, config=ReparameterisationConfig(reparameterisation=kind))
        # He's initialisation has variance 2 / width; of 90,000 draws it is within 5 %, of 300 within 30 %.
        assert attention.basis.var().item() == pytest.approx(2 / 300, rel=0.05)
        assert attention.psi.var().item() == pytest.approx(0.1, rel=0.3)

    def test_tells_the_shape_it_was_given(self, kind):
        with pytest.raises(ShapeError, match=r"tokens, 12\), got \(2, 7, 8\)"):
            make(kind)(torch.ones(2, 7, 8))


@pytest.mark.parametrize("kind", KINDS)
class TestTheTransposeOfFootnote4:
    def test_equals_its_equation_for_several_heads(self, x_BTD, psi, kind):
        """Each head attends by itself; W_V = V_H is cut by columns and W_proj = L V_H' by rows."""
        attention = make(kind, heads=3, psi=psi, projection="transpose")
        basis, (weight, bias) = attention.basis, attention.to_query_key.parameters()
        project = torch.diag(psi.clamp(*RANGES[kind])) @ basis.T
        for x, y in zip(x_BTD, attention(x_BTD), strict=True):
            query, key = (x @ weight.T + bias).split(12, 1)
            expected = torch.zeros_like(x)
            for head in range(3):
                at = slice(4 * head, 4 * head + 4)
                weights = (query[:, at] @ key[:, at].T / 2).exp()
                expected += weights / weights.sum(1, keepdim=True) @ (x @ basis[:, at]) @ project[at]
            torch.testing.assert_close(y, expected, **EXACT)

    def test_has_eigenvalues_of_the_signs_of_psi_and_of_other_sizes(self, psi, kind):
        attention = make(kind, psi=psi, projection="transpose")
        h = attention.basis @ attention.output_weight_DD()
        torch.testing.assert_close(h, h.T, **EXACT)
        eigenvalues, expected = torch.linalg.eigvalsh(h), psi.clamp(*RANGES[kind])
        assert (eigenvalues.abs() > 1e-9).sum() == (expected != 0).sum()
        assert (eigenvalues[eigenvalues.abs() > 1e-9].sign() == (-1 if kind == "sharpening" else 1)).all()
        assert eigenvalues.abs().max() > 1.5

    def test_starts_with_the_weights_of_the_inverse(self, kind):
        torch.testing.assert_close(make(kind).state_dict(), make(kind, projection="transpose").state_dict(), **EXACT)


class TestTheInterval:
    def test_holds_psi(self, psi):
        attention = make("sharpening", psi=psi, psi_clip=(-0.5, -0.1))
        eigenvalues = torch.linalg.eigvals(attention.basis @ attention.output_weight_DD()).real
        # As exact as the eigenvectors' condition number lets them be.
        torch.testing.assert_close(eigenvalues.sort().values, psi.clamp(-0.5, -0.1).sort().values, rtol=0, atol=1e-9)

    @pytest.mark.parametrize("variance", [0.01, 1.0])
    def test_and_the_variance_of_psi_are_those_of_figure_8(self, variance):
        torch.manual_seed(0)
        config = ReparameterisationConfig(reparameterisation="smoothing", psi_variance=variance)
        attention = ReparameterisedAttention(300, 3, config=config)
        assert attention.psi.var().item() == pytest.approx(variance, rel=0.3)


class TestTheArguments:
    def test_name_one_of_two_kinds(self):
        with pytest.raises(InvalidArgument, match="got 'sharp'"):
            make("sharp")

    def test_have_heads_that_divide_the_width(self):
        with pytest.raises(InvalidArgument, match="12 and 5 heads"):
            make("smoothing", heads=5)

    @pytest.mark.parametrize(
        ("fields", "complaint"),
        [
            ({"psi_clip": (-0.1, -0.5)}, "the smaller one first"),
            ({"psi_clip": (-0.5, -0.5)}, "the smaller one first"),
            ({"psi_clip": (float("-inf"), 0.0)}, "two finite numbers"),
            ({"psi_clip": (float("nan"), 0.0)}, "two finite numbers"),
            ({"psi_clip": (-1.0,)}, "two finite numbers"),
            ({"psi_clip": -0.5}, "two finite numbers"),
            ({"psi_clip": ("-0.5", "0")}, "two finite numbers"),
            ({"psi_clip": {-1.0, 0.0}}, "two finite numbers"),
            ({"psi_variance": "0.1"}, "psi_variance must be positive"),
            ({"psi_variance": None}, "psi_variance must be positive"),
            ({"psi_variance": True}, "psi_variance must be positive"),
            ({"psi_clip": (-0.5, 0.5)}, "eigenvalues of at most 0"),
            ({"reparameterisation": "smoothing", "psi_clip": (-0.5, 0.5)}, "eigenvalues of at least 0"),
            ({"psi_variance": 0.0}, "psi_variance must be positive"),
            ({"psi_variance": float("nan")}, "psi_variance must be positive"),
            ({"projection": "pseudo"}, "projection must be one of"),
            ({"reparameterisation": None, "projection": "transpose"}, "need a reparameterisation"),
            ({"reparameterisation": None, "psi_clip": (-1.0, 0.0)}, "need a reparameterisation"),
            ({"reparameterisation": None, "psi_variance": 1.0}, "need a reparameterisation"),
        ],
    )
    def test_fit_together(self, fields, complaint):
        fields = {"reparameterisation": "sharpening"} | fields
        with pytest.raises(InvalidArgument, match=complaint):
            BlockConfig(width=12, heads=3, ffn=24, **fields)
        with pytest.raises(InvalidArgument, match=complaint):
            RepeatingTransformerConfig(width=12, depth=3, **fields)

    def test_are_needed(self):
        with pytest.raises(InvalidArgument, match="got None"):
            ReparameterisedAttention(12, 3, config=ReparameterisationConfig())
