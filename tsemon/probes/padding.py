"""Which tokens are padding, from what the modules on the way to the blocks were given.

Axes: B samples, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

FIRST_STACK: tuple[str, ...] = ("attention_mask", "src_key_padding_mask", "padding_mask")
LATER_STACKS: tuple[str, ...] = ("decoder_attention_mask", "tgt_key_padding_mask")


class Padding:
    """The masks of the forward pass that is under way."""

    def __init__(self, num_stacks: int) -> None:
        self._num_stacks = num_stacks
        self._masks: dict[str, Tensor] = {}

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the masks among the arguments of a module; those of an inner module replace those of an outer."""
        names = inspect.signature(type(module).forward).parameters
        given = dict(zip(list(names)[1:], args, strict=False)) | kwargs  # the first is self
        self._masks |= dict(_masks_in(given))

    def forget(self) -> None:
        self._masks = {}

    def valid(self, stack: int, batch: int, tokens: int) -> Tensor | None:
        """True at tokens (B, T) of this stack, None where nothing was said."""
        names = FIRST_STACK + LATER_STACKS
        if self._num_stacks > 1:
            names = LATER_STACKS if stack else FIRST_STACK
        for name in names:
            mask = self._masks.get(name)
            if mask is not None and tuple(mask.shape) == (batch, tokens):
                # PyTorch's masks are true, or -inf, at padding; Hugging Face's are 1 at tokens.
                if "padding" in name:
                    return mask >= 0 if mask.is_floating_point() else ~mask.bool()
                return mask.bool()
        return None


def _masks_in(given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Masks of two axes (batch, tokens) by name, also inside a batch that is passed as a dict."""
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _masks_in(value)
        elif name in FIRST_STACK + LATER_STACKS and isinstance(value, Tensor) and value.ndim == 2:
            yield name, value
