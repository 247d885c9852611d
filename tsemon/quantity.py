"""A metric of the user's own, for `attach(measures=[..., Quantity(...)])`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tsemon.catalogue import LAYERED, SCALARS, Axis
from tsemon.errors import InvalidArgument
from tsemon.wire import METRIC_NAME, NAME

Where = Literal["output", "input", "attention", "queries", "keys", "values", "gradients", "parameters"]
Merge = Literal["mean", "sum", "max", "min"]
QuantityTier = Literal["every", "slow"]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A metric that is measured in every block by a function of your own.

    Charts, rules, REST and /metrics treat it like a metric of the catalogue.

    The function runs on the training thread, on the device, without gradients and without autocast. It gets tensors in
    float32 or wider, and returns a tensor or a number:

    - `of="output"`, `"input"`: the hidden state that a block returns or gets (batch, tokens, width), and which tokens are no
      padding (batch, tokens). Padding is zero. The output of a block that ends with a de-escalation step is the state before
      that step.
    - `of="attention"`: attention weights of some query rows (batch, heads, rows, keys), and which of the rows are tokens
      (batch, rows). They are the rows and sequences that `attention_rows` chooses, 64 rows for "all".
    - `of="queries"`, `"keys"`, `"values"`: what attention computes with (batch, heads, tokens, width of a head), and which
      tokens are no padding (batch, tokens).
    - `of="gradients"`, `"parameters"`: a list of the block's gradients before the optimizer's step, or of its parameters
      after it. One argument. Under FSDP2 these are the shards that this process holds.

    Without `finish`, the elements of the result are values, for example one per sequence: NaN does not count, and `merge`
    makes one number of the rest, over all processes. With `finish`, the result is an array of a fixed shape with
    at most 1,024 elements, such as several sums. `merge` merges the arrays of all processes element by element, and
    `finish` makes one number of the merged array, on the host and on another thread.

    The function must not wait for the device (`.item()`, `if tensor:`, `x[mask]`), write into tensors that it has not made,
    or draw from the global random state. tsemon raises an error in the function instead. A function that raises is
    contained: the value is NaN, `monitor.status` has the reason, and the training continues.
    """

    name: str
    """Name on the wire, in rules and in charts: letters, digits and _./:- up to 128 characters. Not one of the catalogue."""
    of: Where
    """Which tensors of a block the function gets."""
    function: Callable[..., Any]
    axis: Axis = "block"
    """"block": one value per block. "activation": also one for the first block's input, only of="output". "run": one value,
    merged over all blocks."""
    merge: Merge = "mean"
    """How values of several processes become one."""
    finish: Callable[[Any], Any] | None = None
    """Makes one number of the merged result."""
    title: str = ""
    """Meaning of the metric in a few words, for charts. Default: the name."""
    equation: str = ""
    unit: str = "1"
    low: float | None = None
    """Smallest possible value; None if there is no bound."""
    high: float | None = None
    log_scale: bool = False
    """True if charts should use a logarithmic scale."""
    tier: QuantityTier = "every"
    """"every": measured at each sampled step. "slow": at one in ten or more."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(METRIC_NAME, self.name):
            raise InvalidArgument(
                f"Quantity(name=) must be 1 to 128 letters, digits and _./:-, the first a letter or _, got {self.name!r}"
            )
        if self.name in LAYERED or self.name in SCALARS:
            raise InvalidArgument(
                f"Quantity(name={self.name!r}) is a metric of the catalogue; choose another name, such as 'my_{self.name}'"
            )
        for field, kind in (("of", Where), ("axis", Axis), ("merge", Merge), ("tier", QuantityTier)):
            if getattr(self, field) not in get_args(kind):
                self._refuse(field, f"one of {', '.join(map(repr, get_args(kind)))}")
        if self.axis == "activation" and self.of != "output":
            self._refuse("axis", "'block' or 'run' unless of='output', which has one entry more than there are blocks")
        if not callable(self.function):
            self._refuse("function", "a function of tensors")
        if self.finish is not None and not callable(self.finish):
            self._refuse("finish", "None, or a function of the merged result")
        for field in ("title", "equation", "unit"):
            text = getattr(self, field)
            if not isinstance(text, str) or (text and not re.fullmatch(NAME, text)):
                self._refuse(field, "text of at most 128 characters on one line")
        for field in ("low", "high"):
            bound = getattr(self, field)
            if bound is not None and not (isinstance(bound, int | float) and math.isfinite(bound)):
                self._refuse(field, "None, or a finite number")
        if self.low is not None and self.high is not None and self.low >= self.high:
            self._refuse("low", f"less than high={self.high!r}")

    def _refuse(self, field: str, expected: str) -> None:
        raise InvalidArgument(
            f"Quantity({self.name!r}, {field}=) must be {expected}, got {getattr(self, field)!r:.100}"
        )

    def described(self) -> dict[str, Any]:
        """The description that charts use, as JSON."""
        told = {name: getattr(self, name) for name in ("name", "axis", "title", "equation", "unit", "low", "high")}
        return told | {"title": self.title or self.name, "log_scale": bool(self.log_scale)}
