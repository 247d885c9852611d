"""What a model's attention really was: its weights and values, taken in float64 below everything that a probe can see."""

import copy

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

SOFTMAX = {torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default}


class Recorder(TorchDispatchMode):
    """Keeps what comes out of every softmax, and what is multiplied with it."""

    def __init__(self):
        super().__init__()
        self.weights, self.values = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in SOFTMAX and result.ndim >= 3:
            self.weights.append(result.detach())
        elif func is torch.ops.aten.bmm.default and len(self.values) < len(self.weights):
            weights = self.weights[-1]
            if args[0].shape[-2:] == weights.shape[-2:] and args[0].numel() == weights.numel():
                self.values.append(args[1].detach())
        return result


def recorded(model, forward_of, heads=4):
    """Per block the weights (B, H, T, S) and the values (B, H, S, K) of a twin of `model` in float64."""
    twin, recorder = copy.deepcopy(model).double(), Recorder()
    with sdpa_kernel(SDPBackend.MATH), recorder:
        forward_of(twin)
    weights = [x.view(-1, heads, *x.shape[-2:]) for x in recorder.weights]
    return weights, [v.view(*w.shape[:2], *v.shape[-2:]) for v, w in zip(recorder.values, weights, strict=True)]
