"""Number of tokens a run has been trained on, given as a total or step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument

UNKNOWN = (
    "the run resumed without the number of tokens before it: pass tokens= (all tokens so far) to monitor.step(), or "
    "restore monitor.state_dict() from the checkpoint"
)
NOT_GROWING = (
    "tokens= did not grow between two samples. It is the number of all tokens so far; pass the tokens of one step as "
    "step_tokens=, and tsemon adds them up"
)


class Tokens:
    """Adds up `step_tokens` without waiting for the device; `tokens` replaces the total."""

    def __init__(self, so_far: float | None = 0) -> None:
        self.so_far: Tensor | float | None = so_far
        """None if the run resumed and its earlier tokens are unknown."""
        self._last_sampled = -math.inf

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> Tokens:
        """What `state` kept. Raises InvalidArgument if that is no number of tokens."""
        tokens = Tokens(None if state["step"] else 0)
        tokens.add(state.get("tokens"), None)
        return tokens

    def add(self, tokens: Tensor | float | None, step_tokens: Tensor | float | None) -> None:
        """Count one step. Raises InvalidArgument if a value is not one number >= 0; the step is not counted then."""
        if tokens is not None:
            self.so_far = _checked("tokens", tokens)
        elif step_tokens is not None:
            added = _checked("step_tokens", step_tokens)
            self.so_far = None if self.so_far is None else self.so_far + added

    def is_growing(self) -> bool:
        """False if the total is not above the one of the previous call. True if that would need a copy to the host."""
        if isinstance(self.so_far, Tensor) or self.so_far is None:
            return True
        last, self._last_sampled = self._last_sampled, self.so_far
        return self.so_far > last

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps: nothing if no tokens were counted. Waits for the device."""
        so_far = self.so_far.item() if isinstance(self.so_far, Tensor) else self.so_far
        return {"tokens": so_far} if so_far else {}


def _checked(name: str, value: Tensor | float) -> Tensor | float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().to(torch.int64, copy=True)  # float32 counts to 17 million only
    if isinstance(value, int | float) and 0 <= value < math.inf:
        return value
    raise InvalidArgument(f"{name} must be one number >= 0, got {value!r}")
