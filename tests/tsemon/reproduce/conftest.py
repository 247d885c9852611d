import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """As in the processes of `tsemon reproduce`: on matrices this small a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
