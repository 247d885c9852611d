import pytest
import torch

from tsemon.late import LateNumbers


class TestLateNumbers:
    @pytest.mark.parametrize(
        "value",
        [2.5, torch.tensor(2.5), torch.tensor([[2.5]]), torch.tensor(2.5, dtype=torch.bfloat16, requires_grad=True)],
    )
    def test_has_what_is_on_the_host_at_once(self, value):
        assert LateNumbers().put(value) == [2.5]

    def test_takes_whole_numbers(self):
        assert LateNumbers().put(3) == [3.0]
        assert LateNumbers().put(torch.tensor(3)) == [3.0]

    @pytest.mark.parametrize(
        "value",
        [None, "high", [1.0], torch.ones(2), torch.ones(()) * 1j, torch.empty((), device="meta"), torch.empty(0)],
    )
    def test_leaves_out_what_is_not_one_number(self, value):
        assert LateNumbers().put(value) == []

    @pytest.mark.parametrize(("value", "then"), [(2.5, [2.5]), (torch.tensor(2.5), [2.5]), ("high", [])])
    def test_has_a_copy_that_is_done_before_a_number_on_the_host(self, monkeypatch, value, then):
        class Done:
            def query(self):
                return True

        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        late = LateNumbers()
        late._copies.append((torch.tensor([1.5]), Done()))  # as of a loss on a GPU
        assert late.put(value) == [1.5, *then]
        assert not late

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_has_what_is_on_a_gpu_when_its_copy_is_done(self):
        late, arrived = LateNumbers(), []
        for step in range(50):
            arrived += late.put(torch.tensor(float(step), device="cuda"))
            torch.cuda.synchronize()
        assert arrived == [float(step) for step in range(49)]
