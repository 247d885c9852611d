"""Norms of parameters, gradients and updates, and the angles between them.

Each function takes one tensor or a list of tensors, seen as one flat vector. Outer embeddings and scalars are those outside
the blocks. Axes: P tensors of a list.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tsemon.errors import ShapeError
from tsemon.measures.linear import unit_of

__all__ = [
    "alignment",
    "attention_param_norm",
    "checkpoint_cosine",
    "clipped_grad_norm",
    "direction_cosine",
    "embedding_grad_norm",
    "embedding_param_norm",
    "embedding_update_norm",
    "feedforward_param_norm",
    "grad_norm",
    "grad_norm_qk",
    "gradient_alignment",
    "gradient_cosine",
    "head_grad_norm",
    "head_param_norm",
    "head_update_norm",
    "param_norm",
    "step_size",
    "total_clipped_grad_norm",
    "total_grad_norm",
    "total_param_norm",
    "trained_update_ratio",
    "update_alignment",
    "update_norm",
    "update_ratio",
]

Vector = Tensor | Sequence[Tensor]


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """|x|^2 of each (P,), in float64 from norms in float32 or wider."""
    return joined(norms(tensors)).square()


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """|x| of each, a scalar tensor in float32 or wider. One kernel per dtype, where the device has such."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        places = [place for place, t in enumerate(tensors) if t.dtype == dtype]
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        found |= zip(places, torch._foreach_norm([tensors[place] for place in places], 2, wide), strict=True)
    return [found[place] for place in range(len(tensors))]


def dots(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """x . y of each pair (P,), in float64 from products in float32 or wider."""
    return joined([torch.dot(_flat(x), _flat(y)) for x, y in zip(xs, ys, strict=True)])


def joined(values: Sequence[Tensor]) -> Tensor:
    """Return scalars as one vector (P,) in float64, on the first device other than the CPU if there is one."""
    return torch.stack(together(values)).double()


def together(values: Sequence[Tensor]) -> list[Tensor]:
    """Move tensors to one device, not to the CPU if there are others: a copy to it would block, or be read too early."""
    device = next((v.device for v in values if v.device.type != "cpu"), values[0].device)
    return [v if v.device == device else v.to(device, non_blocking=True) for v in values]


def norm_of(squared: Tensor) -> Tensor:
    """The norm of a vector from the sum of `squares`."""
    return squared.sqrt()


def ratio_of(squared: Tensor, other: Tensor) -> Tensor:
    """The ratio of two norms from the sums of `squares`. NaN if both are zero."""
    return (squared / other).sqrt()


def cosine_of(dot: Tensor, squared: Tensor, other: Tensor) -> Tensor:
    """The cosine of two vectors from the sums of `dots` and `squares`. NaN if either is zero."""
    return (dot / (squared * other).sqrt()).clamp(-1, 1)  # rounding may leave it outside


def param_norm(theta: Vector) -> Tensor:
    """Euclidean norm of all entries, a scalar tensor >= 0: |theta|

    (Parameter Norm Growth, arXiv 2010.09697, Section 3)

    Also the metric of this name, of the parameters of one block.
    """
    tensors, unit = _scaled(_wide(theta))
    return (squares(tensors).sum().sqrt() * unit).to(tensors[0].dtype)


def step_size(theta: Vector, theta_next: Vector) -> Tensor:
    """Norm of one update: |theta' - theta|          (Parameter Norm Growth, arXiv 2010.09697, Section 5.5).

    Also the metric of this name, of all parameters but outer embeddings and scalars. Raises ShapeError where the two
    differ in shape.
    """
    return param_norm(_difference(theta, theta_next))


def update_ratio(theta: Vector, theta_next: Vector) -> Tensor:
    """Return the size of an update relative to the parameters that it changes, a scalar tensor >= 0.

    |theta' - theta| / |theta|                                                             (tsemon)

    Infinite if only theta is zero, NaN if both are. Raises ShapeError where the two differ in shape.
    """
    (change, change_unit), (before, unit) = _scaled(_difference(theta, theta_next)), _scaled(_wide(theta))
    return (ratio_of(squares(change).sum(), squares(before).sum()) * change_unit / unit).to(before[0].dtype)


def trained_update_ratio(theta: Vector, theta_next: Vector) -> Tensor:
    """Return the size of an update relative to the parameters that train, a scalar tensor >= 0.

    |theta' - theta| / |theta|, theta the trained parameters                               (tsemon)

    With adapters (LoRA) most parameters of a block are frozen: relative to all of them, every update looks small. Infinite
    if only theta is zero, NaN if both are. Raises ShapeError where the two differ in shape.
    """
    return update_ratio(theta, theta_next)


def alignment(theta: Vector, theta_next: Vector) -> Tensor:
    """Cosine of an update with the parameters that it changed, a scalar tensor in [-1, 1].

    (theta' - theta) . theta / (|theta' - theta| |theta|)        (Parameter Norm Growth, arXiv 2010.09697, Section 5.5)

    NaN when either is zero. Raises ShapeError where the two differ in shape.
    """
    return _cosine(_difference(theta, theta_next), _wide(theta))


def gradient_alignment(gradient: Vector, theta: Vector) -> Tensor:
    """Return the cosine of a gradient with its parameters, a scalar tensor in [-1, 1].

    g . theta / (|g| |theta|)                        (Parameter Norm Growth, arXiv 2010.09697, Section 5.5)

    NaN when either is zero. Raises ShapeError where the two differ in shape.
    """
    return _cosine(*_paired(gradient, theta))


def checkpoint_cosine(theta: Vector, theta_next: Vector) -> Tensor:
    """Cosine of the parameters at two checkpoints, a scalar tensor in [-1, 1].

    theta' . theta / (|theta'| |theta|)              (Parameter Norm Growth, arXiv 2010.09697, Section 3)

    It depends on how far the checkpoints are apart: state the distance beside it. NaN when either is zero.
    Raises ShapeError where the two differ in shape.
    """
    return _cosine(*_paired(theta, theta_next))


# Metrics that are one of these of other tensors.


def grad_norm(gradient: Vector) -> Tensor:
    """Norm of the gradient of one block before clipping, a scalar tensor >= 0: |g|    (tsemon)"""
    return param_norm(gradient)


def clipped_grad_norm(gradient: Vector) -> Tensor:
    """Norm of the gradient of one block as the optimizer gets it, a scalar tensor >= 0: |g|    (tsemon)"""
    return param_norm(gradient)


def grad_norm_qk(gradient: Vector) -> Tensor:
    """Norm of the gradient of what makes one block's queries and keys, before clipping, a scalar tensor >= 0.

    |g|                                              (tsemon)
    """
    return param_norm(gradient)


def total_grad_norm(gradient: Vector) -> Tensor:
    """Norm of the gradient of all parameters but outer embeddings and scalars before clipping, a scalar >= 0.

    |g|                                              (tsemon)
    """
    return param_norm(gradient)


def total_clipped_grad_norm(gradient: Vector) -> Tensor:
    """Norm of the gradient of all parameters but outer embeddings and scalars as the optimizer gets it, a scalar >= 0.

    |g|                                              (tsemon)
    """
    return param_norm(gradient)


def embedding_grad_norm(gradient: Vector) -> Tensor:
    """Norm of the gradient of the embeddings, a scalar tensor >= 0: |g|    (tsemon)"""
    return param_norm(gradient)


def head_grad_norm(gradient: Vector) -> Tensor:
    """Norm of the gradient of the output head, a scalar tensor >= 0: |g|    (tsemon)"""
    return param_norm(gradient)


def total_param_norm(theta: Vector) -> Tensor:
    """Norm of all parameters but outer embeddings and scalars, a scalar tensor >= 0.

    |theta|                                          (Parameter Norm Growth, arXiv 2010.09697, Appendix A)
    """
    return param_norm(theta)


def embedding_param_norm(theta: Vector) -> Tensor:
    """Norm of the embeddings, a scalar tensor >= 0: |theta|    (Parameter Norm Growth, arXiv 2010.09697, Appendix A)"""
    return param_norm(theta)


def head_param_norm(theta: Vector) -> Tensor:
    """Norm of the output head, a scalar tensor >= 0: |theta|    (Parameter Norm Growth, arXiv 2010.09697, Appendix A)"""
    return param_norm(theta)


def attention_param_norm(theta: Vector) -> Tensor:
    """Norm of the parameters of a block's attention without its norms, a scalar tensor >= 0: |theta|

    (Parameter Norm Growth, arXiv 2010.09697, Section 3)
    """
    return param_norm(theta)


def feedforward_param_norm(theta: Vector) -> Tensor:
    """Norm of the parameters of a block without attention, other mixers of tokens, and norms, a scalar tensor >= 0: |theta|

    (Parameter Norm Growth, arXiv 2010.09697, Section 3)
    """
    return param_norm(theta)


def update_norm(theta: Vector, theta_next: Vector) -> Tensor:
    """Norm of the update of one block, a scalar tensor >= 0.

    |theta' - theta|                                 (Parameter Norm Growth, arXiv 2010.09697, Section 5.5)

    Raises ShapeError where the two differ in shape.
    """
    return step_size(theta, theta_next)


def embedding_update_norm(theta: Vector, theta_next: Vector) -> Tensor:
    """Norm of the update of the embeddings, a scalar tensor >= 0: |theta' - theta|    (tsemon)

    Raises ShapeError where the two differ in shape.
    """
    return step_size(theta, theta_next)


def head_update_norm(theta: Vector, theta_next: Vector) -> Tensor:
    """Norm of the update of the output head, a scalar tensor >= 0: |theta' - theta|    (tsemon)

    Raises ShapeError where the two differ in shape.
    """
    return step_size(theta, theta_next)


def update_alignment(theta: Vector, theta_next: Vector) -> Tensor:
    """Cosine of the update with the parameters, of one block or of all but outer embeddings and scalars.

    (theta' - theta) . theta / (|theta' - theta| |theta|)        (Parameter Norm Growth, arXiv 2010.09697, Section 5.5)

    Returns a scalar tensor in [-1, 1], NaN when either is zero. Raises ShapeError where the two differ in shape.
    """
    return alignment(theta, theta_next)


def direction_cosine(theta: Vector, theta_next: Vector) -> Tensor:
    """Cosine of the parameters with those at the sample before, of one block or of all but outer embeddings and scalars.

    theta . theta' / (|theta| |theta'|)              (Parameter Norm Growth, arXiv 2010.09697, Section 3)

    Returns a scalar tensor in [-1, 1], NaN when either is zero. Raises ShapeError where the two differ in shape.
    """
    return checkpoint_cosine(theta, theta_next)


def gradient_cosine(gradient: Vector, gradient_next: Vector) -> Tensor:
    """Cosine of the gradient with that at the sample before, of all parameters but outer embeddings and scalars.

    g . g' / (|g| |g'|)                              (tsemon)

    Returns a scalar tensor in [-1, 1], NaN when either is zero. Raises ShapeError where the two differ in shape.
    """
    return checkpoint_cosine(gradient, gradient_next)


def _cosine(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
    xs, ys = _scaled(xs)[0], _scaled(ys)[0]
    return cosine_of(dots(xs, ys).sum(), squares(xs).sum(), squares(ys).sum()).to(xs[0].dtype)


def _scaled(tensors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The same over a power of two: the square of 1e20 is no float32. A sampled step does without this second pass."""
    unit = unit_of(torch.stack([torch.linalg.vector_norm(t, ord=torch.inf) for t in tensors]).amax())
    return [t / unit for t in tensors], unit


def _wide(theta: Vector) -> list[Tensor]:
    tensors = [theta] if isinstance(theta, Tensor) else list(theta)
    return [t.detach().to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _difference(theta: Vector, theta_next: Vector) -> list[Tensor]:
    return [after - before for before, after in zip(*_paired(theta, theta_next), strict=True)]


def _paired(theta: Vector, theta_next: Vector) -> tuple[list[Tensor], list[Tensor]]:
    before, after = _wide(theta), _wide(theta_next)
    if [t.shape for t in before] != [t.shape for t in after]:
        raise ShapeError(
            f"two vectors need tensors of the same shapes, got {[tuple(t.shape) for t in before]} and "
            f"{[tuple(t.shape) for t in after]}"
        )
    return before, after


def _flat(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return flat if x.dtype in (torch.float32, torch.float64) else flat.to(torch.promote_types(x.dtype, torch.float32))
