import pytest
import torch

from tests import zoo


@pytest.fixture(params=zoo.MODELS, ids=lambda make: make.__name__)
def any_model(request):
    """A model and a function that runs it on an input."""
    torch.manual_seed(0)
    return request.param()
