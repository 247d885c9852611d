"""The gradient norm that torch's clip functions compute."""

import math

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad

from tsemon.probes.clip_norm import TRUSTED_STEPS, ClipNorm
from tsemon.probes.hooks import Guard


def raises(error):
    raise error


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model(torch.randn(3, 4)).square().sum().backward()
    return model


@pytest.fixture
def clip_norm(model):
    clip_norm = ClipNorm(model, Guard(raises))
    yield clip_norm
    clip_norm.close()


def norm_of(model):
    return math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))


class TestTheNorm:
    def test_is_that_before_clipping(self, model, clip_norm):
        norm = norm_of(model)
        utils.clip_grad_norm_(model.parameters(), 0.1)
        assert clip_norm.take().item() == pytest.approx(norm, rel=1e-6)
        assert norm_of(model) == pytest.approx(0.1, rel=1e-4)

    def test_is_not_known_if_parts_are_clipped_one_by_one(self, model, clip_norm):
        for layer in model:
            utils.clip_grad_norm_(layer.parameters(), 0.1)
        assert clip_norm.take() is None
        utils.clip_grad_norm_(model.parameters(), 0.1)
        assert clip_norm.take() is not None

    def test_is_not_known_if_only_a_part_is_clipped(self, model, clip_norm):
        for parts in ([*model[0].parameters()], [*nn.Linear(2, 2).parameters(), model[0].weight, model[0].bias]):
            utils.clip_grad_norm_(parts, 0.1)
            assert clip_norm.take() is None

    @pytest.mark.parametrize("norm_type", [1, 0, math.inf, "inf"])
    def test_is_not_known_from_another_norm(self, model, clip_norm, norm_type):
        utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type)
        assert clip_norm.take() is None

    def test_is_that_of_the_parameters_that_train(self, model, clip_norm):
        model[0].requires_grad_(False)
        utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.1)
        assert clip_norm.take() is not None

    def test_is_no_longer_known_soon_after_other_parameters_train_or_the_kind_of_norm_changes(self, model, clip_norm):
        model[0].requires_grad_(False)
        parts = [*model[1].parameters()]
        for number in range(3 * TRUSTED_STEPS):
            if number == TRUSTED_STEPS:
                model[0].requires_grad_(True)
            utils.clip_grad_norm_(parts, 0.1)
            is_known = clip_norm.take() is not None
            assert is_known or number >= TRUSTED_STEPS
        assert not is_known
        for number in range(3 * TRUSTED_STEPS):
            utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=2 if number < TRUSTED_STEPS else 1)
            is_known = clip_norm.take() is not None
            assert is_known or number >= TRUSTED_STEPS
        assert not is_known

    def test_is_not_that_of_another_model_which_is_clipped_in_the_same_step(self, model, clip_norm):
        norm, other = norm_of(model), nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        utils.clip_grad_norm_(other.parameters(), 0.1)
        utils.clip_grad_norm_(model.parameters(), 0.1)
        utils.clip_grad_norm_(other.parameters(), 0.1)
        assert clip_norm.take().item() == pytest.approx(norm, rel=1e-6)

    def test_is_that_of_a_list_with_parameters_of_a_head(self, model, clip_norm):
        head = nn.Linear(2, 2)
        utils.clip_grad_norm_([*head.parameters(), *model.parameters()], 0.1)
        assert clip_norm.take() is not None

    @pytest.mark.parametrize("clip", [utils.clip_grad_norm_, utils.clip_grads_with_norm_])
    def test_leaves_calls_with_keywords_alone(self, model, clip_norm, clip):
        more = {} if clip is utils.clip_grad_norm_ else {"total_norm": torch.tensor(0.2)}
        before = norm_of(model)
        clip(parameters=model.parameters(), max_norm=0.1, **more)
        assert norm_of(model) < before
        clip_grad._clip_grads_with_norm_(parameters=[*model.parameters()], max_norm=0.1, total_norm=torch.tensor(0.2))

    def test_belongs_to_one_step(self, model, clip_norm):
        utils.clip_grad_norm_(model.parameters(), 0.1)
        assert clip_norm.take() is not None
        assert clip_norm.take() is None

    def test_is_none_where_another_model_is_clipped(self, model, clip_norm):
        other = nn.Linear(2, 2)
        other(torch.randn(1, 2)).sum().backward()
        utils.clip_grad_norm_(other.parameters(), 0.1)
        assert clip_norm.take() is None

    def test_is_left_alone_in_compiled_clipping(self, model, clip_norm):
        norm = norm_of(model)

        @torch.compile(fullgraph=True, backend="eager")
        def clip():
            return utils.clip_grad_norm_(list(model.parameters()), 0.1)

        assert clip().item() == pytest.approx(norm, rel=1e-6)
        assert clip_norm.take() is None


class TestAllGradientsAreFinite:
    """As far as the norm says, without a look at them."""

    def test_if_the_norm_of_all_of_them_is(self, model, clip_norm):
        norm = norm_of(model)
        assert not clip_norm.is_finite()
        utils.clip_grad_norm_(model.parameters(), 0.1)
        assert clip_norm.is_finite()
        assert not clip_norm.is_finite(), "it speaks for one step of an optimizer"
        assert clip_norm.take() == pytest.approx(norm, rel=1e-6)
        assert not clip_norm.is_finite(), "the next step has a norm of its own"

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_is_not_known_if_one_is_not(self, model, clip_norm, bad):
        model[0].bias.grad[1] = bad
        utils.clip_grad_norm_(model.parameters(), 0.1)
        assert not clip_norm.is_finite()

    def test_is_not_known_from_the_norm_of_a_part(self, model, clip_norm):
        model[1].bias.grad[1] = math.nan
        utils.clip_grad_norm_(model[0].parameters(), 0.1)
        assert not clip_norm.is_finite()

    def test_is_not_known_from_the_norm_of_as_many_of_which_some_are_not_of_the_model(self, model, clip_norm):
        model[1].bias.grad[1] = math.nan
        parts = [*model[0].parameters(), *nn.Linear(2, 2).parameters()]
        assert len(parts) == len(list(model.parameters()))
        utils.clip_grad_norm_(parts, 0.1)
        assert not clip_norm.is_finite()

    def test_is_known_from_the_norm_of_them_and_a_head(self, model, clip_norm):
        utils.clip_grad_norm_([*nn.Linear(2, 2).parameters(), *model.parameters()], 0.1)
        assert clip_norm.is_finite()

    def test_is_not_known_if_parts_are_clipped_one_by_one(self, model, clip_norm):
        for _ in range(2):
            utils.clip_grad_norm_(model.parameters(), 0.1)
        assert not clip_norm.is_finite()


class TestTheFunction:
    def test_is_put_back(self, model):
        before = clip_grad._clip_grads_with_norm_
        first, second = ClipNorm(model, Guard(raises)), ClipNorm(model, Guard(raises))
        first.close()
        utils.clip_grad_norm_(model.parameters(), 0.1)
        assert first.take() is None
        assert second.take() is not None
        second.close()
        assert clip_grad._clip_grads_with_norm_ is before
