"""Which tokens are padding, from what a model's forward was given.

Axes: B samples, T tokens.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

FIRST_STACK: tuple[str, ...] = ("attention_mask", "src_key_padding_mask", "padding_mask")
LATER_STACKS: tuple[str, ...] = ("decoder_attention_mask", "tgt_key_padding_mask")


class Padding:
    """The masks of the latest forward pass of a model."""

    def __init__(self, model: nn.Module, num_stacks: int) -> None:
        self._names = list(inspect.signature(model.forward).parameters)
        self._num_stacks = num_stacks
        self._given: dict[str, Any] = {}

    def read(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the arguments of a pass that begins."""
        self._given = dict(zip(self._names, args, strict=False)) | kwargs

    def forget(self) -> None:
        self._given = {}

    def valid(self, stack: int, batch: int, tokens: int) -> Tensor | None:
        """True at tokens (B, T) of this stack, None where nothing was said. Only masks of two axes tell padding."""
        names = FIRST_STACK + LATER_STACKS
        if self._num_stacks > 1:
            names = LATER_STACKS if stack else FIRST_STACK
        for name in names:
            mask = self._given.get(name)
            if isinstance(mask, Tensor) and tuple(mask.shape) == (batch, tokens):
                # PyTorch's masks are true, or -inf, at padding; Hugging Face's are 1 at tokens.
                if "padding" in name:
                    return mask >= 0 if mask.is_floating_point() else ~mask.bool()
                return mask.bool()
        return None
