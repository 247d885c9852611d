"""The random encoder of Classic Transformers, Section 2.4, and what passes through its blocks.

Axes: `B` batch, `T` tokens, `D` width, `H` heads, `K` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.models import Encoder
from tsemon.models.attention import attend

NUM_TOKENS = 64


def random_encoder(seed: int, **rules: Any) -> Encoder:
    """The preset "classic-20" with the weights of Section 2.4.

    Step 1 is Y = X + alpha [P_1 X W_1 ... P_h X W_h] to the letter (Proposition 9): W, the values' weights, is drawn
    from N(0, 1/d), attention's output weights are the identity and its biases zero. Query and key weights are uniform
    in (-1, 1)/sqrt(d) (Eq. 2), which is PyTorch's own start, and so are those of the feed-forward network. Norms have
    no weights, scores are divided by sqrt(d/h).
    """
    torch.manual_seed(seed)
    model = Encoder.from_preset("classic-20", norm_affine=False, **rules)
    width = model.config.width
    for block in model.blocks:
        attention: Any = block.attention
        nn.init.zeros_(attention.to_query_key_value.bias)
        nn.init.normal_(attention.to_query_key_value.weight.data[2 * width :], std=width**-0.5)
        nn.init.eye_(attention.to_output.weight)
        nn.init.zeros_(attention.to_output.bias)
    return model.requires_grad_(False)


def twin(model: Encoder, **rules: Any) -> Encoder:
    """An encoder that shares the model's weights and follows other rules."""
    with torch.device("meta"):  # what it would start with is thrown away
        other = Encoder(replace(model.config, **rules))
    other.load_state_dict(model.state_dict(), assign=True)
    return other.requires_grad_(False)


def random_tokens(seed: int, width: int, num_tokens: int = NUM_TOKENS) -> Tensor:
    """X from N(0, 1), (1, T, D)."""
    return torch.randn(1, num_tokens, width, generator=torch.Generator().manual_seed(seed))


@contextmanager
def caught(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Of each module that runs in the `with` block, its first input and its output, by its dotted name."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def catch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = (args[0], output)

        return hook

    handles = [module.register_forward_hook(catch(name)) for name, module in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def head_mix(attention: Any, query_key_value_BTE: Tensor, x_BTD: Tensor | None = None) -> Tensor:
    """P_k X of every head, (B, H, T, D), or P itself, (B, H, T, T), by the model's own attention.

    `query_key_value_BTE` is what the module's first layer gave.
    """
    qkv_BTHK = torch.unflatten(query_key_value_BTE, 2, (3 * attention.heads, -1))
    query, key, _ = qkv_BTHK.transpose(1, 2).chunk(3, dim=1)
    tokens_BTD = torch.eye(query.shape[2]).expand(query.shape[0], -1, -1) if x_BTD is None else x_BTD
    values_BHTD = tokens_BTD[:, None].expand(-1, attention.heads, -1, -1)
    return attend(query, key, values_BHTD, causal=attention.causal, path="materialised", scale=attention.scale)
