"""Find the weights and biases that make queries and keys, however a model names and packs them.

D width, H query heads, K key heads, d head width. In a packed projection, which also makes values, queries and keys have
rows of their own (columns in GPT-2's `Conv1D`). Latent attention (DeepSeek's MLA) makes queries and keys in two steps, and
both count. The first step makes keys and values at once, and counts as a whole. Norms of queries and keys do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tsemon.probes.discovery import held, is_conv1d, is_linear, widths
from tsemon.probes.groups import is_sharded, local


def named(letter: str, word: str) -> set[str]:
    """Names of a projection of queries or of keys; in lower case and without underscores."""
    patterns = ("{}", "{}proj", "{}projection", "to{}", "linear{}", "{}linear", "linear{}proj")
    short = {pattern.format(letter) for pattern in ("w{}", "c{}", "{}lin", "add{}proj")}
    return {pattern.format(name) for name in (letter, word) for pattern in patterns} | short | {f"{word}global"}


QUERIES = named("q", "query") | {"qaproj", "qbproj", "wqa", "wqb", "linearqdownproj", "linearqupproj"}
KEYS = named("k", "key") | {"kvaproj", "kvaprojwithmqa", "wkva", "linearkvdownproj"}
BOTH = {"toquerykey", "querykey"}
"""Queries and keys without values."""
PACKED = {"qkv", "qkvproj", "qkvlinear", "wqkv", "cattn", "attproj", "inproj", "linearqkv", "toqkv"}
PACKED |= {"toquerykeyvalue", "querykeyvalue"}
"""Queries, keys and values."""
KEYS_AND_VALUES = {"kv", "tokv", "kvproj", "wkv"}
LATENT_KEYS_AND_VALUES = {"kvbproj", "wkvb", "linearkvupproj"}
"""Made of the latent: key without positions and value of the first head, then of the second."""
OF_ANOTHER = "indexer"
"""A part of an attention whose queries and keys choose which keys the attention sees."""
BIASES = {"qbias", "querybias", "kbias", "keybias"}

NUM_HEADS = ("num_attention_heads_per_partition", "num_heads", "num_attention_heads", "n_head", "n_heads", "heads")
NUM_KEY_HEADS = (
    *("num_query_groups_per_partition", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads"),
    *("n_query_groups", "num_query_groups"),
)
HEAD_WIDTH = ("hidden_size_per_attention_head", "head_dim", "head_size")

Stretches = tuple[tuple[int, int], ...]


class Slices(NamedTuple):
    """Stretches of one parameter along one of its axes."""

    parameter: nn.Parameter
    axis: int = 0
    stretches: tuple[tuple[int, int], ...] = ()
    """None: all of it."""
    projection: nn.Module | None = None
    """The packed projection that has it."""

    def of(self, tensor: Tensor) -> Iterator[Tensor]:
        """This process's part of the rows, of the parameter or of a tensor of its shape, such as its gradient."""
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
    """The parameters that make queries and keys in this module, by their names, or why they are unknown."""
    found, missing = list[Slices](), {"queries", "keys"}
    for name, module in _projections(attention):
        kind = kind_of(name)
        if isinstance(module, nn.MultiheadAttention):
            found += _of_multihead(module)
            missing.clear()
        elif kind in QUERIES | KEYS | BOTH:
            found += [Slices(parameter) for own, parameter in module.named_parameters() if "norm" not in own]
            missing -= _made_by(kind)
        else:
            stretches = _stretches(kind, attention, name, base_of(module))
            if stretches is None:
                return f"cannot tell queries and keys from values in {name} of {type(attention).__name__}"
            found += _packed(module, stretches)
            missing -= _made_by(kind)
    for name, parameter in attention.named_parameters():  # by itself, in no layer: XLNet's projections, BEiT's biases
        kind = kind_of(name)
        if kind in BIASES or (kind in QUERIES | KEYS and parameter.ndim > 1):
            found.append(Slices(parameter))
            missing -= _made_by(kind)
    if missing:
        return f"found no projection of {' and '.join(sorted(missing, reverse=True))} in {type(attention).__name__}"
    return found


def without_values(found: Sequence[Slices], values: Mapping[nn.Module, Tensor]) -> list[Slices] | str:
    """The same parameters without rows that make values, or why they are unknown.

    `values`: of packed projections, a mask (R,) of the rows that a pass showed to make values.
    """
    result = []
    for slices in found:
        stretches: Stretches | None = slices.stretches
        if stretches and slices.projection is not None and slices.projection in values:
            stretches = _without(values[slices.projection], stretches)
        if stretches is None:
            return "a packed projection makes values in more or in fewer rows than its name says"
        result.append(slices._replace(stretches=stretches))
    return result


def packed_projections(attention: nn.Module) -> list[nn.Module]:
    """The modules that make values beside queries or keys, in rows of their own."""
    packed = PACKED | KEYS_AND_VALUES | LATENT_KEYS_AND_VALUES
    return [module for name, module in _projections(attention) if kind_of(name) in packed]


def _projections(attention: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that make queries or keys, without their own parts."""
    outer: list[str] = []
    for name, module in attention.named_modules():
        kind = kind_of(name)
        if any(name.startswith(f"{one}.") for one in outer) or OF_ANOTHER in name.split("."):
            continue
        is_whole = kind in QUERIES | KEYS | BOTH and any(True for _ in module.parameters())
        is_part = kind in PACKED | KEYS_AND_VALUES | LATENT_KEYS_AND_VALUES and _weight(module) is not None
        if isinstance(module, nn.MultiheadAttention) or is_whole or is_part:
            outer.append(name)
            yield name, module


def _made_by(kind: str) -> set[str]:
    if kind in BOTH | PACKED:
        return {"queries", "keys"}
    return {"queries"} if kind in QUERIES else {"keys"} if kind not in BIASES else set()


def kind_of(name: str) -> str:
    return name.rpartition(".")[2].lower().replace("_", "")


def base_of(module: nn.Module) -> nn.Module:
    """The layer that an adapter of peft wraps, or the module itself."""
    base = vars(module)["_modules"].get("base_layer")
    return base if isinstance(base, nn.Module) else module


def _weight(module: nn.Module) -> nn.Parameter | None:
    weight = held(base_of(module), "weight")
    return weight if isinstance(weight, nn.Parameter) and weight.ndim == 2 else None


def _of_multihead(module: nn.MultiheadAttention) -> Iterator[Slices]:
    queries_and_keys = ((0, 2 * module.embed_dim),)
    for name in ("in_proj_weight", "in_proj_bias"):
        if isinstance(packed := held(module, name), nn.Parameter):
            yield Slices(packed, 0, queries_and_keys)
    for name in ("q_proj_weight", "k_proj_weight"):  # where keys or values are of another width
        if isinstance(separate := held(module, name), nn.Parameter):
            yield Slices(separate)


def _packed(module: nn.Module, stretches: Stretches) -> Iterator[Slices]:
    base = base_of(module)
    if (weight := _weight(module)) is not None:
        yield Slices(weight, output_axis(base), stretches, module)
    if isinstance(bias := held(base, "bias"), nn.Parameter):
        yield Slices(bias, 0, stretches, module)
    for name, parameter in module.named_parameters() if base is not module else ():
        if "lora_A" in name:
            yield Slices(parameter)
        elif "lora_B" in name or "lora_magnitude" in name:
            yield Slices(parameter, 0, stretches, module)


def _stretches(kind: str, attention: nn.Module, name: str, base: nn.Module) -> Stretches | None:
    """Places of the rows that make queries and keys, None if unknown."""
    weight = held(base, "weight")
    assert weight is not None  # or it were none of `_projections`
    axis = output_axis(base)
    rows, width = weight.shape[axis], weight.shape[1 - axis]
    parent = attention.get_submodule(name.rpartition(".")[0])
    holders = [parent, attention, getattr(attention, "config", None)]
    linears = [widths(module) for module in attention.modules() if is_linear(module)]
    if kind in LATENT_KEYS_AND_VALUES:
        names = ("qk_nope_head_dim", *(("qk_head_dim",) if kind == "linearkvupproj" else ()))
        key, value = number_of(holders, names), number_of(holders, ("v_head_dim",))
        if not key or not value or rows % (key + value):
            return None
        return tuple((start, start + key) for start in range(0, rows, key + value))
    heads, key_heads, head_width = (number_of(holders, names) for names in (NUM_HEADS, NUM_KEY_HEADS, HEAD_WIDTH))
    if kind in KEYS_AND_VALUES:
        queries = {
            given for own, module in attention.named_modules() if kind_of(own) in QUERIES for given in _out(module)
        }
        is_half = rows // 2 in queries if not (key_heads and head_width) else rows == 2 * key_heads * head_width
        return ((0, rows // 2),) if is_half and rows % 2 == 0 else None

    kinds = {type(parent).__name__, type(attention).__name__}
    if any("CodeGen" in of for of in kinds):
        return None  # split over the accelerators that it was trained on, and in the order query, value, key
    multi_query = getattr(attention, "multi_query", None)
    is_new_falcon = bool(getattr(attention, "new_decoder_architecture", False))
    has_groups = kind == "linearqkv" or is_new_falcon or any(of in GROUPED for of in kinds)
    is_by_head = (
        (kind == "querykeyvalue" and not multi_query)
        or (kind == "cattn" and multi_query is False)
        or getattr(attention, "head_first", None) is True  # timm's MaxViT
        or any("Lightning" in of for of in kinds)  # MiniMax
    )
    if multi_query and not is_new_falcon:
        key_heads = 1
    elif is_by_head and not has_groups:
        key_heads = heads
    elif key_heads in (None, heads) and not has_groups:
        is_thirds = rows == 3 * width or any(3 * into == rows for into, _ in linears)
        return ((0, rows // 3 * 2),) if is_thirds and rows % 3 == 0 else None
    key_heads = heads if has_groups and key_heads is None else key_heads
    if not heads or not key_heads or heads % key_heads or rows % (heads + 2 * key_heads):
        return None
    size = rows // (heads + 2 * key_heads)
    if head_width not in (None, size):
        return None
    if not (has_groups or is_by_head):
        return ((0, size * (heads + key_heads)),)
    of_group = size * (heads // key_heads + 2)
    return tuple((start, start + of_group - size) for start in range(0, rows, of_group))


def _without(is_value_R: Tensor, stretches: Stretches) -> Stretches | None:
    """Return the rows that make no values. None if the name says another number of them."""
    is_told_R = torch.zeros_like(is_value_R)
    for start, stop in stretches:
        is_told_R[start:stop] = True
    if torch.equal(is_told_R, ~is_value_R):
        return stretches
    edges = torch.diff(nn.functional.pad((~is_value_R).int(), (1, 1)))
    starts, stops = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    is_as_many = len(is_value_R) - is_value_R.sum() == is_told_R.sum()
    return tuple(zip(starts, stops, strict=True)) if is_as_many and len(starts) <= MAX_STRETCHES else None


MAX_STRETCHES = 256
"""Each is one more gradient to read. There are as many as heads, but a third of the rows if these alternate one by one."""

GROUPED = {"FusedQKVLinear", "InternLM2Attention", "InternLM2FlashAttention2", "InternLM2SdpaAttention"}
"""Modules that hold a projection in which each key head's queries, key and value follow each other, as in Megatron-LM."""


def _out(module: nn.Module) -> list[int]:
    return [widths(part)[1] for part in module.modules() if is_linear(part)]


def output_axis(module: nn.Module) -> int:
    return 1 if is_conv1d(module) else 0


def number_of(holders: list[Any], names: tuple[str, ...]) -> int | None:
    for holder in holders:
        for name in names:
            if isinstance(number := getattr(holder, name, None), int) and not isinstance(number, bool):
                return number
    return None


def _offset(tensor: Any, axis: int) -> int:
    """Start of this process's part along the axis."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offsets[axis]
