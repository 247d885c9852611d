"""The gradient norm that torch's clip functions compute."""

import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad

from tsemon.probes.clip_norm import MAX_PARTS, ClipNorm
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

    def test_is_the_one_that_the_loop_gives_to_the_clip_function(self, model, clip_norm):
        norm = utils.get_total_norm([p.grad for p in model.parameters()])
        utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        assert clip_norm.take() is norm

    def test_is_of_all_parts_that_are_clipped_by_themselves(self, model, clip_norm):
        norm = norm_of(model)
        for layer in model:
            utils.clip_grad_norm_(layer.parameters(), 0.1)
        assert clip_norm.take().item() == pytest.approx(norm, rel=1e-6)

    def test_is_nan_if_it_is_in_a_part(self, model, clip_norm):
        model[0].weight.grad[0, 0] = math.nan
        for layer in model:
            utils.clip_grad_norm_(layer.parameters(), 0.1)
        assert math.isnan(clip_norm.take().item())

    def test_belongs_to_one_step(self, model, clip_norm):
        utils.clip_grad_norm_(model.parameters(), 0.1)
        assert clip_norm.take() is not None
        assert clip_norm.take() is None

    def test_is_none_where_another_model_is_clipped(self, model, clip_norm):
        other = nn.Linear(2, 2)
        other(torch.randn(1, 2)).sum().backward()
        utils.clip_grad_norm_(other.parameters(), 0.1)
        assert clip_norm.take() is None

    def test_is_not_collected_for_ever_by_a_loop_without_steps(self, model, clip_norm):
        for _ in range(MAX_PARTS + 10):
            utils.clip_grad_norm_(model.parameters(), 1e9)
        assert clip_norm.take().item() == pytest.approx(norm_of(model) * math.sqrt(MAX_PARTS), rel=1e-5)

    def test_is_left_alone_in_compiled_clipping(self, model, clip_norm):
        norm = norm_of(model)

        @torch.compile(fullgraph=True, backend="eager")
        def clip():
            return utils.clip_grad_norm_(list(model.parameters()), 0.1)

        assert clip().item() == pytest.approx(norm, rel=1e-6)
        assert clip_norm.take() is None


class TestTheFunctions:
    def test_are_pickled_by_name(self, clip_norm):
        code = pickle.dumps((clip_grad._clip_grads_with_norm_, utils.clip_grads_with_norm_))
        clip_norm.close()
        assert pickle.loads(code) == (clip_grad._clip_grads_with_norm_, utils.clip_grads_with_norm_)
        assert b"tsemon" not in code

    def test_are_put_back(self, model):
        before = clip_grad._clip_grads_with_norm_, utils.clip_grads_with_norm_
        first, second = ClipNorm(model, Guard(raises)), ClipNorm(model, Guard(raises))
        first.close()
        utils.clip_grad_norm_(model.parameters(), 0.1)
        assert first.take() is None
        assert second.take() is not None
        second.close()
        assert (clip_grad._clip_grads_with_norm_, utils.clip_grads_with_norm_) == before
