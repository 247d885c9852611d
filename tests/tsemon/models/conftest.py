import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def x_BTD():
    return torch.randn(3, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
