"""How the built-in rule does on recorded runs, as docs/rules.md prints it.

python tests/server/rules/report.py [FOLDER]     with `server` on PYTHONPATH; FOLDER is else tests/data/traces
"""

from __future__ import annotations

import math
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
from traces import FOLDER, Trace, onset, read_all

from tsemon_server.rules import Event, Hold, TokenSimilarityEscalation, Track, advance, fall_over_depth

RULE = TokenSimilarityEscalation()


def replay(trace: Trace, rule: TokenSimilarityEscalation = RULE, every: int = 1, offset: int = 0) -> list[Event]:
    """The events of one run, looked at from the sample `offset` on at every `every`-th of its samples."""
    track, events = Track(), []
    for view in trace.views[offset::every]:
        track, event = advance(rule, track, view)
        if event:
            events.append(event)
    return events


def firing_steps(events: list[Event]) -> list[int]:
    return [event.firing_step for event in events if event.kind == "firing" and event.firing_step is not None]


def count(traces: list[Trace], rule: TokenSimilarityEscalation = RULE, every: int = 1) -> str:
    """Over all offsets of the sparser sampling: how many tse runs fire, and which healthy ones."""
    fired, alarms, total = 0, set(), 0
    for trace in traces:
        if trace.family == "tse" or trace.is_healthy:
            for offset in range(every):
                fires = bool(firing_steps(replay(trace, rule, every, offset)))
                fired += fires and trace.family == "tse"
                total += trace.family == "tse"
                if fires and trace.is_healthy:
                    alarms.add(trace.name)
    return f"{fired}/{total} | {', '.join(sorted(alarms)) or 'none'}"


def way(conditions: dict[str, bool | None]) -> str:
    """Which of the two ways in was open."""
    ways = {"shared": conditions["shared_within_samples"], "total": conditions["total_collapse"]}
    return " + ".join(name for name, holds in ways.items() if holds)


def print_runs(traces: list[Trace]) -> None:
    by_name = {trace.name: trace for trace in traces}
    print("| run | onset in the loss | pending | firing | by | resolved |\n|---|---|---|---|---|---|")
    for trace in traces:
        events = replay(trace)
        if trace.family != "tse" and not trace.is_gray and not events:
            continue
        twin = by_name.get(trace.header["twin"])
        cells: list[object] = [trace.name + (" (gray)" if trace.is_gray else ""), onset(trace, twin) if twin else None]
        for kind in ("pending", "firing", "resolved"):
            cells.append(", ".join(str(getattr(event, f"{kind}_step")) for event in events if event.kind == kind))
            if kind == "firing":
                cells.append(", ".join(way(event.evidence["conditions"]) for event in events if event.kind == kind))
        print("| " + " | ".join("-" if cell in (None, "") else str(cell) for cell in cells) + " |")


def print_families(traces: list[Trace]) -> None:
    print("\n| family | runs | with tokens | fired |\n|---|---|---|---|")
    groups = ["tse", "healthy", "gray", *sorted({t.family for t in traces if t.header["failing"]} - {"tse"})]
    for group in groups:
        runs = [t for t in traces if {"healthy": t.is_healthy, "gray": t.is_gray}.get(group, t.family == group)]
        fired = sum(bool(firing_steps(replay(t))) for t in runs)
        print(f"| {group} | {len(runs)} | {sum(t.has_tokens for t in runs)} | {fired} |")


def others_hold(conditions: dict[str, bool | None], key: str) -> bool:
    """Whether the rule would be met if `key` held."""
    return bool(
        (key == "low_diversity" or conditions["low_diversity"])
        and (key == "falls_over_depth" or conditions["falls_over_depth"])
        and (key == "shared_within_samples" or way(conditions))
    )


def print_margins(traces: list[Trace]) -> None:
    """Per condition the healthy sample that comes nearest to it while the others hold, or at all."""
    rows = []
    for trace in traces:
        for view in trace.views if trace.is_healthy and trace.has_tokens else ():
            reading, fall = RULE.read(view), fall_over_depth(view.layers["token_diversity"])
            if fall:
                last = view.layers["token_diversity"][-1], view.layers["centred_token_similarity"][-1]
                rows.append((trace.name, view.step, *map(float, last), fall.slope, fall.r_squared, reading))
    print(
        "\n| condition | threshold | nearest healthy sample while the others hold | nearest at all |\n|---|---|---|---|"
    )
    for title, key, column, sign, threshold in (
        ("diversity of the last block, at most", "low_diversity", 2, 1, RULE.low_diversity),
        ("total collapse, diversity at most", "shared_within_samples", 2, 1, RULE.total_collapse_diversity),
        ("decades per block, at most", "falls_over_depth", 4, 1, RULE.max_slope),
        ("centred similarity, at least", "shared_within_samples", 3, -1, RULE.high_centred),
    ):
        cells = []
        for candidates in (
            [r for r in rows if others_hold(r[6].evidence["conditions"], key)],
            rows,
        ):
            best = min(candidates, key=lambda r: sign * r[column], default=None)
            cells.append(f"{best[column]:.3g} ({best[0]}, step {best[1]})" if best else "no sample")
        print(f"| {title} | {threshold:g} | {' | '.join(cells)} |")


def print_sensitivity(traces: list[Trace]) -> None:
    print("\n| change | tse runs fired | false alarms |\n|---|---|---|")
    print(f"| none | {count(traces)} |")
    for field in fields(RULE):
        value = getattr(RULE, field.name)
        if isinstance(value, float) and field.name != "clear_diversity":
            for changed in (value / 2, min(2 * value, (1 + value) / 2)):  # a share near 1 goes halfway to 1
                rule = replace(RULE, **{field.name: changed})
                print(f"| {field.name} {value:g} -> {changed:g} | {count(traces, rule)} |")
    for changed in (2e-3, 3e-3):
        print(f"| low_diversity -> {changed:g} | {count(traces, replace(RULE, low_diversity=changed))} |")
    no_fall = {"max_slope": math.inf, "min_r_squared": -math.inf}
    for title, without in (
        ("without the fall over depth", no_fall),
        ("without the centred similarity", {"high_centred": 0.0}),
        ("without total collapse", {"total_collapse_diversity": -1.0}),
        ("the diversity alone", {**no_fall, "high_centred": 0.0}),
        ("without the diversity", {"low_diversity": 1.0, "clear_diversity": 1.0}),
    ):
        print(f"| {title} | {count(traces, replace(RULE, **without))} |")
    for hold in (Hold(samples=2, steps=5), Hold(samples=2, steps=10), Hold(samples=6, steps=20)):
        print(f"| hold of {hold.samples} samples and {hold.steps} steps | {count(traces, replace(RULE, hold=hold))} |")
    print(f"| every 4th sample, from each of the first four | {count(traces, every=4)} |")
    hold = Hold(samples=2, steps=10)
    print(f"| the same with a hold of 2 samples and 10 steps | {count(traces, replace(RULE, hold=hold), 4)} |")
    similar = [t for t in traces if t.is_healthy and t.has_tokens]
    for level in (0.8, 0.95, 0.99):
        over = sum(any(v.layers["token_similarity"][-1] > level for v in t.views) for t in similar)
        print(f"\nToken similarity alone, over {level}, once: {over} of {len(similar)} healthy runs.", end="")
    print()


def main(folder: Path) -> None:
    traces = read_all(folder)
    np.seterr(all="raise")
    print_runs(traces)
    print_families(traces)
    print_margins(traces)
    print_sensitivity(traces)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
