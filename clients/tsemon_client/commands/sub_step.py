"""`tsemon sub-step`."""

from __future__ import annotations

from typing import Annotated

import typer

from tsemon.terminal import count, examples, print_json, say
from tsemon_client.commands.completion import complete_run
from tsemon_client.commands.finding import find_run
from tsemon_client.commands.options import DEFAULT_SERVER, LOOK, AsJson, Server, connect

app = typer.Typer()


@app.command(
    name="sub-step",
    rich_help_panel=LOOK,
    epilog=examples(
        "tsemon sub-step demo/gpt  # at the newest sample",
        "tsemon sub-step demo/gpt --step 4200 --healthy-step 3000",
    ),
)
def sub_step(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run: its name, project/name, or its id.", autocompletion=complete_run),
    ],
    step: Annotated[int | None, typer.Option(help="Look at the sample nearest to this step.", min=0)] = None,
    healthy_step: Annotated[
        int | None, typer.Option(help="Compare each block with itself at this step, not with the others.", min=0)
    ] = None,
    attempt: Annotated[int | None, typer.Option(help="Only this attempt.", min=1)] = None,
    as_json: AsJson = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Find the sub-step that makes tokens alike or hidden states explode.

    It names a block and attention, its residual, the feed-forward part or a
    norm. `tsemon incidents ID` shows the same for an incident.
    """
    with connect(server) as client:
        run_id = find_run(client, run).run_id
        found = client.sub_step(run_id, step, healthy_step=healthy_step, attempt=attempt)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        compared = "" if found.healthy_step is None else f", compared with those up to step {count(found.healthy_step)}"
        say(f"Newest values up to step {count(found.step)}{compared}: {found.text}")
