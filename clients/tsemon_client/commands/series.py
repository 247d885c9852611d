"""`tsemon series`."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tsemon.errors import InvalidArgument, UnknownMetric
from tsemon.terminal import Cell, Column, count, examples, number, print_csv, print_json, print_table, say, terminal
from tsemon_client.commands.completion import complete_metric, complete_run
from tsemon_client.commands.drawing import bars_for, fitted, is_ascii, plot, sparkline
from tsemon_client.commands.finding import find_run
from tsemon_client.commands.options import DEFAULT_SERVER, LOOK, AsCsv, AsJson, Server, check_formats, connect

if TYPE_CHECKING:
    from tsemon_client.models import Heatmap, RunDetail, Series

app = typer.Typer()

PLOT_HEIGHT = 14
AXIS_WIDTH = 11
COLUMNS = 200
"""Of a heat map, and so values in a line of it that a program reads."""


@app.command(
    rich_help_panel=LOOK,
    epilog=examples(
        "tsemon series demo/gpt  # what there is to ask for",
        "tsemon series demo/gpt loss",
        "tsemon series demo/gpt token_diversity  # a line for each layer",
        "tsemon series demo/gpt token_diversity --layer -1 --from 1000",
        "tsemon series demo/gpt loss --points 10000 --csv > loss.csv",
    ),
)
def series(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run: its name, project/name, or its id.", autocompletion=complete_run),
    ],
    metric: Annotated[
        str | None,
        typer.Argument(help="A metric; without it, the metrics of the run are listed.", autocompletion=complete_metric),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            "--layer",
            help='From 0; -1 is the last, -2 the one before it. In a model with several stacks also "decoder 3".',
        ),
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="From 0, for a metric that is recorded per head; needs --layer.", min=0)
    ] = None,
    from_step: Annotated[int | None, typer.Option("--from", help="The first step.", min=0)] = None,
    to_step: Annotated[int | None, typer.Option("--to", help="The last step.", min=0)] = None,
    attempt: Annotated[int | None, typer.Option(help="This attempt only.", min=1)] = None,
    points: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of points: 3 to 10,000, or 2,000 for all layers (default: what fits, or 1000).", min=3
        ),
    ] = None,
    table: Annotated[
        bool | None, typer.Option("--table/--plot", help="Numbers, or a curve (default: a curve on a terminal).")
    ] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Show one metric of a run over steps: a curve on a terminal, else a table.

    Without --layer, a metric with a value per layer has a line for each. Each
    point is a bucket of steps with its least, mean and largest value, so that
    a spike of one step is seen at any width. With --csv, the lines of all
    layers have a step, a layer and a value.
    """
    check_formats(as_json, as_csv)
    console = terminal()
    is_table = table if table is not None else console is None
    with connect(server) as client:
        found = client.run(find_run(client, run).run_id)
        if metric is None:
            _list_metrics(found, as_json, as_csv)
            return
        _check_is_recorded(metric, found)
        within: dict[str, Any] = {"from_step": from_step, "to_step": to_step, "attempt": attempt}
        if layer is None and metric in found.metrics.layers and metric not in found.metrics.scalars:
            if head is not None:
                raise InvalidArgument("expected --layer with --head: heads are counted within a layer")
            columns = COLUMNS if points is None else min(points, 2000)
            heat = client.heatmap(found.run_id, metric, **within, columns=columns)
            _show_layers(heat, found, is_table, as_json, as_csv)
            return
        width = (console.width if console else 80) - AXIS_WIDTH
        wanted = points or (1000 if is_table or as_json or as_csv else 2 * width)
        which = None if layer is None else _number(layer, found, metric)
        asked = client.series(found.run_id, metric, layer=which, head=head, **within, points=wanted)
    if as_json:
        print_json(asked.model_dump(mode="json"))
    elif as_csv:
        print_csv(BUCKET, _buckets(asked))
    elif not asked.step:
        say(f"{_title(asked, found)}: no samples{_in_range(from_step, to_step)}", err=True)
    elif is_table:
        rows = [[_step(step), *map(number, values), str(bad)] for step, *values, bad in _buckets(asked)]
        print_table([Column(name, right=True) for name in BUCKET], rows)
    else:
        _draw(asked, found, max(width, 10))


def _number(layer: str, run: RunDetail, metric: str) -> int:
    """Raises InvalidArgument, and UnknownLayer for a stack that the model does not have."""
    stack, _, index = layer.strip().rpartition(" ")
    try:
        return run.layer(metric, stack, int(index)) if stack else int(index)
    except ValueError:
        example = f" or {run.stacks[-1].name!r} and a number" if len(run.stacks) > 1 else ""
        raise InvalidArgument(f"--layer takes a number{example}, got {layer!r:.80}") from None


def _check_is_recorded(metric: str, run: RunDetail) -> None:
    """Raise UnknownMetric for one that the run has no frames for, though it has some of others."""
    recorded = [*run.metrics.scalars, *run.metrics.layers, *run.metrics.heads]
    if not recorded or metric in recorded:
        return
    close = difflib.get_close_matches(metric, recorded, n=1)
    why = f": {run.not_measured[metric]}" if metric in run.not_measured else ""
    hint = f"did you mean {close[0]!r}?" if close and not why else f"`tsemon series {run.run_id}` lists what it has"
    raise UnknownMetric(f"{run.project}/{run.run} has no {metric!r}{why}; {hint}")


BUCKET = ("step", "min", "mean", "max", "nonfinite")


def _buckets(asked: Series) -> list[tuple[int, float | None, float | None, float | None, int]]:
    return list(zip(asked.step, asked.min, asked.mean, asked.max, asked.nonfinite, strict=True))


def _step(step: int) -> str:
    """In a pipe a program may read it."""
    return str(step) if terminal() is None else count(step)


def _in_range(from_step: int | None, to_step: int | None) -> str:
    return "" if from_step is None and to_step is None else " in these steps"


def _title(asked: Series, run: RunDetail) -> str:
    where = "" if asked.layer is None else f", layer {run.layer_name(asked.metric, asked.layer)}"
    where += "" if asked.head is None else f", head {asked.head}"
    return f"{run.project}/{run.run}: {asked.metric}{where}"


def _draw(asked: Series, run: RunDetail, width: int) -> None:
    console = terminal()
    say(_title(asked, run))
    curves = asked.step, asked.min, asked.mean, asked.max
    lines = plot(*curves, width=width, height=PLOT_HEIGHT, in_ascii=is_ascii(console))
    if not lines:
        say("  no value is finite")
    least = min((value for value in asked.min if value is not None), default=0.0)
    most = max((value for value in asked.max if value is not None), default=0.0)
    labels = {0: most, PLOT_HEIGHT // 2: (least + most) / 2, PLOT_HEIGHT - 1: least}
    for index, line in enumerate(lines):
        label = number(labels[index]) if index in labels else ""
        if console:
            from rich.text import Text

            console.print(Text.assemble((f"{label:>{AXIS_WIDTH - 2}} ", "dim"), (line, "cyan")))
        else:
            say(f"{label:>{AXIS_WIDTH - 2}} {line}")
    first, last = count(asked.step[0]), count(asked.step[-1])
    say(f"{'':{AXIS_WIDTH - 1}}{first}{last:>{max(width - len(first), len(last) + 1)}}")
    newest = next((value for value in reversed(asked.mean) if value is not None), None)
    say(f"newest {number(newest)}, least {number(least)}, largest {number(most)}" if lines else "")
    num_bad = sum(asked.nonfinite)
    if num_bad:
        first_bad = next(step for step, bad in zip(asked.step, asked.nonfinite, strict=True) if bad)
        say(f"{num_bad:,} samples are not finite, the first about step {first_bad:,}")
    if asked.damaged:
        say(f"{asked.damaged:,} samples are damaged and left out")


def _show_layers(heat: Heatmap, run: RunDetail, is_table: bool, as_json: bool, as_csv: bool) -> None:
    if as_json:
        print_json(heat.model_dump(mode="json"))
        return
    if as_csv:
        samples = zip(heat.step, heat.values, strict=True)
        cells = ((step, layer, value) for step, values in samples for layer, value in enumerate(values))
        print_csv(("step", "layer", "value"), cells)
        return
    if not heat.step:
        say(f"{run.project}/{run.run}: {heat.metric}: no samples", err=True)
        return
    if is_table:
        names = [run.depth.label(layer, heat.layers) for layer in range(heat.layers)]
        columns = [Column("step", right=True), *(Column(name, right=True) for name in names)]
        print_table(
            columns, [[_step(step), *map(number, values)] for step, values in zip(heat.step, heat.values, strict=True)]
        )
        return
    say(f"{run.project}/{run.run}: {heat.metric}, steps {heat.step[0]:,} to {heat.step[-1]:,}")
    console = terminal()
    width = max((console.width if console else 80) - 44, 10)
    by_layer = list(zip(*heat.values, strict=True))
    known = [value for values in by_layer for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    rows: list[list[Cell]] = []
    for layer, values in enumerate(by_layer):
        curve = sparkline(fitted(values, width), low=low, high=high, bars=bars_for(console))
        name, block = run.depth.label(layer, heat.layers), (_block(run, heat, layer), "dim")
        rows.append([name, (curve, "cyan"), number(values[0]), number(values[-1]), block])
    print_table(
        [
            Column("layer", right=True),
            Column(f"from {number(low)} to {number(high)}"),
            Column("first", right=True),
            Column("newest", right=True),
            Column("block", spare=True),
        ],
        rows,
    )


def _block(run: RunDetail, heat: Heatmap, layer: int) -> str:
    """The name of its block; nothing if the run has had another model meanwhile."""
    found = run.depth.entry(layer, heat.layers)
    if found is None:
        return ""
    return "input" if found.block is None else run.blocks[found.block]


def _list_metrics(run: RunDetail, as_json: bool, as_csv: bool) -> None:
    metrics = run.metrics
    if as_json:
        print_json(metrics.model_dump(mode="json"))
        return
    rows = [
        *((name, "", "") for name in metrics.scalars),
        *((name, str(layers), "") for name, layers in metrics.layers.items()),
        *((name, str(blocks), str(heads)) for name, (blocks, heads) in metrics.heads.items()),
    ]
    if as_csv:
        print_csv(("metric", "layers", "heads"), rows)
    elif not rows:
        say(f"{run.project}/{run.run} has recorded nothing yet", err=True)
    else:
        cells: list[list[Cell]] = [list(row) for row in rows]
        print_table([Column("metric"), Column("layers", right=True), Column("heads", right=True)], cells)
