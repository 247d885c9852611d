"""Norms of parameters and of their updates. Each takes one tensor or a list of them, seen as one flat vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tsemon.errors import ShapeError

Vector = Tensor | Sequence[Tensor]


def param_norm(theta: Vector) -> Tensor:
    """Euclidean norm of all entries, a scalar tensor >= 0: |theta|

    (Parameter Norm Growth, arXiv 2010.09697, Section 3)
    """
    tensors = _wide(theta)
    scale = torch.stack([torch.linalg.vector_norm(t, ord=torch.inf) for t in tensors]).amax()
    divisor = torch.where(scale > 0, scale, 1.0)  # the square of 1e20 is no float32
    norm: Tensor = scale * torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(t / divisor) for t in tensors])
    )
    return norm


def step_size(theta: Vector, theta_next: Vector) -> Tensor:
    """Norm of one update: |theta' - theta|          (Parameter Norm Growth, arXiv 2010.09697, Section 5.5).

    Raises ShapeError where the two differ in shape.
    """
    return param_norm(_difference(theta, theta_next))


def alignment(theta: Vector, theta_next: Vector) -> Tensor:
    """Cosine of an update with the parameters that it changed, a scalar tensor in [-1, 1].

    (theta' - theta) . theta / (|theta' - theta| |theta|)        (Parameter Norm Growth, arXiv 2010.09697, Section 5.5)

    NaN when either is zero. Raises ShapeError where the two differ in shape.
    """
    delta = _difference(theta, theta_next)
    norm_delta, norm_theta = param_norm(delta), param_norm(theta)
    # Each is scaled to unit length first: products of entries of 1e20 overflow float32, and of 1e-20 vanish.
    return torch.stack(
        [((d / norm_delta) * (t / norm_theta)).sum() for d, t in zip(delta, _wide(theta), strict=True)]
    ).sum()


def checkpoint_cosine(theta: Vector, theta_next: Vector) -> Tensor:
    """Cosine of the parameters at two checkpoints, a scalar tensor in [-1, 1].

    theta' . theta / (|theta'| |theta|)              (Parameter Norm Growth, arXiv 2010.09697, Section 3)

    It depends on how far the checkpoints are apart: say so beside it. NaN when either is zero. Raises ShapeError where
    the two differ in shape.
    """
    norm, norm_next = param_norm(theta), param_norm(theta_next)
    pairs = _pairs(theta, theta_next)
    return torch.stack([((t / norm) * (u / norm_next)).sum() for t, u in pairs]).sum().clamp(-1, 1)


def _wide(theta: Vector) -> list[Tensor]:
    tensors = [theta] if isinstance(theta, Tensor) else list(theta)
    return [t.detach().to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _difference(theta: Vector, theta_next: Vector) -> list[Tensor]:
    return [after - before for before, after in _pairs(theta, theta_next)]


def _pairs(theta: Vector, theta_next: Vector) -> list[tuple[Tensor, Tensor]]:
    before, after = _wide(theta), _wide(theta_next)
    if [t.shape for t in before] != [t.shape for t in after]:
        raise ShapeError(
            f"an update needs parameters of the same shapes before and after, got {[tuple(t.shape) for t in before]} "
            f"and {[tuple(t.shape) for t in after]}"
        )
    return list(zip(before, after, strict=True))
