import pytest
import torch

from tsemon.measures.choosing import evenly_spread


class TestEvenlySpread:
    @pytest.mark.parametrize(("size", "at_most"), [(10, 4), (10, 10), (3, 256), (1000, 256), (1, 1)])
    def test_takes_one_from_the_middle_of_each_stretch(self, size, at_most):
        number = min(size, at_most)
        index, is_chosen = evenly_spread(torch.ones(size, dtype=torch.bool), at_most)
        assert index.tolist() == [(2 * i + 1) * size // (2 * number) for i in range(number)]
        assert is_chosen.all()

    def test_takes_what_is_true_in_order(self):
        valid = torch.tensor([False, True, True, False, True, False, True, True, True])
        index, is_chosen = evenly_spread(valid, 3)
        assert index[is_chosen].tolist() == [2, 6, 8]
        index, is_chosen = evenly_spread(valid, 9)
        assert index[is_chosen].tolist() == [1, 2, 4, 6, 7, 8], "each once"

    def test_takes_nothing_where_nothing_is_true(self):
        index, is_chosen = evenly_spread(torch.zeros(5, dtype=torch.bool), 3)
        assert not is_chosen.any()
        assert (index < 5).all()
