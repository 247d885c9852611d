"""Find the weights and biases that make queries and keys, however a model names and packs them.

D width, H query heads, K key heads, d head width. A packed projection holds values, too; what makes queries and keys are
rows of it (columns in GPT-2's `Conv1D`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from tsemon.probes.discovery import held, is_conv1d
from tsemon.probes.groups import is_sharded, local

SEPARATE = frozenset(
    f"{before}{letter}{after}"
    for letters, before, after in (
        (("query", "key", "q", "k", "wq", "wk"), "", ""),
        (("q", "k", "query", "key"), "", "proj"),
        (("q", "k", "query", "key"), "", "projection"),
        (("q", "k", "query", "key"), "to", ""),
        (("q", "k", "query", "key"), "linear", ""),
        (("q", "k", "query", "key"), "", "linear"),
        (("q", "k"), "", "lin"),
    )
    for letter in letters
) | {"toquerykey"}
"""Projections of queries, of keys, or of both without values; in lower case and without underscores."""
PACKED = frozenset({"qkv", "qkvproj", "wqkv", "cattn", "inproj", "toqkv", "toquerykeyvalue", "querykeyvalue"})
"""Projections of queries, keys and values together."""
INTERLEAVED = "querykeyvalue"
"""GPT-NeoX's and BLOOM's: query, key and value of the first head, then those of the second."""
NUM_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads")
NUM_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads")


class Slices(NamedTuple):
    """Stretches of one parameter along one of its axes."""

    parameter: nn.Parameter
    axis: int = 0
    stretches: tuple[tuple[int, int], ...] = ()
    """None: all of it."""

    def of(self, tensor: Tensor) -> Iterator[Tensor]:
        """What this process holds of them, in the parameter or in what has its shape, such as its gradient."""
        held, offset = local(tensor), 0
        if not self.stretches:
            yield held
            return
        if is_sharded(tensor):
            offset = _offset(tensor, self.axis)
        size = held.shape[self.axis]
        for start, stop in self.stretches:
            low, high = max(start - offset, 0), min(stop - offset, size)
            if low < high:
                yield held.narrow(self.axis, low, high - low)


def queries_and_keys(attention: nn.Module) -> list[Slices] | str:
    """The parameters that make queries and keys in this module, or why they cannot be told."""
    found = list[Slices]()
    for name, module in attention.named_modules():
        kind = name.rpartition(".")[2].lower().replace("_", "")
        if isinstance(module, nn.MultiheadAttention):
            found += _of_multihead(module)
        elif kind in SEPARATE:
            found += [Slices(parameter) for parameter in module.parameters()]
        elif kind in PACKED and isinstance(weight := held(module, "weight"), nn.Parameter):
            stretches = _stretches(kind, attention, module, weight)
            if stretches is None:
                return f"cannot tell queries and keys from values in {name} of {type(attention).__name__}"
            found += _packed(module, weight, stretches)
    return found or f"found no projection of queries and keys in {type(attention).__name__}"


def _of_multihead(module: nn.MultiheadAttention) -> Iterator[Slices]:
    queries_and_keys = ((0, 2 * module.embed_dim),)
    for name in ("in_proj_weight", "in_proj_bias"):
        if isinstance(packed := held(module, name), nn.Parameter):
            yield Slices(packed, 0, queries_and_keys)
    for name in ("q_proj_weight", "k_proj_weight"):  # where keys or values are of another width
        if isinstance(separate := held(module, name), nn.Parameter):
            yield Slices(separate)


def _packed(module: nn.Module, weight: nn.Parameter, stretches: tuple[tuple[int, int], ...]) -> Iterator[Slices]:
    yield Slices(weight, _output_axis(module), stretches)
    if isinstance(bias := held(module, "bias"), nn.Parameter):
        yield Slices(bias, 0, stretches)


def _stretches(
    kind: str, attention: nn.Module, module: nn.Module, weight: nn.Parameter
) -> tuple[tuple[int, int], ...] | None:
    axis = _output_axis(module)
    rows, width = weight.shape[axis], weight.shape[1 - axis]
    heads, key_heads = (_number(attention, names) for names in (NUM_HEADS, NUM_KEY_HEADS))
    if "CodeGen" in type(attention).__name__:
        return None  # split over the accelerators that it was trained on, and in the order query, value, key
    if kind == INTERLEAVED or (kind == "cattn" and getattr(attention, "multi_query", None) is False):
        if rows != 3 * width or not heads or rows % (3 * heads):
            return None
        size = rows // (3 * heads)
        return tuple((3 * head * size, (3 * head + 2) * size) for head in range(heads))
    if rows == 3 * width and key_heads in (None, heads):
        return ((0, 2 * width),)
    if heads and getattr(attention, "multi_query", False):
        key_heads = 1
    if not heads or not key_heads or rows % (heads + 2 * key_heads):
        return None
    return ((0, rows // (heads + 2 * key_heads) * (heads + key_heads)),)


def _output_axis(module: nn.Module) -> int:
    return 1 if is_conv1d(module) else 0


def _number(attention: nn.Module, names: tuple[str, ...]) -> int | None:
    for holder in (attention, getattr(attention, "config", None)):
        for name in names:
            if isinstance(number := getattr(holder, name, None), int):
                return number
    return None


def _offset(tensor: Any, axis: int) -> int:
    """Where along the axis this process's part begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offsets[axis]
