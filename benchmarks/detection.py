"""Which failures do the built-in rules call, how early, and do they leave healthy runs alone?

Trains small models that fail in known ways, their healthy twins and others that only look odd, each watched by a monitor
that writes into a folder. All frames then go to a service in a process of its own, and its alerts are read over REST.

    python benchmarks/detection.py [--folder FOLDER] [--only NAME ...] [--live NAME ...] [--traces FOLDER] [--svg FILE]
                                   [--page FILE] [--gaps STEPS ...]

What was trained into FOLDER is not trained again, so changed rules are tried in seconds. The trainings take fifteen
minutes of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from databases import Service, SQLite
from trials.gaps import HEAD, judged_at, row
from trials.judging import Alarm, Told, Verdict, judge
from trials.picture import draw
from trials.recording import PROJECT, Trial, losses_file, read_losses, record, spool_folder, write_trace
from trials.report import conditions, page, report
from trials.runs import TRIALS

from tsemon.transport import sync
from tsemon_client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep the trainings here, and use what is here already")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these trainings and their twins")
    parser.add_argument("--live", nargs="+", metavar="NAME", default=[], help="deliver these once more, as they train")
    parser.add_argument("--traces", type=Path, help="write each run for `tsemon replay` into this folder")
    parser.add_argument("--svg", type=Path, help="draw onset, loss rules and alarms")
    parser.add_argument("--page", type=Path, help="write the tables between the marks of this page: docs/detection.md")
    parser.add_argument("--gaps", nargs="+", type=int, metavar="STEPS", help="judge as if sampled less often, instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trials = chosen(options.only)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tsemon-")))
        record_missing(trials, folder)
        if options.gaps:
            compare_gaps(options.gaps, trials, folder)
            return
        if options.traces is not None:
            options.traces.mkdir(parents=True, exist_ok=True)
            for trial in trials:
                write_trace(trial, folder, options.traces / f"{trial.name}.jsonl.gz")
        verdicts = judged(trials, folder)
        print(report(verdicts))
        if options.page is not None:
            options.page.write_text(page(options.page.read_text(), verdicts))
        if options.svg is not None:
            draw(options.svg, [v for v in verdicts if v.is_harmed])
        if options.live:
            compare_live([trial for trial in trials if trial.name in options.live], verdicts)


def compare_gaps(gaps: Iterable[int], trials: Sequence[Trial], folder: Path) -> None:
    print(f"{conditions(len(trials))}\n{HEAD}\n|{'---|' * HEAD.count(' | ')}---|")
    for gap in gaps:
        print(row(gap, judged_at(gap, trials, folder)), flush=True)


def chosen(names: Sequence[str] | None) -> list[Trial]:
    if names is None:
        return list(TRIALS)
    wanted = {*names, *(trial.twin for trial in TRIALS if trial.name in names)}
    if missing := wanted - {"", *(trial.name for trial in TRIALS)}:
        raise SystemExit(f"no training is named {', '.join(sorted(missing))}; see benchmarks/trials/runs.py")
    return [trial for trial in TRIALS if trial.name in wanted]


def record_missing(trials: Iterable[Trial], folder: Path) -> None:
    os.environ.pop("TSEMON_SERVER", None)  # the frames are to stay here
    for trial in trials:
        if not losses_file(folder, trial.name).exists():
            shutil.rmtree(spool_folder(folder, trial.name), ignore_errors=True)  # of a time that ended early
            record(trial, folder)


@contextlib.contextmanager
def service() -> Iterator[str]:
    """The URL of a service with an empty database."""
    with contextlib.ExitStack() as stack:
        engine = SQLite(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tsemon-"))))
        yield stack.enter_context(contextlib.closing(Service(engine, "detection"))).url


def judged(trials: Sequence[Trial], folder: Path) -> list[Verdict]:
    """All runs, as the service sees them when their frames arrive."""
    with service() as url, tempfile.TemporaryDirectory(prefix="tsemon-") as copy:
        for trial in trials:
            shutil.copytree(spool_folder(folder, trial.name), spool_folder(Path(copy), trial.name))
        for synced in sync(Path(copy) / "spools", url):  # which deletes what was delivered
            if synced.error or synced.num_refused:
                raise SystemExit(str(synced))
        with Client(url) as client:
            alarms = {trial.name: alarms_of(client, trial.name) for trial in trials}
            incidents = {trial.name: incidents_of(client, trial.name) for trial in trials}
    losses = {trial.name: read_losses(folder, trial.name).loss for trial in trials}
    return [judge(t, losses[t.name], losses.get(t.twin), alarms[t.name], incidents[t.name]) for t in trials]


def alarms_of(client: Client, run: str) -> list[Alarm]:
    """What fired, in the order of steps."""
    alerts = client.alerts(run_id=client.find_run(run, project=PROJECT).run_id)
    fired = [
        Alarm(alert.rule, alert.family, alert.firing_step, alert.severity)
        for alert in alerts
        if alert.firing_step is not None and alert.severity != "info"
    ]
    return sorted(fired, key=lambda alarm: (alarm.step, alarm.rule))


def incidents_of(client: Client, run: str) -> list[Told]:
    """The incidents, in the order in which they were reported."""
    found = client.incidents(run_id=client.find_run(run, project=PROJECT).run_id)
    return [Told(one.rule, one.family, one.step, one.severity, one.where) for one in reversed([*found])]


def compare_live(trials: Sequence[Trial], verdicts: Sequence[Verdict]) -> None:
    """Train once more with the service at the other end, and say whether the same alarms came."""
    later = {verdict.trial.name: list(verdict.alarms) for verdict in verdicts}
    with service() as url, tempfile.TemporaryDirectory(prefix="tsemon-") as folder, Client(url) as client:
        for trial in trials:
            record(trial, Path(folder), server=url)
            alarms = alarms_of(client, trial.name)
            print(f"{trial.name}: {'the same alarms live' if alarms == later[trial.name] else f'live {alarms}'}")


if __name__ == "__main__":
    main()
