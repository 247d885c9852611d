"""Recorded trainings as the rules would have read them with fewer samples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trials.judging import Summary, Verdict, judge_replayed
from trials.recording import Frames, Trial, read_losses, write_trace
from tsemon.catalogue import TIERS
from tsemon.probes.grad_norms import GradNormProbe
from tsemon.probes.losses import LossProbe
from tsemon.schedule import SLOW_EVERY
from tsemon_server.services.replay.many import replay_files
from tsemon_server.services.replay.replaying import Replayed

HEAD = (
    "| gap | detected | verdict right | delay, median | incidents per run | alerts per run | healthy runs with an alert "
    "| alerts before the defect |"
)
AT_CLOSE = {"loss", *LossProbe.METRICS, *GradNormProbe.METRICS}
"""Metrics of the frame that `close()` sends."""


def judged_at(gap: int, trials: Sequence[Trial], folder: Path) -> list[Verdict]:
    """Judge the runs as if `attach(every=gap)` had recorded them. Some values that rules read are approximate:

    `input_overlap` compares batches over several recorded gaps. Here it is the lowest value in these gaps, which is exact
    if the loader is stuck. `norm_growth_exponent` and `norm_growth_r2` come from all recorded samples; their rule needs
    20 samples, and no run has 20 samples at a gap of 50 steps. The frame of `close()` is the last
    recorded frame. A second attempt continues the first attempt.
    """
    with tempfile.TemporaryDirectory(prefix="tsemon-") as name:
        for trial in trials:
            write_trace(trial, folder, Path(name) / f"{trial.name}.jsonl.gz", partial(thinned, gap=gap))
        replayed = {each.run: each for each in replay_files([Path(name)], None, 1) if isinstance(each, Replayed)}
    losses = {trial.name: read_losses(folder, trial.name).loss for trial in trials}
    return [judge_replayed(t, losses[t.name], losses.get(t.twin), replayed[t.name]) for t in trials]


def thinned(frames: Frames, gap: int) -> Frames:
    """Keep the first frame and a frame every `gap` steps, each tenth with the slow tier, and the frame of `close()`.

    The reader of a trace computes the metrics of the loss from the losses of all steps.
    """
    first, num_kept, overlaps = None, 0, list[float]()
    frame, is_kept = dict[str, Any](), True
    for frame in frames:
        first = frame["step"] if first is None else first
        if (overlap := frame["scalars"].get("input_overlap")) is not None:
            overlaps.append(overlap)
        is_kept = (frame["step"] - first) % gap == 0
        if is_kept:
            if overlaps:
                frame["scalars"]["input_overlap"] = min(overlaps)
            yield _only(frame, lambda name, is_slow=num_kept % SLOW_EVERY == 0: is_slow or TIERS.get(name) != "slow")
            overlaps.clear()
            num_kept += 1
    if not is_kept:
        yield _only(frame, lambda name: name in AT_CLOSE)


def _only(frame: dict[str, Any], is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    kinds = ("scalars", "layers", "heads")
    return frame | {kind: {name: value for name, value in frame[kind].items() if is_wanted(name)} for kind in kinds}


def row(gap: int, verdicts: Sequence[Verdict]) -> str:
    harmed = [verdict for verdict in verdicts if verdict.is_harmed]
    found = [verdict for verdict in harmed if verdict.first is not None]
    s = Summary.of(harmed)
    healthy = [verdict for verdict in verdicts if not verdict.trial.is_failing]
    early = sum(len(verdict.false) for verdict in verdicts if verdict.trial.is_failing)
    detected = f"{len(found)} of {len(harmed)}"
    named = f"{sum(verdict.is_named for verdict in found)} of {len(found)}"
    false = f"{sum(bool(verdict.alarms) for verdict in healthy)} of {len(healthy)}"
    per_run = f"{s.incidents_per_run:.1f} | {s.alarms_per_run:.1f}"
    return f"| {gap} | {detected} | {named} | {s.delay:+.0f} | {per_run} | {false} | {early} |"
