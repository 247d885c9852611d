"""Which failures do the built-in rules detect at default settings, how late, and at what cost?

Trains small models that fail in known ways while `tsemon serve` evaluates them in a process of its own, with the cadence
that `attach` has by default. Alerts are read over REST when the run has ended.

    python benchmarks/live.py [--seeds N] [--steps N] [--only NAME ...] [--gap N] [--no-zooms] [--page FILE]
    python benchmarks/live.py --unseen [--seeds N] [--only NAME ...] [--page FILE]
    python benchmarks/live.py --healthy [--steps N] [--only NAME ...] [--page FILE]

The second command trains models that no rule was tried on, the third one 30 healthy models for 5,000 steps each. --gap 5,
50 or 200 shows what other numbers of samples detect, with zooms and without. All times are CPU times, so that other work
on the machine hardly changes the overhead and which steps are sampled.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from detection import alarms_of, incidents_of, service
from trials import default, unseen
from trials.default import seeded
from trials.healthy import HEALTHY
from trials.judging import judge
from trials.outcomes import HEAD, HEALTHY_HEAD, Outcome, gap_table, healthy_tables, live_tables
from trials.recording import PROJECT, Losses, Trial, read_losses, record
from trials.report import conditions, filled

from tsemon import schedule
from tsemon.probes import clip_norm, witness
from tsemon.schedule import Cadence
from tsemon_client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="how many seeds of each training")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these trainings and their control runs")
    parser.add_argument("--no-zooms", action="store_true", help="never sample more often at a sign of trouble")
    parser.add_argument("--gap", type=int, metavar="N", help="sample every N steps outside of zooms, whatever it costs")
    parser.add_argument("--steps", type=int, help="steps of each training; a defect sets in halfway, as in longer ones")
    parser.add_argument("--unseen", action="store_true", help="trainings that no rule was tried on, and no others")
    parser.add_argument("--healthy", action="store_true", help="long healthy trainings, and no others")
    parser.add_argument("--page", type=Path, help="write the tables between the marks of this page: docs/detection.md")
    options = parser.parse_args()
    if (options.healthy or options.unseen) and options.page and (options.gap or options.no_zooms):
        parser.error("--page has these runs at the default cadence only: leave out --gap and --no-zooms")
    torch.set_num_threads(1)
    count_cpu_time()
    if options.no_zooms:
        Cadence.zoom_in = lambda self, at_least=0, at_any_cost=False: False  # type: ignore[method-assign]
    if options.gap:
        schedule.FIRST_GAP = options.gap
        Cadence._gap_for = lambda self, cost_s, step_s: options.gap  # type: ignore[method-assign]
    some = unseen if options.unseen else default
    trials = (
        healthy(options.only)
        if options.healthy
        else tuple(seeded(chosen(some.TWINS, some.FAILING, options.only), some.SEEDS[: options.seeds]))
    )
    if options.steps:
        trials = tuple(trial.lasting(options.steps) for trial in trials)
    head = HEALTHY_HEAD if options.healthy else HEAD
    print(f"{conditions(len(trials))}\n{head}\n|{'---|' * head.count(' | ')}---|", flush=True)
    outcomes = []
    for outcome in watched(trials):
        print(outcome.healthy_row if options.healthy else outcome, flush=True)
        outcomes.append(outcome)
    if options.healthy:
        tables = healthy_tables(outcomes)
    elif options.gap or options.no_zooms:
        tables = gap_table(outcomes, options.gap, has_zooms=not options.no_zooms)
    else:
        tables = live_tables(outcomes, "unseen" if options.unseen else "live")
    print("\n" + "\n\n".join("\n".join(lines) for lines in tables.values()))
    if options.page is not None:
        options.page.write_text(filled(options.page.read_text(), tables))


def count_cpu_time() -> None:
    """Let the monitor count the CPU time of the training thread instead of wall time. With one thread they are alike on an
    idle machine."""
    time.perf_counter = clip_norm.perf_counter = witness.perf_counter = time.thread_time  # type: ignore[attr-defined]


def healthy(names: Sequence[str] | None) -> tuple[Trial, ...]:
    return tuple(trial for trial in HEALTHY if names is None or trial.name in names)


def chosen(controls: Sequence[Trial], failing: Sequence[Trial], names: Sequence[str] | None) -> tuple[Trial, ...]:
    """Return the failing trainings of these names, after their control runs."""
    some = tuple(trial for trial in failing if names is None or trial.name in names)
    twins = {trial.twin for trial in some} | {*(names or (trial.name for trial in controls))}
    return tuple(trial for trial in controls if trial.name in twins) + some


def watched(trials: Iterable[Trial]) -> Iterator[Outcome]:
    """Run the trainings in order. A control run comes before the failing runs that are compared with it."""
    losses: dict[str, Losses] = {}
    with (
        service() as url,
        tempfile.TemporaryDirectory(prefix="tsemon-") as name,
        contextlib.closing(Client(url)) as client,
    ):
        for trial in trials:
            before_s, thread_before_s = time.process_time(), time.thread_time()
            status = record(trial, Path(name), url)
            trained_s, thread_s = time.process_time() - before_s, time.thread_time() - thread_before_s
            losses[trial.name] = read_losses(Path(name), trial.name)
            twin = losses[trial.twin].loss if trial.twin else None
            told = alarms_of(client, trial.name), incidents_of(client, trial.name)
            verdict = judge(trial, losses[trial.name].loss, twin, *told)
            beside_s = trained_s - thread_s
            yield Outcome(verdict, status, losses[trial.name], trained_s, beside_s, is_repeatable(client, trial.name))


def is_repeatable(client: Client, run: str) -> bool:
    """Whether a replay of the stored frames gives the same alerts at the same steps. Time-based rules do not count."""
    run_id = client.find_run(run, project=PROJECT).run_id
    alerts = [alert for alert in client.alerts(run_id=run_id) if alert.family != "liveness"]
    live = {(alert.rule, alert.firing_step) for alert in alerts if alert.firing_step is not None}
    return live == {(alert.rule, alert.firing_step) for alert in client.test_rules(run_id).alerts}


if __name__ == "__main__":
    main()
