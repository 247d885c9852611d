"""`tsemon sub-step`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tsemon.errors import InvalidArgument, RunNotLive, TooSlow
from tsemon.terminal import count, examples, print_json, printable, say
from tsemon_client.commands.completion import complete_run
from tsemon_client.commands.finding import find_run
from tsemon_client.commands.options import DEFAULT_SERVER, LOOK, AsJson, Server, connect

if TYPE_CHECKING:
    from tsemon_client import Client
    from tsemon_client.models import RunDetail, Zoom

app = typer.Typer()

NUM_SAMPLES, MAX_GAP = 4, 5
"""Samples of a zoom, and the maximum number of steps from one to the next."""
OF_SAMPLES = "contained_faults"
"""Scalar that each sample has, but not a frame with losses alone."""
POLL_S = 1.0


@app.command(
    name="sub-step",
    rich_help_panel=LOOK,
    epilog=examples(
        "tsemon sub-step demo/gpt  # at the newest sample",
        "tsemon sub-step demo/gpt --zoom  # ask the training for closer samples first",
        "tsemon sub-step demo/gpt --step 4200 --healthy-step 3000",
    ),
)
def sub_step(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run: its name, project/name, or its id.", autocompletion=complete_run),
    ],
    step: Annotated[
        int | None, typer.Option(help="Use the sample nearest to this step (default: the newest).", min=0)
    ] = None,
    healthy_step: Annotated[
        int | None, typer.Option(help="Compare each block with itself at this step, not with the others.", min=0)
    ] = None,
    attempt: Annotated[int | None, typer.Option(help="Only this attempt.", min=1)] = None,
    zoom: Annotated[
        bool,
        typer.Option(
            "--zoom", help="Ask the run for closer samples and wait for them, unless it has ended or is silent."
        ),
    ] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds that --zoom waits.", min=0.0)] = 300.0,
    as_json: AsJson = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Find the sub-step that makes tokens alike or hidden states explode.

    It names a block and attention, its residual, the feed-forward part or a
    norm. `tsemon incidents ID` shows the same for an incident. With --zoom,
    Ctrl-C ends the wait; the training still takes the samples.
    """
    if zoom and (step is not None or attempt is not None):
        raise InvalidArgument("--zoom reads the newest samples; leave out --step and --attempt")
    with connect(server) as client:
        run_id = find_run(client, run).run_id
        if zoom and (steps := _zoomed(client, run_id, timeout_s)):
            step = steps[-1]
            say(f"Samples of the zoom: steps {', '.join(map(count, steps))}", err=as_json)
        found = client.sub_step(run_id, step, healthy_step=healthy_step, attempt=attempt)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        compared = "" if found.healthy_step is None else f", compared with those up to step {count(found.healthy_step)}"
        say(f"Newest values up to step {count(found.step)}{compared}: {found.text}")


def _zoomed(client: Client, run_id: str, timeout_s: float) -> Sequence[int]:
    """Ask for a zoom and wait for it. Return the steps of its samples; none if the run is not live. Raises TooSlow."""
    try:
        asked = client.zoom(run_id)
    except RunNotLive as error:
        say(f"{error}; this is from its stored samples", err=True)
        return ()
    deadline = time.monotonic() + timeout_s
    with _progress() as show:
        while True:
            run = client.run(run_id)
            steps, is_whole = first_zoom(_steps(client, run, asked))
            if is_whole:
                return steps
            if run.state != "running":
                say(f"the run has {run.state}; this is from its stored samples", err=True)
                return steps
            if time.monotonic() >= deadline:
                raise TooSlow(
                    f"the run has sent {len(steps)} of {NUM_SAMPLES} close samples within {timeout_s:g} s; "
                    "`print(monitor)` in the training shows refused zooms; with every=N it never zooms in"
                )
            show(f"waiting for close samples of {run.project}/{run.run}: {len(steps)} of {NUM_SAMPLES}")
            time.sleep(POLL_S)


def _steps(client: Client, run: RunDetail, asked: Zoom) -> Sequence[int]:
    """Steps of the samples since the request."""
    if OF_SAMPLES not in run.metrics.scalars:
        return ()
    from_step = 0 if asked.after_step is None else asked.after_step + 1
    return client.series(run.run_id, OF_SAMPLES, from_step=from_step, attempt=asked.attempt).step


def first_zoom(steps: Sequence[int]) -> tuple[Sequence[int], bool]:
    """Return the first close samples among these, and whether there will be no more of them."""
    zoom: list[int] = []
    for step in steps:
        if zoom and step > zoom[-1] + MAX_GAP:
            if len(zoom) > 1:  # the budget has cut it short
                return zoom, True
            zoom = []
        zoom.append(step)
    return zoom[:NUM_SAMPLES], len(zoom) >= NUM_SAMPLES


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on stderr that changes on a terminal; in a pipe, a line for each text."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("waiting") as status:
            yield lambda text: status.update(escape(printable(text)))
        return
    shown = [""]

    def show(text: str) -> None:
        if text != shown[-1]:
            shown.append(text)
            say(text, err=True)

    yield show
