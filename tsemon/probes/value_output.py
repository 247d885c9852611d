"""Read from the weights of each attention whether they smooth or sharpen: `value_output_growth`, and each head's spectrum.

Values come from a layer of their own, or from rows of a packed projection. The output layer leads the values of all heads
back to the block's width. Both are found by name, and checked by their sizes. An attention that computes these weights gives
them in a method `value_output_weights()`.

Axes: D width, V width of all values, U the same after repetition for grouped queries, R rows of a projection, L blocks,
N heads, K width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tsemon.measures import value_output_growth
from tsemon.measures.sums import Partials, counted
from tsemon.measures.weights import value_output_products, value_output_spectra
from tsemon.probes.discovery import NO_ATTENTION, Block, held, is_linear
from tsemon.probes.groups import is_sharded
from tsemon.probes.parameters import ParameterProbe
from tsemon.probes.part import Part, by_reason
from tsemon.probes.query_key import (
    BOTH,
    HEAD_WIDTH,
    KEYS,
    KEYS_AND_VALUES,
    LATENT_KEYS_AND_VALUES,
    NUM_HEADS,
    OF_ANOTHER,
    PACKED,
    QUERIES,
    Slices,
    base_of,
    kind_of,
    named,
    number_of,
    output_axis,
)
from tsemon.probes.reading import OnHost, Reading, stacked

VALUES = named("v", "value")
OUTPUTS = {"o", "wo", "out", "output", "dense", "proj", "projection", "outlin", "linearout"}
OUTPUTS |= {
    f"{of}{word}" for of in ("o", "out", "output", "c", "to") for word in ("proj", "projection", "out", "output")
}
NOT_OUTPUTS = QUERIES | KEYS | BOTH | PACKED | KEYS_AND_VALUES | LATENT_KEYS_AND_VALUES | VALUES


class ValueOutput(NamedTuple):
    """The weights of one attention, as torch's Linear has them."""

    value_RD: Tensor
    output_DU: Tensor
    values_V: Tensor | None
    """The rows of `value_RD` that make values, on the CPU; None: all."""
    head_width: int | None
    """Width of a head if its values are repeated for several queries."""
    num_heads: int | None
    """Heads of queries; None if the attention does not say how many."""

    def rows(self) -> Tensor | None:
        """`values_V` on the device of the weights."""
        return None if self.values_V is None else self.values_V.to(self.value_RD.device, non_blocking=True)


GROWTH, NEGATIVE_SHARE, NORM = "value_output_growth", "value_output_negative_share", "value_output_norm"
SPECTRA = (NEGATIVE_SHARE, NORM)


class ValueOutputProbe(Part):
    """The growth and the spectra by each block's value and output weights, after the step of the optimizer."""

    METRICS = (GROWTH, *SPECTRA)

    def __init__(self, blocks: Sequence[Block], depth: int, parameters: ParameterProbe) -> None:
        self._parameters = parameters
        super().__init__(blocks, depth)

    def forget(self) -> None:
        super().forget()
        self._products_N3KK: dict[int, Tensor] = {}
        self._why_not: dict[str, dict[int, str]] = {name: {} for name in self.METRICS}
        """By metric and block."""

    def collect(self) -> Partials:
        found: dict[nn.Module | None, ValueOutput | str] = {}
        measured: dict[nn.Module | None, int] = {}
        for block in self._blocks:
            if block.attention not in found:  # several blocks may apply one module
                found[block.attention] = self._weights(block)
            weights, first = found[block.attention], measured.get(block.attention)
            if isinstance(weights, str):
                for name in self.METRICS:
                    self._why_not[name][block.number] = weights
                continue
            if GROWTH in self.wanted:
                self._of_layers[block.number] = self._growth(weights) if first is None else self._of_layers[first]
            if not self.wanted.isdisjoint(SPECTRA):
                self._keep_products(block, weights, first)
            measured.setdefault(block.attention, block.number)
        return super().collect()

    def _growth(self, weights: ValueOutput) -> Partials:
        growth = value_output_growth(
            weights.value_RD, weights.output_DU, values_V=weights.rows(), head_width=weights.head_width
        )
        return counted(GROWTH, growth[None])

    def _keep_products(self, block: Block, weights: ValueOutput, first: int | None) -> None:
        if first in self._products_N3KK:
            self._products_N3KK[block.number] = self._products_N3KK[first]
            return
        num_heads, why = weights.num_heads, ""
        if not num_heads or weights.output_DU.shape[1] % num_heads:
            why = f"the number of heads is unknown in {type(block.attention).__name__}"
        elif any(known.shape[2] != weights.output_DU.shape[1] // num_heads for known in self._products_N3KK.values()):
            why = "its heads have another width than the heads of earlier blocks"
        else:
            self._products_N3KK[block.number] = value_output_products(
                weights.value_RD, weights.output_DU, num_heads, values_V=weights.rows(), head_width=weights.head_width
            )
        for name in SPECTRA if why else ():
            self._why_not[name][block.number] = why

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        reading = super().finish(sums)
        if not self._products_N3KK:
            return reading
        products_LN3KK = stacked((self._products_N3KK.get(layer) for layer in range(self._depth)), torch.nan)
        # The first of these parts brings the matrices to the host; the others use its results.
        num_heads = {layer: len(products_N3KK) for layer, products_N3KK in self._products_N3KK.items()}
        spectra, nothing = _Spectra(num_heads), products_LN3KK.new_zeros(0)
        for name in (name for name in SPECTRA if name in self.wanted):
            raw = nothing if reading.heads else products_LN3KK
            reading.layers[name] = OnHost(raw, partial(spectra.of_layers, name))
            reading.heads[name] = OnHost(nothing, partial(spectra.of_heads, name))
        return reading

    def _weights(self, block: Block) -> ValueOutput | str:
        if block.attention is None:
            return NO_ATTENTION
        if callable(computed := getattr(block.attention, "value_output_weights", None)):
            return _computed(computed, block.attention)
        queries_and_keys = self._parameters.queries_and_keys(block)
        if isinstance(queries_and_keys, str):
            return queries_and_keys
        weights = value_and_output(block.attention, queries_and_keys)
        if isinstance(weights, str):
            where = f"in {type(block.attention).__name__}"
            return weights.format(where=where) if "{where}" in weights else f"{weights} {where}"
        return weights

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        return {name: why for name in self.METRICS if (why := self._why_missing(self._why_not[name]))}

    def _why_missing(self, why_not: Mapping[int, str]) -> str:
        missed = [block for block in self._blocks if block.number in why_not]
        return by_reason("not measured", missed, len(self._blocks), lambda block: why_not[block.number])


class _Spectra:
    """The spectra of all heads, decomposed once on the host."""

    def __init__(self, num_heads: Mapping[int, int]) -> None:
        self._num_heads = num_heads
        """By layer."""
        self._found: dict[str, Tensor] = {}

    def of_layers(self, name: str, products_LN3KK: Tensor) -> Tensor:
        if products_LN3KK.numel():
            self._found = dict(zip(SPECTRA, value_output_spectra(products_LN3KK), strict=True))
        layers_L = torch.full((len(self._found[name]),), torch.nan, dtype=torch.float64)
        for layer, num in self._num_heads.items():
            norm_N, found_N = self._found[NORM][layer, :num], self._found[name][layer, :num]
            if norm_N.isfinite().all():  # a head with NaN or infinite weights is not left out in silence
                layers_L[layer] = found_N.nanmean() if name == NEGATIVE_SHARE else found_N.amax()
        return layers_L

    def of_heads(self, name: str, nothing: Tensor) -> Tensor:
        return self._found[name]


def value_and_output(attention: nn.Module, queries_and_keys: Sequence[Slices]) -> ValueOutput | str:
    """The weights that make values and the output, or why they are unknown, with `{where}` if the place is not the end."""
    inner = [module for module in attention.modules() if isinstance(module, nn.MultiheadAttention)]
    if len(inner) == 1:
        return _of_multihead(inner[0])
    layers = [
        (name, module)
        for name, module in attention.named_modules()
        if OF_ANOTHER not in name.split(".") and (is_linear(module) or base_of(module) is not module)
    ]
    packed = {of.projection: of for of in queries_and_keys if of.projection is not None and of.parameter.ndim == 2}
    makers = [*packed, *(module for name, module in layers if kind_of(name) in VALUES)]
    if any(kind_of(name) in LATENT_KEYS_AND_VALUES for name, _ in attention.named_modules()):
        return "values are made in two steps (latent attention)"
    if len(makers) != 1:
        return f"expected one value projection {{where}}, found {len(makers)}"
    maker, output = makers[0], _output(layers)
    if isinstance(output, str):
        return output
    if why := _why_unreadable(maker) or _why_unreadable(output):
        return why
    value_RD, output_DU = _weight(maker), _weight(output)
    values_V = None
    if maker in packed:
        is_value_R = torch.ones(len(value_RD), dtype=torch.bool, device="cpu")
        for start, stop in packed[maker].stretches:
            is_value_R[start:stop] = False
        values_V = is_value_R.nonzero()[:, 0]
        start, num = int(values_V[0]) if len(values_V) else 0, len(values_V)
        if is_value_R[start : start + num].all():
            value_RD, values_V = value_RD.narrow(0, start, num), None
    return _checked(value_RD, output_DU, values_V, attention)


def _computed(weights: Callable[[], tuple[Tensor, Tensor]], attention: nn.Module) -> ValueOutput | str:
    if any(map(is_sharded, attention.parameters())):
        return "the value or output weights are sharded (DTensor)"
    with torch.no_grad():
        value_RD, output_DU = weights()
    for weight in (value_RD, output_DU):
        if type(weight) is not Tensor or weight.ndim != 2 or not weight.is_floating_point():
            return f"value_output_weights() returned a {type(weight).__name__}, and not two plain matrices of floats"
    return _checked(value_RD, output_DU, None, attention)


def _of_multihead(attention: nn.MultiheadAttention) -> ValueOutput | str:
    packed, separate = held(attention, "in_proj_weight"), held(attention, "v_proj_weight")
    output, value_RD = attention.out_proj, separate if packed is None else packed
    if why := _why_parametrized(attention) or _why_unreadable(output) or _why_unusual(value_RD):
        return why
    assert value_RD is not None  # or it were unusual
    if packed is not None:
        value_RD = packed.narrow(0, 2 * attention.embed_dim, attention.embed_dim)
    return _checked(value_RD, _weight(output), None, attention)


def _checked(value_RD: Tensor, output_DU: Tensor, values_V: Tensor | None, attention: nn.Module) -> ValueOutput | str:
    num_values = len(value_RD) if values_V is None else len(values_V)
    (width, num_repeated), head_width = output_DU.shape, None
    holders = [of for module in attention.modules() for of in (module, getattr(module, "config", None))]
    num_heads, known_width = (number_of(holders, names) for names in (NUM_HEADS, HEAD_WIDTH))
    if num_heads and known_width and num_heads * known_width != num_repeated:
        num_heads = None
    if value_RD.shape[1] != width or not num_values or num_repeated % num_values:
        return (
            f"the values ({num_values} of width {value_RD.shape[1]}) do not fit the output layer {(*output_DU.shape,)}"
        )
    if num_repeated != num_values:
        head_width = number_of(holders, HEAD_WIDTH)
        head_width = head_width or (num_heads and num_repeated // num_heads)
        fits = num_heads is None or (head_width and num_heads * head_width == num_repeated)
        if not head_width or not fits or num_values % head_width:
            return "queries share values, and the width of a head is unknown"
    if value_RD.device != output_DU.device:
        return "the value and output weights are on two devices"
    if num_heads is None and head_width:
        num_heads = num_repeated // head_width
    return ValueOutput(value_RD, output_DU, values_V, head_width, num_heads)


def _output(layers: Sequence[tuple[str, nn.Module]]) -> nn.Module | str:
    """The layer with the name of an output layer, or else the only one that is no other projection."""
    outer = dict(_outermost(layers))
    found = [module for name, module in outer.items() if kind_of(name.removesuffix(".0")) in OUTPUTS]
    others = [module for name, module in outer.items() if kind_of(name) not in NOT_OUTPUTS]
    for candidates in (found, others):
        if len(candidates) == 1:
            return candidates[0]
    return f"expected one output layer {{where}}, found {len(found or others)}"


def _outermost(layers: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Without the parts of adapters."""
    names = [name for name, _ in layers]
    for name, module in layers:
        if not any(name.startswith(f"{other}.") for other in names):
            yield name, module


def _why_unreadable(layer: nn.Module) -> str | None:
    if why := _why_parametrized(layer):
        return why
    if base_of(layer) is not layer or sum(parameter.ndim > 1 for parameter in layer.parameters()) > 1:
        return "an adapter adds to the value or output weights"
    return _why_unusual(held(layer, "weight"))


def _why_parametrized(layer: nn.Module) -> str | None:
    return "the value or output weights are parametrized" if "parametrizations" in layer._modules else None


def _why_unusual(weight: Tensor | None) -> str | None:
    if not isinstance(weight, nn.Parameter):  # FSDP keeps views of memory that it frees
        return "a value or output layer has no parameter of its own"
    if is_sharded(weight):
        return "the value or output weights are sharded (DTensor)"
    if weight.ndim != 2:
        return "the value or output weights are sharded or flattened"
    if not weight.is_floating_point() or type(weight.data) is not Tensor:
        return "the value or output weights are quantized"
    return None


def _weight(layer: nn.Module) -> Tensor:
    weight = held(layer, "weight")
    assert weight is not None  # _why_unreadable has checked
    return weight if output_axis(layer) == 0 else weight.T
