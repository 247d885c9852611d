"""What other tools call a number, and what it is called here: a scalar, or one layer of a metric."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tsemon.catalogue import LAYERED, SCALARS
from tsemon.errors import InvalidArgument
from tsemon.tools.importing.source import Notes, digest
from tsemon.wire import MAX_BLOCKS, MAX_METRICS, METRIC_NAME

VERSION = 1
"""Another number wherever the same source would be named differently: it is then imported anew."""

BUILT_IN = re.compile(
    r"(?:^|(?<=[./]))(?:(?:layers?|blocks?|resblocks|layer_?stack)[._/-]?|h[./])(?P<layer>[0-9]+)(?=$|[._/:-])"
)
"""One part of a name, as in `layers.12.attn.entropy`, `encoder/block_3/norm`, `transformer.h.0.mlp` and `entropy/layer7`."""

SAME: Mapping[str, str] = {
    **dict.fromkeys(("train/loss", "train_loss", "training_loss", "loss/train", "train.loss"), "loss"),
    **dict.fromkeys(("lr", "train/lr", "train/learning_rate", "train.lr"), "learning_rate"),
}
"""Names of others that surely mean what the catalogue means by its own."""

OWN = "tsemon/"
"""Before the names that tsemon's own mirrors write."""
ELSEWHERE = "imported/"
"""Before names that the catalogue has given to measures of its own, which these need not be."""

_SPARSEST = 16
"""Layers of which fewer than one in so many have a value are a misread number, such as a width or an id."""


class Place(NamedTuple):
    """Where the values of one name go."""

    metric: str
    entry: int | None
    """Of the metric's array; None for a scalar."""
    band: int
    """Frames hold so many metrics; those beyond go into further ones of the same step."""


@dataclass(frozen=True)
class Naming:
    """What the user says of names."""

    patterns: tuple[str, ...] = ()
    """Tried before the built-in one. `{layer}` stands for the number, `{name}` for what the metric is called."""
    same: tuple[tuple[str, str], ...] = ()
    """Names, as they are or after the fold, and what they are to be called."""

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            _compiled(pattern)
        for name, metric in self.same:
            if not re.fullmatch(METRIC_NAME, metric):
                raise InvalidArgument(
                    f"--map {name}={metric}: a metric has letters, digits and _./:- only, at most 128 of them, and begins "
                    "with a letter or _"
                )


@dataclass(frozen=True)
class Plan:
    """Where all names of a run go."""

    places: Mapping[str, Place]
    num_blocks: int
    lengths: Mapping[str, int]
    """Entries of each layered metric."""

    def num_metrics(self) -> int:
        return len({(place.metric, place.entry is None) for place in self.places.values()})


class _Fold(NamedTuple):
    metric: str
    layer: int | None


def plan_names(names: Iterable[str], naming: Naming, notes: Notes, *, most_in_frame: int) -> Plan:
    """Where each name goes. Names come in the order in which the source has them: more at its end change no place."""
    folds: dict[str, _Fold] = {}
    patterns = [_compiled(pattern) for pattern in naming.patterns]
    for name in names:
        fold = _fold(name, patterns, notes)
        if fold is not None:
            folds[name] = fold
    folds = _without_misread(folds, notes)
    places: dict[str, Place] = {}
    taken: dict[tuple[str, int | None], str] = {}
    order: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for name, (folded, layer) in folds.items():
        metric = _called(name, folded, layer, naming, notes)
        entry = layer
        if (
            layer is not None
            and metric in LAYERED
            and LAYERED[metric].axis == "activation"
            and not name.startswith(OWN)
        ):
            entry = layer + 1  # 0 is what enters the first block
        if (other := taken.setdefault((metric, entry), name)) != name:
            apart = f"{metric[:119]}_{digest(name, length=8)}"
            notes.remark(
                f"{name[:60]} is called {apart} here, since {other[:60]} is called {metric}; --map gives it another name"
            )
            metric = apart
            taken[metric, entry] = name
        metrics = order[layer is None]
        if metric not in metrics and sum(map(len, order)) >= MAX_METRICS:
            notes.leave_out(f"metrics beyond {MAX_METRICS}", name)
            continue
        places[name] = Place(metric, entry, metrics.setdefault(metric, len(metrics)) // most_in_frame)
    return Plan(places, *_lengths(places))


def _lengths(places: Mapping[str, Place]) -> tuple[int, dict[str, int]]:
    """How many blocks there are, and how many entries each metric has."""
    reach: dict[str, int] = {}
    for metric, entry, _ in places.values():
        if entry is not None:
            reach[metric] = max(reach.get(metric, 0), entry + 1)
    extra = {metric: int(metric in LAYERED and LAYERED[metric].axis == "activation") for metric in reach}
    num_blocks = max((reach[metric] - extra[metric] for metric in reach), default=0)
    return num_blocks, {metric: num_blocks + extra[metric] for metric in reach}


def _fold(name: str, patterns: Sequence[re.Pattern[str]], notes: Notes) -> _Fold | None:
    if name.startswith(OWN):
        metric, _, number = name.removeprefix(OWN).rpartition("/")
        if metric in LAYERED and re.fullmatch("[0-9]{1,5}", number):
            return _Fold(metric, int(number))
        return _Fold(name.removeprefix(OWN) if name.removeprefix(OWN) in SCALARS else name, None)
    for pattern in patterns:
        if found := pattern.fullmatch(name):
            metric = found["name"] if "name" in pattern.groupindex else _without(name, *found.span("layer"))
            return _layered(name, metric, found["layer"], notes)
    if found := BUILT_IN.search(name):
        return _layered(name, _without(name, *found.span()), found["layer"], notes)
    return _Fold(name, None)


def _layered(name: str, metric: str, number: str, notes: Notes) -> _Fold | None:
    digits = number.lstrip("0") or "0"
    if len(digits) > 9 or int(digits) >= MAX_BLOCKS:
        notes.leave_out(f"layers beyond the {MAX_BLOCKS} that a run may have", name)
        return None
    return _Fold(metric or "layer", int(digits))


def _without(name: str, start: int, end: int) -> str:
    """The name without a part of it, and with one separator where there were two."""
    before, after = name[:start].rstrip("._/:-"), name[end:].lstrip("._/:-")
    separator = name[len(before) : len(before) + 1] if before and after else ""
    return before + separator + after


def _without_misread(folds: Mapping[str, _Fold], notes: Notes) -> dict[str, _Fold]:
    """Without the names of layers so far beyond the others that their arrays would hold almost nothing."""
    layers = sorted({layer for _, layer in folds.values() if layer is not None})
    while layers and layers[-1] >= 64 + _SPARSEST * len(layers):
        layers.pop()
    last = layers[-1] if layers else -1
    for name, (_, layer) in folds.items():
        if layer is not None and layer > last:
            notes.leave_out("layers far beyond all others", name)
    return {name: fold for name, fold in folds.items() if fold.layer is None or fold.layer <= last}


def _called(name: str, folded: str, layer: int | None, naming: Naming, notes: Notes) -> str:
    said = dict(naming.same)
    if (chosen := said.get(name) or said.get(folded)) is not None:
        return chosen
    if layer is None and name in SAME:
        return SAME[name]
    own = SCALARS if layer is None else LAYERED
    is_same = name.startswith(OWN) or folded in ("loss", "learning_rate")
    metric = _clean(folded)
    if metric in own and not is_same:
        notes.remark(
            f"{folded} is called {ELSEWHERE}{metric} here, since tsemon measures a {metric} of its own; "
            f"--map {folded}={metric} says that they are the same"
        )
        return ELSEWHERE + metric
    return metric


def _clean(name: str) -> str:
    """As a metric may be called."""
    clean = re.sub(r"[^A-Za-z0-9_./:-]+", "_", name)
    if not re.match(r"[A-Za-z_]", clean):
        clean = f"_{clean}"
    return clean if len(clean) <= 128 else f"{clean[:111]}_{digest(name, length=16)}"


def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of the user's: with `{layer}` and `{name}`, or a regular expression with groups of these names."""
    text = pattern
    if "(?P<" not in pattern:
        parts = re.split(r"(\{layer\}|\{name\})", pattern)
        groups = {"{layer}": "(?P<layer>[0-9]+)", "{name}": "(?P<name>.+)"}
        text = "".join(groups.get(part) or re.escape(part) for part in parts)
    try:
        compiled = re.compile(text, re.DOTALL)
    except re.error as error:
        raise InvalidArgument(f"--pattern {pattern!r} is no pattern: {error}") from None
    if "layer" not in compiled.groupindex:
        raise InvalidArgument(
            f"--pattern {pattern!r} does not say where the layer's number is; write it as in 'layers.{{layer}}.{{name}}'"
        )
    return compiled
