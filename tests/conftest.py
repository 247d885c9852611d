import pytest
import torch

from tests import zoo


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """All models here are tiny: a second thread costs more than it brings."""
    torch.set_num_threads(1)


@pytest.fixture(params=zoo.MODELS, ids=lambda make: make.__name__)
def any_model(request):
    """A model and a function that runs it on an input."""
    torch.manual_seed(0)
    return request.param()
