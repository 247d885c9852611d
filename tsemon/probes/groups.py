"""Which parameter counts where, and which part of it this process holds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from tsemon.probes.discovery import Block, held

OTHER, EMBEDDING, HEAD = -3, -2, -1
"""The groups behind those of the blocks: what belongs to no block, and the two ends. They count from the end."""
NUM_ENDS = 3

HEAD_NAME = re.compile(r"(^|[._])(head|classifier|fc|output|logits|unembed|generator)\d*($|[._])")
EMBEDDING_NAME = re.compile(r"emb|^pos(ition)?s?($|_)")


def group_parameters(model: nn.Module, blocks: Sequence[Block]) -> dict[int, list[nn.Parameter]]:
    """Parameters by block, then the rest, the embeddings and the output head; each once, scalars left out.

    Embeddings are what `nn.Embedding` holds, and parameters outside the blocks that are by themselves and are named after
    an embedding or a position (`pos_embed`). What is tied to an embedding is an embedding.
    """
    groups: dict[int, list[nn.Parameter]] = {}
    seen: set[int] = set()
    head = output_head(model, blocks)
    for group, parameters in (
        (EMBEDDING, _embeddings(model, blocks)),
        *((block.number, block.module.parameters()) for block in blocks),
        (HEAD, () if head is None or is_tied(model, head) else head.parameters()),
        (OTHER, model.parameters()),
    ):
        for parameter in parameters:
            if id(parameter) in seen or isinstance(parameter, UninitializedParameter):
                continue
            if parameter.numel() > 1 and parameter.is_floating_point():
                seen.add(id(parameter))
                groups.setdefault(group, []).append(parameter)
    return groups


def output_head(model: nn.Module, blocks: Sequence[Block]) -> nn.Module | None:
    """What the model itself calls its output embeddings; else the last linear layer outside the blocks that is named so."""
    with suppress(Exception):  # some models have it, and raise
        if isinstance(named := model.get_output_embeddings(), nn.Module):  # type: ignore[operator]
            return named
    inside = _inside(blocks)
    heads = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in inside and HEAD_NAME.search(name)
    ]
    return heads[-1] if heads else None


def is_tied(model: nn.Module, head: nn.Module) -> bool:
    """Whether the head's weight is that of an embedding."""
    weight = held(head, "weight")
    return weight is not None and any(
        weight is held(module, "weight") for module in model.modules() if isinstance(module, nn.Embedding)
    )


def local(tensor: Tensor) -> Tensor:
    """The part of it that is in this process, detached; it may be empty."""
    held: Any = tensor
    kept: Tensor = held.to_local() if is_sharded(tensor) else held
    return kept.detach()


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
    inside = _inside(blocks)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield from module.parameters(recurse=False)
        elif id(module) not in inside:
            own = module.named_parameters(recurse=False)
            yield from (parameter for name, parameter in own if EMBEDDING_NAME.search(name))


def _inside(blocks: Sequence[Block]) -> set[int]:
    return {id(module) for block in blocks for module in block.module.modules()}
