"""Write a result down: a page, its figures as PNG, its numbers as JSON, and an index of all that a folder holds."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch

import tsemon
from tsemon.lab.reproduce.result import Experiment, Result, Table, Verdict

INTRODUCTION = """\
# What the papers' experiments give when they are repeated

Each page has its settings, seeds, figures and numbers. What is one of tsemon's metrics was measured by tsemon's own probes;
a verdict is a condition on the figures, so it moves when they do. Where a paper can be read in two ways, or sizes had to be
made smaller, the page says which were taken. A page with a column "as printed" runs the paper's equations and settings as
they are printed there. Figures with ± are the mean and the standard deviation over seeds. A verdict on them needs a
difference larger than both standard deviations together; if each seed is evaluated separately, all seeds must agree.
"Ours" is a question that no paper answers.

`tsemon reproduce NAME` repeats one, `tsemon reproduce all` all that the machine can run, `tsemon reproduce list` names them.
`--quick` takes minutes instead of hours, with smaller models and fewer trials: some of its verdicts differ. An
unstable verdict depends on the seed then. `--seed 1` takes other seeds, `--out` is the folder for pages, `--jobs` how many
parts run at a time, each with one thread. An interrupted command continues where it was.

`tsemon reproduce value-residual-82m` needs a CUDA GPU: four models of 82M parameters on 100 MB of text, the files or folders
that TSEMON_TEXT names (several as in PATH), or the Python sources of the installation where they are enough.
"""


def write(result: Result, experiment: Experiment, folder: Path, *, quick: bool, seconds: float, seed: int = 0) -> Path:
    """`NAME.md`, `NAME.json` and the figures, in `folder`. Returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, plot in result.plots.items():
        plot.figure.savefig(folder / f"{experiment.name}-{stem}.png", dpi=110, bbox_inches="tight")
    body = {
        "experiment": asdict(experiment),
        "is_quick": quick,
        "seed": seed,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": _machine(experiment.needs_gpu),
        "wall_s": round(seconds),
        "settings": dict(result.settings),
        "claims": [asdict(claim) for claim in result.claims],
        "tables": [asdict(table) for table in result.tables],
    }
    (folder / f"{experiment.name}.json").write_text(json.dumps(body, indent=1, default=str) + "\n")
    page = folder / f"{experiment.name}.md"
    page.write_text(_page(result, experiment, body))
    return page


def write_index(folder: Path, order: Sequence[str]) -> Path:
    """`README.md`: of each result in the folder, in this order of names, what the paper says and what we see."""
    paths = [path for name in order if (path := folder / f"{name}.json").exists()]
    bodies = [json.loads(path.read_text()) for path in paths]
    lines = [INTRODUCTION, _counts(bodies), ""]
    for body in bodies:
        experiment = body["experiment"]
        size = ", the quick version" if body["is_quick"] else ""
        lines += [
            f"## [{experiment['title']}]({experiment['name']}.md)",
            "",
            f"{experiment['source']}. Run on {body['date']}, {body['wall_s']} s{size}.",
            "",
            *_claims(body["claims"]),
            "",
        ]
    index = folder / "README.md"
    index.write_text("\n".join(lines))
    return index


def _page(result: Result, experiment: Experiment, body: Mapping[str, Any]) -> str:
    command = f"tsemon reproduce {experiment.name}" + (" --quick" if body["is_quick"] else "")
    command += f" --seed {body['seed']}" if body["seed"] else ""
    lines = [f"# {experiment.title}", "", f"{experiment.source}. Repeat it with `{command}`.", ""]
    lines += [f"Run on {body['date']}, {body['machine']}; {body['wall_s']} s.", ""]
    lines += _claims(body["claims"])
    for stem, plot in result.plots.items():
        lines += ["", f"![{plot.caption}]({experiment.name}-{stem}.png)", "", plot.caption]
    lines += ["", "## Settings", ""]
    lines += [f"- {name}: {value}" for name, value in result.settings.items()]
    if result.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in result.notes)]
    for table in result.tables:
        lines += ["", f"## {table.title}", "", *_table(table)]
    return "\n".join(lines) + "\n"


def _counts(bodies: Sequence[Mapping[str, Any]]) -> str:
    """How many verdicts there are of each kind."""
    found = Counter(claim["agrees"] for body in bodies for claim in body["claims"])
    counted = ", ".join(f"{found[kind]} {kind}" for kind in get_args(Verdict) if found[kind])
    return f"Verdicts: {counted}."


def _claims(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    if not any(claim.get("reading") for claim in claims):
        rows = [(claim["paper"], claim["seen"], _verdict(claim)) for claim in claims]
        return _table(Table(title="", columns=("The paper says", "We see", "Agrees"), rows=rows))
    columns = ("The paper says", "As printed", "As we read it", "Agrees")
    both = [(claim["paper"], claim["seen"], claim.get("reading", ""), _verdict(claim)) for claim in claims]
    return _table(Table(title="", columns=columns, rows=both))


def _verdict(claim: Mapping[str, Any]) -> str:
    return str(claim["agrees"]) + ("" if claim.get("is_stable", True) else " (unstable)")


def _table(table: Table) -> list[str]:
    rows = [table.columns, ["---"] * len(table.columns), *([_cell(value) for value in row] for row in table.rows)]
    return [f"| {' | '.join(row)} |" for row in rows]


def _cell(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _machine(uses_gpu: bool) -> str:
    device = torch.cuda.get_device_name() if uses_gpu else f"CPU ({platform.machine()})"
    return (
        f"{device}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, "
        f"Python {platform.python_version()}, tsemon {tsemon.__version__}"
    )
