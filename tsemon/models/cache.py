"""What a decoder keeps of the tokens it has read, so that the next token costs one token's work."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tsemon.errors import ShapeError


class Cache:
    """Handed to a decoder again and again; each of its modules finds there what it left.

    One cache belongs to one batch of sequences. It holds no gradient: decoders that read with a cache do not train.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens read so far, in each sequence of the batch. The model counts them when it has read them."""
        self._kept: dict[tuple[nn.Module, str], Tensor] = {}

    def recall(self, owner: nn.Module, name: str) -> Tensor | None:
        return self._kept.get((owner, name))

    def keep(self, owner: nn.Module, name: str, tensor: Tensor) -> None:
        self._kept[owner, name] = tensor

    def append(self, owner: nn.Module, **new: Tensor) -> tuple[Tensor, ...]:
        """Each tensor with what its owner has kept under that name before it, along the tokens (the axis before last).

        Raises ShapeError for a batch of another size.
        """
        for name, tensor in new.items():
            before = self.recall(owner, name)
            if before is not None and len(before) != len(tensor):
                raise ShapeError(
                    f"a cache belongs to one batch: it has read {len(before)} sequences, got {len(tensor)}; make a new one"
                )
            self.keep(owner, name, tensor if before is None else torch.cat([before, tensor], dim=-2))
        return tuple(self._kept[owner, name] for name in new)

    def total(self, owner: nn.Module, new: Tensor) -> Tensor:
        """What `owner` has added up before this; `new` is added to it for the next time."""
        before = self._kept.get((owner, "total"), torch.zeros_like(new))
        self._kept[owner, "total"] = before + new
        return before

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._kept.values())


def positions(tokens_BT: Tensor, cache: Cache | None, context: int) -> tuple[int, int]:
    """Of the first of these tokens in its sequence, and of the one after the last.

    Raises ShapeError unless they are (batch, tokens) and end within the context.
    """
    start = 0 if cache is None else cache.num_tokens
    if tokens_BT.ndim != 2 or start + tokens_BT.shape[1] > context:
        read = f" after {start} in the cache" if start else ""
        raise ShapeError(f"expected (batch, tokens) with at most {context} tokens, got {tuple(tokens_BT.shape)}{read}")
    return start, start + tokens_BT.shape[1]
