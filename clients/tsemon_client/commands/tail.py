"""`tsemon tail`: a run as it goes on."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tsemon.errors import UNANSWERED, ServerRefused, UnknownMetric, UnknownRun
from tsemon.terminal import ago, count, examples, number, print_json_line, printable, say, terminal
from tsemon_client.commands.alerts import state_of, step_of, told_of, told_step_of
from tsemon_client.commands.completion import complete_metric, complete_run
from tsemon_client.commands.drawing import NO_VALUE, NOT_FINITE, bars_for, fitted, layer_groups, mean, sparkline
from tsemon_client.commands.finding import find_run
from tsemon_client.commands.incidents import state_of as state_of_incident
from tsemon_client.commands.listening import looks
from tsemon_client.commands.listing import OVERLAP, SEVERITY_STYLES
from tsemon_client.commands.options import DEFAULT_SERVER, LOOK, Server, connect
from tsemon_client.commands.runs import OPEN, STYLES

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.text import Text

    from tsemon_client import Client
    from tsemon_client.models import Alert, Heatmap, Incident, RunDetail, Series

app = typer.Typer()

LABEL_WIDTH = 26
VALUE_WIDTH = 11
MAX_ALERTS = 6
"""Maximum number of incidents, and of alerts without an incident, that are shown."""
MAX_PAST_ALERTS = 50
"""That are over and known of."""
MAX_INCIDENTS = 50
MAX_SAMPLES = 2000
"""Between two looks. A heat map has no more columns."""


@app.command(
    rich_help_panel=LOOK,
    epilog=examples(
        "tsemon tail  # the run that was last seen",
        "tsemon tail vision/vit-80 --metric attention_entropy --groups 6",
        "tsemon tail vision/vit-80 --once  # as it is now",
        "tsemon tail vision/vit-80 | grep incident=",
        "tsemon tail vision/vit-80 --json | jq .loss",
    ),
)
def tail(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run: its name, project/name or id (default: the run that was last seen).",
            autocompletion=complete_run,
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            "-m",
            help="A metric with a value per layer. Repeatable (default: token_diversity if recorded).",
            autocompletion=complete_metric,
        ),
    ] = None,
    groups: Annotated[int, typer.Option(help="Groups that the layers are shown in.", min=1, max=64)] = 4,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Samples to begin with, in a pipe.", min=0, max=500)] = 10,
    once: Annotated[bool, typer.Option("--once", help="Show the run as it is now, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON document per line, for each sample, incident and alert.")
    ] = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Watch a run: its loss, its layers in groups, its incidents.

    It ends with the run, or at Ctrl-C. Without a terminal it prints a line for
    each sample, as name=value, and for each incident or alert that opens or
    changes. A group shows the mean of its measured layers; x, or nan in a
    pipe, marks values that are not finite.
    """
    console = terminal()
    with connect(server, retries=0) as client, suppress(KeyboardInterrupt):
        watched = Watched(client, _chosen(client, run), tuple(metric or ()), groups)
        if console is None or as_json:
            _print_lines(watched, lines, once, as_json)
        else:
            _show(watched, console, once)


def _chosen(client: Client, name: str | None) -> str:
    if name is not None:
        return find_run(client, name).run_id
    for run in client.runs(limit=1):
        return run.run_id
    raise UnknownRun("the service has no runs yet")


@dataclass
class Watched:
    """A run, and what there is to see of it."""

    client: Client
    run_id: str
    asked: tuple[str, ...]
    """Metrics; empty to show the one that the server suggests."""
    num_groups: int
    run: RunDetail | None = None
    chosen: str | None = None
    """Metric that the server suggested at first, kept so that the picture stays the same."""
    loss: Series | None = None
    layers: list[Heatmap] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    """Those that are open, and of the others the newest and those that have ended since."""
    incidents: list[Incident] = field(default_factory=list)
    """The newest ones, newest first."""
    measured: dict[str, set[int]] = field(default_factory=dict)
    """Of each metric the layers that ever had a finite value. In the others it is not measured."""

    def look(self, from_step: int | None = None, points: int = 200) -> None:
        """Ask for all of it anew. Raises UnknownRun where it was deleted, UnknownMetric, ServerUnreachable."""
        # First: whoever is told of an alert is told of its sample, too.
        self._look_at_alerts()
        run = self.run = self.client.run(self.run_id)
        if self.is_over:  # maybe only since then, and its alerts end with it
            self._look_at_alerts()
        recorded = run.metrics
        self.loss = None
        if "loss" in recorded.scalars:
            self.loss = self.client.series(self.run_id, "loss", from_step=from_step, points=max(points, 3))
        # Before the first frame, nothing is known of what the run will have.
        if self.chosen not in recorded.layers:
            self.chosen = run.default_metric
        wanted = self.asked or [self.chosen]
        known = [name for name in wanted if name in recorded.layers]
        missing = [name for name in self.asked if name not in recorded.layers]
        if missing and run.latest is not None:
            names = ", ".join(recorded.layers) or "none"
            raise UnknownMetric(f"the run has no metric {missing[0]!r} with a value per layer; it has {names}")
        self.layers = [
            self.client.heatmap(self.run_id, name, from_step=from_step, columns=points, extremes=True) for name in known
        ]
        for heat in self.layers:
            if heat.metric not in self.measured:  # a layer may have broken long before what is shown
                whole = heat if from_step is None else self.client.heatmap(self.run_id, heat.metric, columns=1)
                self.measured[heat.metric] = _known_layers(whole)
            self.measured[heat.metric] |= _known_layers(heat)

    def _look_at_alerts(self) -> None:
        over = [alert for alert in self.alerts if alert.state == "resolved"]
        newest = max((alert.updated_at for alert in over), default=None)
        is_open = self.client.alerts(run_id=self.run_id, state=OPEN).all()
        ended = self.client.alerts(
            run_id=self.run_id,
            state="resolved",
            since=newest and newest - OVERLAP,
            limit=None if newest else MAX_PAST_ALERTS,
        ).all()
        # What ended between the two questions is in both answers.
        known = {alert.alert_id: alert for alert in [*is_open, *over[:MAX_PAST_ALERTS], *ended]}
        self.alerts = sorted(known.values(), key=lambda alert: alert.updated_at, reverse=True)
        with suppress(ServerRefused):  # an older server has no incidents
            self.incidents = self.client.incidents(run_id=self.run_id, limit=MAX_INCIDENTS).all()

    def groups_of(self, heat: Heatmap) -> Iterator[tuple[range, list[float | None]]]:
        """Each group of layers, and per column its mean; None where one of them is not finite, which a mean would hide."""
        bad = heat.nonfinite or [[value is None for value in values] for values in heat.values]
        for group in self._groups(heat):
            layers = [layer for layer in group if layer in self.measured[heat.metric]]
            means = [
                None if any(bad_here[layer] for layer in layers) else mean([values[layer] for layer in layers])
                for values, bad_here in zip(heat.values, bad, strict=True)
            ]
            yield group, means

    def _groups(self, heat: Heatmap) -> list[range]:
        """Neighbouring layers of one stack."""
        assert self.run is not None
        spans = self.run.depth.spans(heat.layers)
        if spans[-1].stop != heat.layers:  # of an attempt with another model
            spans = [range(heat.layers)]
        num_groups = math.ceil(self.num_groups / len(spans))
        return [span[g.start : g.stop] for span in spans for g in layer_groups(len(span), num_groups)]

    def group_name(self, group: range, heat: Heatmap) -> str:
        """Such as "0-2", or "decoder 0-2" in a model with several stacks."""
        assert self.run is not None
        first, last = (self.run.depth.label(layer, heat.layers) for layer in (group[0], group[-1]))
        return first if len(group) == 1 else f"{first}-{last.rpartition(' ')[2]}"

    @property
    def is_over(self) -> bool:
        return self.run is not None and self.run.state != "running"


def _known_layers(heat: Heatmap) -> set[int]:
    return {layer for values in heat.values for layer, value in enumerate(values) if value is not None}


# --- on a terminal ---


def _show(watched: Watched, console: Console, once: bool) -> None:
    from rich.live import Live

    if once:
        watched.look(points=_width(console))
        console.print(_picture(watched, console, ""))
        return
    # Else the cursor would stay hidden.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for trouble in _looks(watched, lambda: watched.look(points=_width(console))):
            if watched.run is not None:
                live.update(_picture(watched, console, trouble), refresh=True)


def _looks(watched: Watched, look: Callable[[], None]) -> Iterator[str]:
    """What is wrong, after each look; until the run is over. While the service does not answer, it is asked again."""
    for _ in looks(watched.client, [watched.run_id]):
        trouble = ""
        try:
            look()
        except UNANSWERED as error:
            trouble = str(error)
        yield trouble
        if watched.is_over and not trouble:
            return


def _width(console: Console) -> int:
    return max(console.width - LABEL_WIDTH - VALUE_WIDTH - 2, 10)


def _picture(watched: Watched, console: Console, trouble: str) -> Group:
    from rich.console import Group
    from rich.text import Text

    assert watched.run is not None
    width, bars = _width(console), bars_for(console)
    lines = [*_header(watched.run, trouble), Text()]
    if watched.loss and watched.loss.step:
        # A mean over many steps would hide the one where it was not.
        finite = [None if bad else value for value, bad in zip(watched.loss.mean, watched.loss.nonfinite, strict=True)]
        lines.append(_curve("loss", finite, width, bars, None, NOT_FINITE))
    for heat in watched.layers:
        lines.append(Text.assemble((printable(heat.metric), "bold"), (_below_the_band(watched.run, heat), "yellow")))
        known = [value for values in heat.values for value in values if value is not None]
        is_log = _is_log(heat.metric, known)
        ends = (min(known), max(known)) if known else None
        for group, means in watched.groups_of(heat):
            name = f"  layer{'s' if len(group) > 1 else ''} {watched.group_name(group, heat)}"
            is_measured = not watched.measured[heat.metric].isdisjoint(group)
            gap = NOT_FINITE if is_measured else NO_VALUE
            lines.append(_curve(name, means, width, bars, ends, gap, is_log=is_log))
    if watched.run.latest is None:
        lines.append(Text("no samples yet", "dim"))
    lines.append(Text())
    lines += _incident_lines(watched, max(console.height - len(lines) - 1, 1))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def _header(run: RunDetail, trouble: str) -> Iterator[Text]:
    from rich.text import Text

    condition = run.condition or run.state
    heard = ago(run.updated_at, datetime.now(UTC))
    yield Text.assemble(
        (f"{printable(run.project)}/{printable(run.run)}", "bold"),
        "  ",
        (condition, STYLES[condition]),
        f"  step {count(run.process_step if run.process_step is not None else run.last_step)}",
        f"  attempt {run.attempt}" if run.attempt > 1 else "",
        (f"  heard of {heard} ago", "dim"),
        (f"  {trouble}", "bold red") if trouble else "",
    )
    others = {name: value for name, value in (run.latest.scalars if run.latest else {}).items() if name in BESIDE}
    if others:
        yield Text("  ".join(f"{name} {number(value)}" for name, value in others.items()), "dim")


def _below_the_band(run: RunDetail, heat: Heatmap) -> str:
    """The block that is farthest below the range of healthy runs at the newest step; empty if no block is below."""
    from tsemon_answers.healthy import farthest_below

    layer = farthest_below(heat.metric, heat.values[-1]) if heat.values and len(run.stacks) < 2 else None
    if layer is None:
        return ""
    block = layer - (heat.layers - run.num_blocks)  # the first state is the input of the first block
    return f"  below the healthy band, {'the input' if block < 0 else f'block {block}'}"


BESIDE = ("learning_rate", "total_grad_norm", "total_param_norm", "update_alignment", "overhead_ratio")
"""Numbers of a run that its second line shows."""


def _is_log(metric: str, values: Sequence[float]) -> bool:
    """True if the catalogue has a log scale for the metric, and all values have a logarithm."""
    from tsemon.catalogue import LAYERED

    return metric in LAYERED and LAYERED[metric].log_scale and min(values, default=0.0) > 0


def _curve(
    name: str,
    values: Sequence[float | None],
    width: int,
    bars: str,
    ends: tuple[float, float] | None,
    gap: str,
    *,
    is_log: bool = False,
) -> Text:
    from rich.text import Text

    heights, (low, high) = fitted(values, width), ends or (None, None)
    newest = values[-1] if values else None
    if is_log and ends:
        low, high = map(math.log10, ends)
        heights = [None if value is None else math.log10(value) for value in heights]
    curve = sparkline(heights, low=low, high=high, bars=bars, gap=gap)
    is_bad = bool(values) and newest is None and gap == NOT_FINITE
    value = ("not finite", "bold red") if is_bad else (number(newest), "")
    return Text.assemble(
        f"{name:<{LABEL_WIDTH}}", (f"{curve:<{width}}", "cyan"), (f" {value[0]:>{VALUE_WIDTH}}", value[1])
    )


class Shown(NamedTuple):
    """An incident, or an alert that belongs to none."""

    is_over: bool
    is_alert: bool
    is_pending: bool
    severity: str
    state: tuple[str, str]
    text: str

    @property
    def order(self) -> tuple[bool, bool, bool, int]:
        """Open ones come first."""
        return self.is_over, self.is_alert, self.is_pending, [*SEVERITY_STYLES].index(self.severity)


def _incident_lines(watched: Watched, room: int) -> Iterator[Text]:
    from rich.text import Text

    alerts = [alert for alert in watched.alerts if alert.incident_id is None]
    found = sorted([*map(_shown_incident, watched.incidents), *map(_shown_alert, alerts)], key=lambda one: one.order)
    if not found:
        yield Text("no incidents", "green")
        return
    shown = found[: min(room, MAX_ALERTS)]
    width = max(len(one.state[0]) for one in shown)
    for one in shown:
        state, style = one.state
        yield Text.assemble(
            (f"{state:<{width}} ", style),
            (f"{one.severity:<8} ", "dim" if one.is_over else SEVERITY_STYLES[one.severity]),
            printable(one.text),
            style="dim" if one.is_over else "",
        )
    hidden = len(found) - len(shown)
    if hidden:
        yield Text(f"and {hidden} more: tsemon incidents --run {watched.run_id}", "dim")


def _shown_incident(one: Incident) -> Shown:
    """The cause and its place; then as much as there is room for."""
    place = f"{one.where}, " if one.where else ""
    also = f"; also fired: {', '.join(one.alerts[1:])}" if len(one.alerts) > 1 else ""
    text = f"{one.rule}  {place}since step {count(one.left_step)}  {_first_clause(one.summary)}{also}"
    return Shown(one.state != "open", False, False, one.severity, state_of_incident(one), text)


def _shown_alert(one: Alert) -> Shown:
    text = f"{one.rule}  step {count(step_of(one))}  {_first_clause(one.summary)}"
    return Shown(one.state == "resolved", True, one.state == "pending", one.severity, state_of(one), text)


def _first_clause(summary: str) -> str:
    """What is wrong; its numbers fill three lines, and `tsemon alerts` has them."""
    return summary.partition(": ")[0].removesuffix(".")


# --- without one ---


class Lines:
    """Each sample once, in step order, and each change of an incident or alert."""

    def __init__(self, watched: Watched, num_first: int, as_json: bool) -> None:
        self._watched, self._num_first, self._as_json = watched, num_first, as_json
        self._told: dict[str, tuple[str, datetime]] = {}
        self._told_incidents: dict[str, tuple[str, str, str]] = {}
        self._attempt: int | None = None
        self._next_step = 0

    def look(self) -> None:
        watched = self._watched
        run = watched.client.run(watched.run_id)
        is_first = self._attempt is None
        if is_first:
            self._next_step = self._first_step(run)
        elif run.attempt != self._attempt:
            self._next_step = run.attempts[-1].resume_step or 0  # it goes on from there
        self._attempt = run.attempt
        watched.look(from_step=self._next_step, points=MAX_SAMPLES)

    def _first_step(self, run: RunDetail) -> int:
        """From about where the first samples are that are wanted: how dense they are, the whole run says."""
        if run.last_step is None:
            return 0
        steps_per_frame = (run.last_step + 1) / max(run.num_frames, 1)
        return max(0, run.last_step - math.ceil(3 * (self._num_first + 1) * steps_per_frame))

    def tell(self) -> None:
        last_step = self._watched.run.last_step if self._watched.run else None
        # A sample that came during the look may lack the series that were asked first. The next look, if any, has all of it.
        samples = [one for one in _samples(self._watched) if last_step is not None and one["step"] <= last_step]
        if self._num_first >= 0:
            samples, self._num_first = samples[max(len(samples) - self._num_first, 0) :], -1
            self._next_step = self._next_step if last_step is None else last_step + 1
        for sample in samples:
            print_json_line(sample) if self._as_json else print(_as_line(sample), flush=True)
            self._next_step = max(self._next_step, sample["step"] + 1)
        for one in reversed(self._watched.incidents):
            told = state_of_incident(one)[0], one.severity, one.rule
            if self._told_incidents.get(one.incident_id) != told:
                self._told_incidents[one.incident_id] = told
                line = {"incident": one.model_dump(mode="json")}
                print_json_line(line) if self._as_json else print(_incident_line(one), flush=True)
        for alert in reversed(self._watched.alerts):
            if self._told.get(alert.alert_id) != told_of(alert):
                self._told[alert.alert_id] = told_of(alert)
                line = {"alert": alert.model_dump(mode="json")}
                print_json_line(line) if self._as_json else print(_alert_line(alert), flush=True)
        run = self._watched.run
        if run is not None and self._watched.is_over:
            end = {"run": run.state, "step": run.last_step}
            print_json_line(end) if self._as_json else print(f"run={run.state} step={run.last_step}", flush=True)


def _print_lines(watched: Watched, num_first: int, once: bool, as_json: bool) -> None:
    lines = Lines(watched, num_first, as_json)
    if once:
        lines.look()
        lines.tell()
        return
    is_troubled = False
    for trouble in _looks(watched, lines.look):
        if trouble and not is_troubled:
            say(f"tsemon: {trouble}; trying again", err=True)
        is_troubled = bool(trouble)
        if not trouble:
            lines.tell()


def _samples(watched: Watched) -> Iterator[dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    if watched.loss:
        for step, value in zip(watched.loss.step, watched.loss.mean, strict=True):
            by_step.setdefault(step, {"step": step})["loss"] = value
    for heat in watched.layers:
        for group, means in watched.groups_of(heat):
            name = watched.group_name(group, heat)
            for step, value in zip(heat.step, means, strict=True):
                by_step.setdefault(step, {"step": step}).setdefault(heat.metric, {})[name] = value
    for step in sorted(by_step):
        yield by_step[step]


def _as_line(sample: dict[str, Any]) -> str:
    parts = []
    for name, value in sample.items():
        if isinstance(value, dict):
            parts += [f"{name}.{group.replace(' ', '.')}={_word(one)}" for group, one in value.items()]
        else:
            parts.append(f"{name}={value if name == 'step' else _word(value)}")
    return " ".join(parts)


def _word(value: float | None) -> str:
    """What is not finite, or was not measured at this step, has no value to show."""
    return "nan" if value is None else number(value)


def _incident_line(one: Incident) -> str:
    words: dict[str, object] = {"severity": one.severity, "rule": one.rule}
    if one.blocks:
        words["blocks"] = "-".join(map(str, one.blocks))
    words |= {"since": one.left_step, "step": one.step}
    return _line("incident", state_of_incident(one)[0], words, one.summary)


def _alert_line(alert: Alert) -> str:
    words = {"severity": alert.severity, "rule": alert.rule, "step": told_step_of(alert)}
    return _line("alert", state_of(alert)[0], words, alert.summary)


def _line(kind: str, state: str, words: Mapping[str, object], summary: str) -> str:
    first = json.dumps(state) if " " in state else state
    quoted = json.dumps(summary, ensure_ascii=False)
    return (
        " ".join(f"{name}={value}" for name, value in {kind: first, **words}.items()) + f" summary={printable(quoted)}"
    )
