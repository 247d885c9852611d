import pytest
import torch

from tests.tsemon.probes.probing import raise_fault
from tsemon.probes.hooks import Guard, depth_of_autocast


def nothing():
    pass


def interrupt_in(monkeypatch, context, method):
    """Let an interrupt arrive once in the context manager's entry, after it has switched, or in its exit, before that."""
    original = getattr(context, method)

    def interrupted(self, *args):
        if method == "__enter__":
            original(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(context, method, interrupted)


class TestAnInterruptInAHook:
    @pytest.mark.parametrize("method", ["__enter__", "__exit__"])
    @pytest.mark.parametrize("call", ["run", "contain"])
    def test_leaves_gradients_and_autocast_as_they_were(self, monkeypatch, method, call):
        guard = Guard(raise_fault)
        with torch.autocast("cpu", torch.bfloat16), monkeypatch.context() as patch:
            interrupt_in(patch, torch.autocast, method)
            with pytest.raises(KeyboardInterrupt):
                getattr(guard, call)(nothing)
            assert torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert depth_of_autocast() == 1

    @pytest.mark.parametrize("call", ["run", "contain"])
    def test_leaves_gradients_on_as_soon_as_they_are_switched_off(self, monkeypatch, call):
        switch = torch._C._set_grad_enabled

        def interrupted(mode):
            monkeypatch.undo()
            switch(mode)
            raise KeyboardInterrupt

        monkeypatch.setattr(torch._C, "_set_grad_enabled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(Guard(raise_fault), call)(nothing)
        assert torch.is_grad_enabled()

    def test_leaves_them_as_they_were_around_a_pass_of_the_model(self):
        def interrupted():
            torch._C._set_grad_enabled(False)
            torch.set_autocast_enabled("cpu", True)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Guard(raise_fault).run_model(interrupted)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
