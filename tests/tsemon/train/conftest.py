import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The models are tiny: a second thread costs more than it brings."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
