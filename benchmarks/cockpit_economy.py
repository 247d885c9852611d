"""An equivalent of cockpit's "economy" configuration, tracked at each step.

The package itself (cockpit-for-pytorch 1.0.2, 2021) stands on BackPACK, which has no individual gradients for LayerNorm
(1.7.1) and needs torchvision. This does what its code does: individual gradients by hooks on each layer as in BackPACK,
and the quantities Alpha, Distance, GradHist1d, GradNorm, InnerTest, Loss, NormTest, OrthoTest and UpdateSize as in
`cockpit/quantities`, copies and `.item()` calls included. Left out is what costs nothing beside the rest: the parabola
through two points that gives alpha, the variance of individual losses, and individual gradients of the positions, which
have no batch axis. Nothing is drawn.

Axes: `B` batch, `T` tokens, `O` outputs, `I` inputs.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from conditions import Condition, Unavailable, free_bytes
from torch import Tensor, nn
from workload import Workload

COPIES = 5
"""Of the individual gradients: one being made with one in work, and Alpha's at the start and, old and new, at the end."""


class CockpitEconomy(Condition):
    """Like naive hooks, it calls the model uncompiled."""

    name = "cockpit economy (equivalent)"

    def __init__(self, work: Workload, folder: Path) -> None:
        super().__init__(work, folder)
        self._parameters = list(work.model.parameters())
        needed = COPIES * work.batch * sum(p.numel() * p.element_size() for p in self._parameters)
        if needed > free_bytes(work.device):
            raise Unavailable(f"individual gradients need {needed / 2**30:.0f} GiB")
        self._at_start = self._copies(self._parameters)
        self._before = self._copies(self._parameters)
        self._alpha: dict[str, Any] | None = None

    def hook(self) -> None:
        self._individual: dict[Tensor, Tensor] = {}
        self._reduced: dict[Tensor, tuple[Tensor, Tensor, Tensor]] = {}
        self._handles = [
            module.register_forward_hook(self._watch)
            for module in self.work.model.modules()
            if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding)
        ]

    def step(self) -> None:
        loss = self.work.gradients(self.work.model)
        self._track(loss)
        self.work.optimizer.step()

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._individual, self._reduced = {}, {}

    def _watch(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if args[0].ndim == 1:
            return
        input_ = args[0].detach()
        output.register_hook(lambda gradient: self._take(module, input_, gradient))

    def _take(self, module: nn.Module, input_: Tensor, gradient: Tensor) -> None:
        with torch.no_grad():
            for parameter, individual in individual_gradients(module, input_, gradient.detach().float()):
                self._individual[parameter] = individual
                squared_B = individual.square().flatten(1).sum(1)
                flat = individual.flatten(1)
                histogram = torch.histc((len(flat) * flat).clamp(-2, 2), bins=100, min=-2, max=2)
                self._reduced[parameter] = (squared_B, flat @ flat.T, histogram)

    @torch.no_grad()
    def _track(self, loss: Tensor) -> list[float]:
        gradients = [p.grad for p in self._parameters]
        read = [loss.item()]
        read += [g.norm(2).item() for g in gradients]  # GradNorm
        read += [(p - start).norm(2).item() for p, start in zip(self._parameters, self._at_start, strict=True)]
        read += [(p - before).norm(2).item() for p, before in zip(self._parameters, self._before, strict=True)]
        self._before = self._copies(self._parameters)
        read += self._tests()
        self._keep_alpha(gradients)
        return read

    def _tests(self) -> list[float]:
        """InnerTest, NormTest, OrthoTest and the histogram, from what was reduced during the backward pass."""
        squared_B, dots_BB, histogram = (
            torch.stack(parts).sum(0) for parts in zip(*self._reduced.values(), strict=True)
        )
        total, batch = sum(p.grad.square().sum() for p in self._parameters), len(squared_B)
        projections_B = batch * dots_BB.sum(1)
        inner = (projections_B.square().sum() - batch * total**2) / (batch - 1) / batch / total**2
        norm = (batch**2 * squared_B.sum() - batch * total) / (batch - 1) / batch / total
        ortho = (batch**2 * squared_B.sum() - (projections_B.square() / total).sum()) / (batch - 1) / batch / total
        return [inner.sqrt().item(), norm.sqrt().item(), ortho.sqrt().item(), *histogram.tolist()]

    def _keep_alpha(self, gradients: list[Tensor]) -> list[float]:
        """Each step is the end of one line search and the start of the next, and is copied for both."""
        end, begun, self._alpha = self._snapshot(gradients), self._alpha, self._snapshot(gradients)
        if begun is None:
            return []
        direction = [e - b for e, b in zip(end["parameters"], begun["parameters"], strict=True)]
        length = sum(d.square().sum() for d in direction).sqrt().item()
        along = dict(zip(self._parameters, direction, strict=True))
        read = [length]
        for point in (begun, end):
            read.append(projection(point["gradients"], direction))
            individual = point["individual"]
            steps = [along[p] for p in individual]
            each = [projection([g[b] for g in individual.values()], steps) for b in range(self.work.batch)]
            read.append(statistics.variance(each))
        return read

    def _snapshot(self, gradients: list[Tensor]) -> dict[str, Any]:
        return {
            "parameters": self._copies(self._parameters),
            "gradients": self._copies(gradients),
            "individual": {p: self.work.batch * g for p, g in self._individual.items()},
        }

    @staticmethod
    def _copies(tensors: list[Tensor]) -> list[Tensor]:
        return [t.detach().clone() for t in tensors]


def individual_gradients(module: nn.Module, input_: Tensor, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each parameter of the layer its gradient by sample, (B, ...); their sum over B is the gradient."""
    batch = len(input_)
    if isinstance(module, nn.Embedding):
        table = gradient.new_zeros(batch, *module.weight.shape)
        rows = input_[:, :, None].expand_as(gradient)
        return [(module.weight, table.scatter_add_(1, rows, gradient))]
    if isinstance(module, nn.LayerNorm):
        normalized = torch.nn.functional.layer_norm(input_.float(), module.normalized_shape, eps=module.eps)
        weight = (gradient * normalized).sum(1)
    else:
        weight = torch.einsum("bto,bti->boi", gradient, input_.float())
    return [(module.weight, weight), (module.bias, gradient.sum(1))]


def projection(vectors: list[Tensor], direction: list[Tensor]) -> float:
    """Of a vector in parts onto a direction in parts, read part by part."""
    dot = sum(torch.sum(v * d).item() for v, d in zip(vectors, direction, strict=True))
    return dot / sum(d.norm(2).item() ** 2 for d in direction) ** 0.5
