"""The newest values of runs as families of samples.

Legend: M metrics, L layers, C columns: heads, or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tsemon.catalogue import CATALOGUE, NOT_PLOTTED
from tsemon.stacks import Stacks
from tsemon_server.exposition.text import Family, FamilyKind, as_spelled, labels_of, number, sanitised
from tsemon_server.filling import filled
from tsemon_server.settings import MetricsSettings
from tsemon_server.store.ledger.alerts import FiringAlert
from tsemon_server.store.ledger.incidents import OpenIncident
from tsemon_server.store.live import LiveRun
from tsemon_server.store.series.packing import Values

Floats = NDArray[np.floating[Any]]

ALL = "*"
OF_RUNS: Mapping[str, tuple[FamilyKind, str]] = {
    "tsemon_run": ("info", "Names of a run, to join on run_id"),
    "tsemon_run_step": ("gauge", "Step of the newest frame"),
    "tsemon_run_process_step": ("gauge", "Step at which the training process is, sampled or not"),
    "tsemon_run_last_seen_timestamp_seconds": ("gauge", "When the run was last heard of"),
    "tsemon_run_stepped_timestamp_seconds": ("gauge", "When the training process was last heard to have moved on"),
    "tsemon_run_unevaluated_frames": (
        "gauge",
        "Stored frames that no rule has read: they came too late, or rules failed",
    ),
    "tsemon_run_nonfinite_values": ("gauge", "Values of the newest frame that should be finite and are not"),
}
OF_TROUBLE = {
    "tsemon_alert_firing": "1 per alert that fires",
    "tsemon_incident": "1 per open incident, with the rule and family of the likeliest cause and the worst severity",
}
RESERVED = frozenset(name.removeprefix("tsemon_run_") for name in OF_RUNS) | {"info"}
"""What no scalar of a run may be called: these are ours."""
NEVER_UNDEFINED = frozenset(
    {"loss", "total_grad_norm", "total_param_norm", "token_similarity", "hidden_rms", "hidden_max"}
)
"""Metrics whose NaN is trouble. That of others may say no more than that there was nothing to measure, as in the first
samples or for a block that has no such part. An infinity is trouble anywhere."""
AGGREGATES = {
    "min": "Least value over layers",
    "mean": "Mean over layers",
    "max": "Largest value over layers",
    "last": "Value of the last layer",
    "argmax": "Index of the layer with the largest value",
}

_TITLES = {metric.name: metric.title for metric in CATALOGUE}
_RANKS = {metric.name: rank for rank, metric in enumerate(CATALOGUE)}


@dataclass
class LeftOut:
    """What the limits did not allow, or names that do not do."""

    runs: int = 0
    series: int = 0
    scalars: int = 0


class Shown(NamedTuple):
    """What is shown of runs, and what is not."""

    families: dict[str, Family]
    left_out: LeftOut


TemplateKey = tuple[str, str, int, int, str]
Templates = dict[TemplateKey, str]
"""The lines of one metric of one run with places for the values: nearly all of a page is the same at each scrape."""


@dataclass
class _Page:
    """Samples as they are gathered."""

    room: int
    left_out: LeftOut = field(default_factory=LeftOut)
    lines: dict[str, list[str]] = field(default_factory=dict)
    about: dict[str, tuple[FamilyKind, str]] = field(default_factory=dict)

    def has_room(self, num_series: int) -> bool:
        """Take the room where there is as much."""
        if num_series > self.room:
            return False
        self.room -= num_series
        return True

    def add(self, name: str, lines: str, kind: FamilyKind, about: str) -> None:
        found = self.lines.get(name)
        if found is None:
            self.lines[name], self.about[name] = [lines], (kind, about)
        else:
            found.append(lines)

    def families(self) -> dict[str, Family]:
        return {name: Family(name, *self.about[name], "".join(lines)) for name, lines in self.lines.items()}


def shown(
    runs: Sequence[LiveRun],
    alerts: Iterable[FiringAlert],
    incidents: Iterable[OpenIncident],
    limits: MetricsSettings,
    templates: Templates,
) -> Shown:
    """Families of all runs. `templates` are those of the page before, and become those of this one."""
    page = _Page(limits.max_series)
    told: dict[str, list[str]] = {}
    for alert in alerts:
        told.setdefault(alert.run_id, []).append(f"tsemon_alert_firing{labels_of(alert._asdict())} 1\n")
    for incident in incidents:
        told.setdefault(incident.run_id, []).append(f"tsemon_incident{_labels_of_incident(incident)} 1\n")
    layered: list[tuple[int, str, Callable[[], None]]] = []
    used: Templates = {}
    for run in runs:
        _add_run(page, run, told.get(run.run_id, ()), limits, layered, templates, used)
    # The shallow ones first: a model of ten thousand layers does not take the room of all others.
    for num_series, _, add in sorted(layered, key=lambda entry: entry[:2]):
        if page.has_room(num_series):
            add()
        else:
            page.left_out.series += num_series
    templates.clear()
    templates.update(used)
    return Shown(page.families(), page.left_out)


def _add_run(
    page: _Page,
    run: LiveRun,
    told: Sequence[str],
    limits: MetricsSettings,
    layered: list[tuple[int, str, Callable[[], None]]],
    templates: Templates,
    used: Templates,
) -> None:
    if not page.has_room(len(OF_RUNS) + len(told)):
        page.left_out.runs += 1
        return
    run_id = run.run_id  # hexadecimal digits: there is nothing to escape
    labels = f'{{run_id="{run_id}"}} '
    values, num_nonfinite = _merged(run)
    _add_own(page, run, labels, num_nonfinite if run.newest else None)
    for line in told:
        name = line.partition("{")[0]
        page.add(name, line, "gauge", OF_TROUBLE[name])
    _add_scalars(page, run, labels, values["scalars"], limits.max_scalars)
    arrays = {**values["heads"], **values["layers"]}  # what has a value per layer is taken as it is
    chosen, left_out = _chosen(arrays, frozenset(), limits.max_scalars)
    page.left_out.series += len(AGGREGATES) * len(left_out)
    arrays = {name: arrays[name] for name in chosen if len(arrays[name])}
    num_digits = max(2, len(str(max(map(len, arrays.values()), default=1) - 1)))
    for stack, own in _by_stack(arrays, run.stacks):
        _add_aggregates(page, run, f"{labels[:-2]}{_label_of(stack)}}} ", own)
        for name, array in own.items():
            if name not in limits.layers and ALL not in limits.layers:
                continue
            key = (run_id, name, len(array), num_digits, stack)

            def add(key: TemplateKey = key, array: Floats = array) -> None:
                used[key] = templates.get(key) or _template(*key)
                lines = used[key] % tuple(_over_heads(array).tolist())
                lines = lines if np.isfinite(array).all() else as_spelled(lines)
                about = f"{_title(key[1], run)}, by layer"
                page.add(f"tsemon_layer_{sanitised(key[1])}", lines, "gauge", about)

            layered.append((len(array), run_id, add))


def _labels_of_incident(incident: OpenIncident) -> str:
    names = {name: str(getattr(incident, name)) for name in ("run_id", "incident_id", "rule", "family", "severity")}
    first, last = incident.first_block, incident.last_block
    if first is not None:
        names["blocks"] = f"{first}-{last}"
    return labels_of(names)


def _add_own(page: _Page, run: LiveRun, labels: str, num_nonfinite: int | None) -> None:
    names = labels_of({"run_id": run.run_id, "project": run.project, "run": run.run})
    page.add("tsemon_run", f"tsemon_run_info{names} 1\n", *OF_RUNS["tsemon_run"])
    for name, value in (
        ("tsemon_run_step", run.step),
        ("tsemon_run_process_step", run.process_step),
        ("tsemon_run_last_seen_timestamp_seconds", run.seen_at),
        ("tsemon_run_stepped_timestamp_seconds", run.stepped_at),
        ("tsemon_run_unevaluated_frames", run.num_skipped),
        ("tsemon_run_nonfinite_values", num_nonfinite),
    ):
        if value is not None:
            page.add(name, f"{name}{labels}{value!r}\n", *OF_RUNS[name])


def _add_scalars(page: _Page, run: LiveRun, labels: str, scalars: Mapping[str, Floats], most: int) -> None:
    names, left_out = _chosen(scalars.keys() - NOT_PLOTTED, RESERVED, most)
    page.left_out.scalars += len(left_out)
    for name in names:
        if not page.has_room(1):
            page.left_out.scalars += 1
            continue
        family = f"tsemon_run_{sanitised(name)}"
        page.add(family, f"{family}{labels}{number(float(scalars[name]))}\n", "gauge", _title(name, run))


def _add_aggregates(page: _Page, run: LiveRun, labels: str, arrays: Mapping[str, Floats]) -> None:
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, array in arrays.items():
        by_shape.setdefault(array.shape, []).append(name)
    for names in by_shape.values():
        values_MLC = np.stack([arrays[name] for name in names]).astype(np.float64)
        values_MLC = values_MLC.reshape(*values_MLC.shape[:2], -1)
        for name, row in zip(names, _aggregates(values_MLC), strict=True):
            is_known = [value is not None for value in row]
            if not page.has_room(sum(is_known)):
                page.left_out.series += sum(is_known)
                continue
            family, title = f"tsemon_layers_{sanitised(name)}_", _title(name, run)
            for (aggregate, about), value in zip(AGGREGATES.items(), row, strict=True):
                if value is not None:
                    full = family + aggregate
                    page.add(full, f"{full}{labels}{value:.9g}\n", "gauge", f"{about}: {title}")


def _aggregates(values_MLC: NDArray[np.float64]) -> list[tuple[float | None, ...]]:
    """A row for each metric, in the order of AGGREGATES, over the values that are finite; None where none is."""
    num_columns = values_MLC.shape[-1]
    flat = values_MLC.reshape(len(values_MLC), -1)
    last = values_MLC[:, -1]
    is_finite = np.isfinite(flat)
    if is_finite.all():
        argmax = flat.argmax(axis=1) // num_columns
        found = (flat.min(axis=1), flat.mean(axis=1), flat.max(axis=1), last.mean(axis=1), argmax)
        return list(zip(*(column.tolist() for column in found), strict=True))
    counts, last_counts = is_finite.sum(axis=1), np.isfinite(last).sum(axis=1)
    largest = np.where(is_finite, flat, -np.inf)
    total, last_total = (np.where(np.isfinite(x), x, 0).sum(axis=1) for x in (flat, last))
    columns = (
        np.where(is_finite, flat, np.inf).min(axis=1),
        total / np.maximum(counts, 1),
        largest.max(axis=1),
        last_total / np.maximum(last_counts, 1),
        largest.argmax(axis=1) // num_columns,
    )
    rows = zip(*(column.tolist() for column in columns), counts.tolist(), last_counts.tolist(), strict=True)
    return [
        (*of_all[:3], of_all[3] if num_last else None, of_all[4]) if num_finite else (None,) * len(AGGREGATES)
        for *of_all, num_finite, num_last in rows
    ]


def _merged(run: LiveRun) -> tuple[Values, int]:
    """What the run measured last, and how many values of its newest frame should be finite and are not.

    Of what several writers measured, the newest frame counts; it is filled with what it lacks, as rules do it: stages of
    a pipeline each measure their own blocks, and send NaN for those of the others.
    """
    empty: Values = {"scalars": {}, "layers": {}, "heads": {}}
    first, *rest = run.newest or [empty]
    for other in rest:
        first = {
            "scalars": {**other["scalars"], **first["scalars"]},
            "layers": filled(first["layers"], other["layers"]),
            "heads": filled(first["heads"], other["heads"]),
        }
    num_nonfinite = sum(
        int(np.isinf(array).sum()) + (_num_undefined(array, run.stacks) if name in NEVER_UNDEFINED else 0)
        for name, array in chain(*(found.items() for found in first.values()))
    )
    for other in run.others:
        first = {kind: {**other[kind], **first[kind]} for kind in first}
    return first, num_nonfinite


def _num_undefined(array: Floats, stacks: Stacks | None) -> int:
    """Count the NaN, except at the inputs of later stacks: DETR's decoder starts from zeros, which have no similarity."""
    is_undefined = np.isnan(array)
    if stacks is not None and is_undefined.shape == (stacks.num_states,):
        is_undefined[[span.start for span in stacks.spans(stacks.num_states)[1:]]] = False
    return int(is_undefined.sum())


def _chosen(names: Iterable[str], reserved: frozenset[str], most: int) -> tuple[list[str], list[str]]:
    """Those that are shown and those that are not: at most so many, the catalogue's first, and none that another one is
    written like."""
    taken = set(reserved)
    chosen: list[str] = []
    left_out: list[str] = []
    for name in sorted(names, key=lambda name: (_RANKS.get(name, len(_RANKS)), sanitised(name) != name, name)):
        is_free = len(chosen) < most and sanitised(name) not in taken
        (chosen if is_free else left_out).append(name)
        taken.add(sanitised(name))
    return chosen, left_out


def _over_heads(array: Floats) -> Floats:
    """One value per layer: the mean over the heads that have one."""
    if array.ndim == 1:
        return array
    is_known = ~np.isnan(array)
    total: Floats = np.where(is_known, array, 0).sum(axis=1, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return np.asarray(total / is_known.sum(axis=1))


def _by_stack(arrays: Mapping[str, Floats], stacks: Stacks | None) -> Iterator[tuple[str, Mapping[str, Floats]]]:
    """The name of each stack and its part of the arrays; no name and all of them if there is one stack."""
    if stacks is None or len(stacks.each) < 2:
        yield "", arrays
        return
    lengths = stacks.num_blocks, stacks.num_states
    spans = {name: stacks.spans(len(array)) for name, array in arrays.items() if len(array) in lengths}
    for place, stack in enumerate(stacks.each):
        yield stack.name, {name: arrays[name][own[place].start : own[place].stop] for name, own in spans.items()}


def _label_of(stack: str) -> str:
    return f",{labels_of({'stack': stack})[1:-1]}" if stack else ""


def _template(run_id: str, metric: str, num_layers: int, num_digits: int, stack: str) -> str:
    name, label = f"tsemon_layer_{sanitised(metric)}", _label_of(stack).replace("%", "%%")
    # Nine digits tell one float32 from any other.
    return "".join(f'{name}{{layer="{n:0{num_digits}}",run_id="{run_id}"{label}}} %.9g\n' for n in range(num_layers))


def _title(metric: str, run: LiveRun) -> str:
    return _TITLES.get(metric) or run.titles.get(metric, "A metric that is not tsemon's own")
