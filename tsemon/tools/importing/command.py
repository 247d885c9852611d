"""`tsemon import`: what it prints, and how it ends."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from tsemon.errors import InvalidArgument, MissingData, ServerRefused, needing
from tsemon.terminal import print_json, printable, say
from tsemon.tools.importing import work
from tsemon.tools.importing.naming import Naming
from tsemon.tools.importing.source import Found, SourceRun, files_in, some
from tsemon.transport import RunWriter, run_writer

PATIENCE_S = 120.0
"""For so long a service is asked again that is busy, or does not answer."""
KINDS = ("tfevents", "wandb", "mlflow", "table", "neptune")

_SQLITE = b"SQLite format 3\x00"


def run(
    sources: Sequence[str],
    *,
    server: str,
    spool: Path | None = None,
    project: str | None = None,
    name: str | None = None,
    only: Sequence[str] = (),
    naming: Naming | None = None,
    step_column: str | None = None,
    replace: bool = False,
    dry_run: bool = False,
    as_json: bool = False,
) -> bool:
    """Import what is at the paths, each of them after a kind or not. Whether nothing was lost on the way.

    What is lost, and a run that the service does not take, is told on stderr. Raises InvalidArgument for what cannot be
    meant, MissingPackage, and ServerUnreachable.
    """
    naming = naming or Naming()
    found = find(sources, step_column)
    runs = [r for r in found.runs if not only or any(fnmatch.fnmatchcase(r.name, pattern) for pattern in only)]
    if only and not runs and found.runs:
        raise InvalidArgument(f"--only fits none of {len(found.runs)} runs, such as {found.runs[0].name!r}")
    if name is not None and len(runs) > 1:
        raise InvalidArgument(
            f"--run names one run, and there are {len(runs)}, such as {runs[0].name!r} and {runs[1].name!r}; "
            "choose one with --only, or leave --run out"
        )
    damages = [*_told_damages(found.damages)]
    others = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
    nothing = f"no runs with numbers in {', '.join(sources[:3])}{others}: nothing to import"
    if not runs and not damages:
        damages += _told_damages([nothing])
    place = server if spool is None else str(spool)
    begin = None if dry_run else partial(_begin, server=server, spool=spool, replace=replace)
    called: dict[tuple[str, str], SourceRun] = {}
    results: list[dict[str, Any]] = []
    is_empty = bool(runs)
    try:
        for source in runs:
            identity = work.project_of(source, project), work.title(name or source.name)
            if (other := called.setdefault(identity, source)) is not source:
                clash = f"its run would be called {'/'.join(identity)}, as is that of {other.where}"
                hint = "import it by itself, with --run or --project"
                damages += _told_damages([f"{source.where} is left out: {clash}; {hint}"])
                continue
            try:
                result = _import(source, naming, begin, name, project)
            except (InvalidArgument, ServerRefused) as error:  # of this run; the others may do
                if error.status == 401:
                    raise
                damages += _told_damages([str(error)])
                continue
            if as_json:
                results.append(described(*result, name, project, place))
            else:
                for line in told(*result, name, project, place):
                    say(printable(line))
            damages += _told_damages(result[0].notes.damages)
            is_empty = is_empty and not result[0].plan.places
        if is_empty and not damages:
            damages += _told_damages([nothing])
        if not as_json:
            for line in found.left_alone:
                say(printable(line))
    finally:
        if as_json:
            print_json({"runs": results, "damages": damages, "left_alone": found.left_alone})
    return not damages


def _begin(
    body: dict[str, Any], followers: int, edition: int, *, server: str, spool: Path | None, replace: bool
) -> RunWriter:
    """A writer of an attempt. Raises InvalidArgument where the run is there and is not from this source."""

    def check(there: Mapping[str, Any]) -> None:
        config = there.get("config")
        imported = config.get("imported") if isinstance(config, dict) else None
        is_same = isinstance(imported, dict) and imported.get("key") == body["config"]["imported"]["key"]
        if not (replace or is_same):
            raise InvalidArgument(
                f"there is a run {body['run']!r} in project {body['project']!r} that is not from this source; --run or "
                "--project gives another name, --replace hides what is there behind what is imported"
            )

    def refuse(text: str) -> None:
        raise InvalidArgument(f"the service does not take what was made of this source: {text}")

    return run_writer(
        body,
        server=server if spool is None else None,
        spool=spool,
        check=check,
        on_warning=refuse,
        patience_s=PATIENCE_S,
        followers=followers,
        edition=edition,
    )


def _import(
    source: SourceRun, naming: Naming, begin: work.Begin | None, name: str | None, project: str | None
) -> tuple[work.Surveyed, work.Outcome | None]:
    """One run; what was found, and what became of it."""
    size = sum(log.size for log in source.logs)
    with _bar(source.name, size * (1 if begin is None else 2)) as advance:
        found = work.survey(source, naming, advance)
        outcome = (
            None if begin is None else work.bring(found, naming, begin, run=name, project=project, advance=advance)
        )
    return found, outcome


def _told_damages(damages: list[str]) -> list[str]:
    for damage in damages:
        say(printable(f"tsemon: {damage}"), err=True)
    return damages


def described(
    found: work.Surveyed, outcome: work.Outcome | None, name: str | None, project: str | None, place: str
) -> dict[str, Any]:
    """The same as `told`, for programs; None of what is not known before it is imported."""
    first, last = _steps(found)
    return {
        "project": work.project_of(found.run, project),
        "run": work.title(name or found.run.name),
        "run_id": outcome and outcome.run_id,
        "from": found.run.kind,
        "source": found.run.where,
        "into": place if outcome else None,
        "num_new": outcome and outcome.num_new,
        "num_known": outcome and outcome.num_known,
        "num_attempts": outcome and outcome.num_attempts,
        "num_layers": found.plan.num_blocks,
        "first_step": first,
        "last_step": last,
        "metrics": [
            {"metric": metric, "is_layered": is_layered, "names": names}
            for (metric, is_layered), names in _by_metric(found).items()
        ],
        "remarks": found.notes.remarks,
        "left_out": found.notes.left_out(),
        "damages": found.notes.damages,
    }


def _steps(found: work.Surveyed) -> tuple[int | None, int | None]:
    seen = [survey for survey in found.surveys if survey.num_rows]
    return min((one.first_step for one in seen), default=None), max((one.last_step for one in seen), default=None)


def told(
    found: work.Surveyed, outcome: work.Outcome | None, name: str | None, project: str | None, place: str
) -> Iterator[str]:
    """What is printed of one run."""
    source, plan = found.run, found.plan
    called = f"{work.project_of(source, project)}/{work.title(name or source.name)}"
    first, last = _steps(found)
    steps = "no steps" if first is None else f"steps {first} to {last}"
    layers = f", {len(plan.lengths)} of them over {_count(plan.num_blocks, 'layer')}" if plan.lengths else ""
    what = f"{_count(plan.num_metrics(), 'metric')}{layers}, {steps}"
    if outcome is None:
        yield f"{called}: would be imported from {source.where}: {what}"
        for line in folded(found):
            yield f"  {line}"
    elif not outcome.num_attempts:
        yield f"{called}: nothing to import from {source.where}: {what}"
    else:
        attempts = f" in {outcome.num_attempts} attempts" if outcome.num_attempts > 1 else ""
        known = f"{outcome.num_known} were there already"
        yield f"{called}: {_count(outcome.num_new, 'new frame')}{attempts}, {known}; {what}; now at {place}"
    for remark in (*found.notes.remarks, *found.notes.left_out()):
        yield f"  {remark}"


def folded(found: work.Surveyed) -> Iterator[str]:
    """Which names become which metrics, one line for each metric."""
    for (metric, is_layered), names in _by_metric(found).items():
        if is_layered:
            yield f"{metric}: {_count(len(names), 'layer')}, from {names[0]}" + (
                f" to {names[-1]}" if len(names) > 1 else ""
            )
        else:
            yield metric if names == [metric] else f"{metric}: from {names[0]}"


def _by_metric(found: work.Surveyed) -> dict[tuple[str, bool], list[str]]:
    by_metric: dict[tuple[str, bool], list[str]] = {}
    for name, place in found.plan.places.items():
        by_metric.setdefault((place.metric, place.entry is not None), []).append(name)
    return by_metric


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def find(sources: Sequence[str], step_column: str | None = None) -> Found:
    """The runs at the paths. Raises InvalidArgument where a path is not there or holds nothing that is known."""
    kind, paths = None, list(sources)
    if len(paths) > 1 and paths[0] in KINDS:
        kind = paths.pop(0)
    by_path: dict[Path, list[SourceRun]] = {}
    damages: list[str] = []
    left_alone: list[str] = []
    for text in paths:
        path = Path(text).expanduser()
        if not path.exists():
            hint = f"; after the kind {text!r} comes a path" if text in KINDS else ""
            raise InvalidArgument(f"{text} is not there{hint}")
        own = kind or guess(path)
        found = _finder(own, step_column)(path)
        by_path[path] = found.runs
        damages += found.damages
        if kind is None and (tables := _tables_beside(own, path)):
            what = f"{_count(len(tables), 'file')} that may be a table: {some(tables)}"
            left_alone.append(f"left alone, {what}; tsemon import table {path} imports tables")
    return Found(_told_apart(by_path), damages, left_alone)


def _tables_beside(kind: str, path: Path) -> list[str]:
    """The files of a folder that may be tables, where runs of another tool are imported from it."""
    if kind not in ("tfevents", "wandb") or path.is_file():
        return []
    return [str(file.relative_to(path)) for file in files_in(path, []) if _kind_of_name(file) == "table"]


def _told_apart(by_path: Mapping[Path, list[SourceRun]]) -> list[SourceRun]:
    """All runs. Tables that have the same name at several paths are called after the folders of these, too."""
    used = Counter(name for runs in by_path.values() for name in {run.name for run in runs if run.kind == "table"})
    apart = []
    for path, runs in by_path.items():
        folder = (path if path.is_dir() else path.parent).resolve().name
        apart += [changed(run, name=f"{folder}/{run.name}") if used[run.name] > 1 else run for run in runs]
    return apart


def guess(path: Path) -> str:
    """The kind of what is at a path. Raises InvalidArgument where it is none, or several."""
    if path.is_file():
        kind = _kind_of_file(path)
        if kind is None:
            raise InvalidArgument(f"{path} is of no kind that is known; say which of {', '.join(KINDS)} it is")
        return kind
    damages: list[str] = []
    kinds = {kind for file in files_in(path, damages) if (kind := _kind_of_name(file))}
    if damages and not kinds:
        raise MissingData(damages[0])
    if (path / "mlflow.db").is_file() and not kinds:
        raise InvalidArgument(f"{path} is a folder; MLflow's store in it is {path / 'mlflow.db'}")
    if "table" in kinds:  # files of results lie beside everything
        kinds = kinds - {"table"} or {"neptune" if _holds_neptune(path) else "table"}
    if len(kinds) != 1:
        what = " and ".join(sorted(kinds)) if kinds else "nothing that is known"
        raise InvalidArgument(
            f"{path} holds {what}; say which of {', '.join(KINDS)} to import: tsemon import KIND {path}"
        )
    return kinds.pop()


def _kind_of_name(path: Path) -> str | None:
    if "tfevents" in path.name:
        return "tfevents"
    return {".wandb": "wandb", **dict.fromkeys((".csv", ".json", ".jsonl", ".parquet"), "table")}.get(path.suffix)


def _kind_of_file(path: Path) -> str | None:
    if (kind := _kind_of_name(path)) is None:
        with open(path, "rb") as file:
            return "mlflow" if file.read(len(_SQLITE)) == _SQLITE else None
    return "neptune" if path.suffix == ".parquet" and _is_neptune(path) else kind


def _holds_neptune(folder: Path) -> bool:
    first = next(folder.rglob("*.parquet"), None)
    return first is not None and _is_neptune(first)


def _is_neptune(path: Path) -> bool:
    with needing("Parquet needs pyarrow; pip install 'tsemon[export]'"):
        from tsemon.tools.importing import neptune

        return neptune.is_export(path)


def _finder(kind: str, step_column: str | None) -> Callable[[Path], Found]:
    """What finds the runs of a kind. The packages of other tools are imported where their files are to be read."""
    if kind == "table":
        from tsemon.tools.importing import tables

        return partial(tables.find_runs, step_column=step_column)
    extra = "export" if kind == "neptune" else "import"
    with needing(f"files of {kind} need a package that is not installed; pip install 'tsemon[{extra}]'"):
        if kind == "mlflow":
            from tsemon.tools.importing.mlflow_store import find_runs
        elif kind == "tfevents":
            from tsemon.tools.importing.tfevents import find_runs
        elif kind == "wandb":
            from tsemon.tools.importing.wandb_files import find_runs
        else:
            from tsemon.tools.importing.neptune import find_runs
    return find_runs


@contextmanager
def _bar(title: str, total: int) -> Iterator[work.Advance]:
    """A progress bar on a terminal; nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(printable(title)[:40], total=max(total, 1))
        yield lambda size: progress.advance(task, size)
