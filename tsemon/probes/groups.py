"""Which parameter counts where, and which part of it this process holds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from tsemon.probes.discovery import Block, held, walk
from tsemon.probes.naming import is_norm
from tsemon.probes.stacks import mixers

OTHER, EMBEDDING, HEAD = -3, -2, -1
"""The groups behind those of the blocks: what belongs to no block, and the two ends. They count from the end."""
NUM_ENDS = 3

HEAD_NAME = re.compile(r"(^|[._])(head|classifier|fc|output|logits|unembed|generator)\d*($|[._])")
EMBEDDING_NAME = re.compile(r"emb|^pos(ition)?s?($|_)")


def group_parameters(model: nn.Module, blocks: Sequence[Block]) -> dict[int, list[nn.Parameter]]:
    """Return the parameters by block, then the rest, the embeddings and the output head; each once.

    A block has all of its parameters, tables of relative positions and scalars among them. Outside the blocks scalars do
    not count, and embeddings are what `nn.Embedding` holds and parameters that are by themselves and are named after an
    embedding or a position (`pos_embed`). A parameter that is tied to such an embedding counts as embedding.
    """
    groups: dict[int, list[nn.Parameter]] = {}
    seen: set[int] = set()
    if not all(p.is_meta for p in _parameters(model)):  # some are not materialized, and have no values
        seen = {id(p) for p in _parameters(model) if p.is_meta}
    head = output_head(model, blocks)
    for group, parameters in (
        (EMBEDDING, _embeddings(model, blocks)),
        *((block.number, _parameters(block.module)) for block in blocks),
        (HEAD, () if head is None or is_tied(model, head) else _parameters(head)),
        (OTHER, _parameters(model)),
    ):
        for parameter in parameters:
            if id(parameter) in seen or isinstance(parameter, UninitializedParameter):
                continue
            if (parameter.numel() > 1 or group >= 0) and parameter.is_floating_point():
                seen.add(id(parameter))
                groups.setdefault(group, []).append(parameter)
    return groups


def sub_steps(blocks: Sequence[Block]) -> dict[str, set[int]]:
    """Return the ids of the parameters of self-attention and of the feed-forward parts, by the metric of each.

    Norms, cross-attention and other mixers of tokens are in neither.
    """
    found: dict[str, set[int]] = {"attention_param_norm": set(), "feedforward_param_norm": set()}
    for block in blocks:
        norms = {id(p) for part in walk(block.module) if is_norm(part) for p in _parameters(part)}
        attention = set() if block.attention is None else {id(p) for p in _parameters(block.attention)}
        mixing = {id(p) for mixer in mixers(block.module) for p in _parameters(mixer)}
        found["attention_param_norm"] |= attention - norms
        found["feedforward_param_norm"] |= {id(p) for p in _parameters(block.module)} - attention - mixing - norms
    return {metric: ids for metric, ids in found.items() if ids}


def output_head(model: nn.Module, blocks: Sequence[Block]) -> nn.Module | None:
    """Return the model's output embeddings, or else the last linear layer outside the blocks with a usual name."""
    with suppress(Exception):  # some models have it, and raise
        if isinstance(named := model.get_output_embeddings(), nn.Module):  # type: ignore[operator]
            return named
    inside = {part for block in blocks for part in walk(block.module)}
    found = (
        (name, module) for name, module in _outside(model, {block.module for block in blocks}) if module not in inside
    )
    heads = [module for name, module in found if isinstance(module, nn.Linear) and HEAD_NAME.search(name)]
    return heads[-1] if heads else None


def is_tied(model: nn.Module, head: nn.Module) -> bool:
    """True if the head shares its weight with an embedding."""
    weight = held(head, "weight")
    return weight is not None and any(
        weight is held(module, "weight") for module in walk(model) if isinstance(module, nn.Embedding)
    )


def local(tensor: Tensor) -> Tensor:
    """The part of it that is in this process; it may be empty."""
    held: Any = tensor
    return held.to_local() if is_sharded(tensor) else held  # type: ignore[no-any-return]


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, which several processes hold together."""
    return hasattr(tensor, "to_local")


def share(parameter: Tensor, num_ranks: int) -> float:
    """What this process's copy counts, so that those of all `num_ranks` that hold this part of the model sum to the whole.

    1 of a shard that no other holds, 1/n of values that n hold; more than 1 where not all shards are among the ranks.
    """
    if not is_sharded(parameter):
        return 1 / num_ranks
    spread: Any = parameter
    sizes: list[int] = [spread.device_mesh.size(dim) for dim, p in enumerate(spread.placements) if not p.is_replicate()]
    return math.prod(sizes) / num_ranks


def _embeddings(model: nn.Module, blocks: Sequence[Block]) -> Iterator[nn.Parameter]:
    for _, module in _outside(model, {block.module for block in blocks}):
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for name, parameter in module._parameters.items():
            if parameter is not None and (is_embedding or EMBEDDING_NAME.search(name)):
                yield parameter


def _outside(module: nn.Module, blocks: set[nn.Module], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that the model holds outside its blocks, whether or not a block holds them, too, and their names."""
    if module not in blocks:
        yield name, module
        for child_name, child in module.named_children():
            yield from _outside(child, blocks, f"{name}.{child_name}" if name else child_name)


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    for part in walk(module):
        yield from (p for p in part._parameters.values() if p is not None)
