"""The numbers of calm steps."""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tsemon.calm import NUM_TOGETHER, Calm


@pytest.fixture
def calm():
    return Calm(limit=3.0)


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(2.0, 1.0), (torch.tensor(2.0), torch.tensor(1.0)), (torch.tensor([[2.0]], requires_grad=True), 1.0)],
)
def test_keeps_numbers_on_the_host_as_floats(calm, loss, norm):
    assert calm.keep(loss, norm)
    assert (calm.losses, calm.norms) == ([2.0], [1.0])


def test_keeps_one_without_the_other(calm):
    assert calm.keep(2.0, None)
    assert calm.keep(None, 1.0)
    assert calm.keep(None, None)
    assert (calm.losses, calm.norms) == ([2.0], [1.0])


@pytest.mark.parametrize(
    "loss",
    [
        3.0,
        math.nan,
        math.inf,
        -math.inf,
        2,
        "low",
        torch.ones(2),
        torch.tensor(2),
        torch.tensor(2j),
        torch.tensor(math.nan),
    ],
)
def test_keeps_nothing_of_a_step_whose_loss_is_not_usual(calm, loss):
    assert not calm.keep(loss, 1.0)
    assert (calm.losses, calm.norms) == ([], [])


@pytest.mark.parametrize(("loss", "norm"), [(2.0, None), (None, 1.0), (2.0, 1.0)])
def test_is_full_after_a_few_steps(calm, loss, norm):
    fullness = []
    for _ in range(NUM_TOGETHER):
        fullness.append(calm.is_full)
        assert calm.keep(loss, norm)
    assert not any(fullness)
    assert calm.is_full


@pytest.mark.parametrize("limit", [3.0, math.inf])
def test_takes_no_infinite_loss_for_a_usual_one(limit):
    assert not Calm(limit).keep(math.inf, None)
    assert not Calm(limit, floor=0.0).keep(-0.1, None)


@pytest.mark.parametrize(
    "norm", [math.nan, math.inf, "high", torch.ones(2), torch.tensor(math.inf), torch.ones((), device="meta")]
)
def test_keeps_nothing_of_a_step_whose_gradient_norm_is_no_finite_number(calm, norm):
    assert not calm.keep(2.0, norm)
    assert (calm.losses, calm.norms) == ([], [])


@pytest.mark.parametrize("mode", [TorchDispatchMode, TorchFunctionMode])
def test_does_nothing_where_a_mode_of_the_user_would_see_it(calm, mode):
    class Own(mode):
        num = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Own.num += 1
            return function(*args, **(kwargs or {}))

        __torch_function__ = __torch_dispatch__

    loss = torch.tensor(2.0)
    with Own():
        assert not calm.keep(loss, None)
        assert not calm.keep(2.0, None)
    assert Own.num == 0


def test_reads_no_tensor_of_a_transform(calm):
    kept = []
    torch.func.vmap(lambda loss: kept.append(calm.keep(loss, None)) or loss)(torch.ones(3))
    assert kept == [False]
