"""One import: what is at the paths, what its names become, and its frames on their way."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tsemon.tools.importing.joining import frames_of, joined
from tsemon.tools.importing.naming import VERSION, Naming, Plan, plan_names
from tsemon.tools.importing.source import Log, Notes, Row, SourceRun, digest
from tsemon.transport import RunWriter
from tsemon.wire import MAX_CONFIG_BYTES, MAX_SCALARS, MAX_TAGS, Frame

MOST_NAMES = 100_000
"""Different names of a run that are looked at."""

Advance = Callable[[int], object]
"""Hears how much more of the logs is read."""
Begin = Callable[[dict[str, Any], int, int], RunWriter]
"""Takes the body of `POST /runs` of an attempt, how many attempts follow on it, and the edition."""


@dataclass
class Survey:
    """What one pass over a log finds."""

    num_rows: int = 0
    first_step: int = -1
    last_step: int = -1
    began: float = math.inf
    ended: float = 0.0
    names: dict[str, None] = field(default_factory=dict)


class Surveyed(NamedTuple):
    """A run whose names and steps are known."""

    run: SourceRun
    plan: Plan
    surveys: list[Survey]
    notes: Notes


@dataclass(kw_only=True)
class Outcome:
    """What became of one run."""

    run: str
    project: str
    run_id: str | None = None
    num_new: int = 0
    num_known: int = 0
    num_attempts: int = 0


def survey(run: SourceRun, naming: Naming, advance: Advance) -> Surveyed:
    """Read all of a run once."""
    notes, names, replaced = Notes(), dict[str, None](), Counter[str]()
    surveys = []
    for log in run.logs:
        found = Survey()
        for step in joined(_seen(_counted(log, notes, advance), found, names, notes)):
            replaced.update(step.replaced)
        surveys.append(found)
    if replaced:
        notes.remark(_told_replaced(replaced, run))
    return Surveyed(run, plan_names(names, naming, notes, most_in_frame=MAX_SCALARS), surveys, notes)


def _seen(rows: Iterator[Row], found: Survey, names: dict[str, None], notes: Notes) -> Iterator[Row]:
    for row in rows:
        found.num_rows = row.ordinal + 1
        found.first_step = row.step if found.first_step < 0 else min(found.first_step, row.step)
        found.last_step = max(found.last_step, row.step)
        found.began, found.ended = min(found.began, row.time), max(found.ended, row.time)
        for name, _ in row.values:
            if len(names) < MOST_NAMES:
                names.setdefault(name)
            if name in names:
                found.names.setdefault(name)
            else:
                notes.leave_out(f"names beyond {MOST_NAMES}", name)
        yield row


def _told_replaced(replaced: Counter[str], run: SourceRun) -> str:
    name, num_values = replaced.most_common(1)[0]
    others = f" and of {len(replaced) - 1} more" if len(replaced) > 1 else ""
    hint = "; where steps begin again, --step-column names a column that goes on" if run.kind == "table" else ""
    return f"{replaced.total()} values, {num_values} of {name}{others}, gave way to a later one of the same step{hint}"


def _counted(log: Log, notes: Notes, advance: Advance) -> Iterator[Row]:
    """The rows up to where the log cannot be read."""
    place = 0
    try:
        for row in log.rows(notes):
            yield row
            if row.place - place > log.size // 500:
                advance(row.place - place)
                place = row.place
    except (OSError, ValueError) as error:  # of the log: those of whoever takes the rows do not come here
        why = getattr(error, "strerror", None) or error
        notes.damage(f"{log.name} cannot be read: {why}; what is before it is imported")
    finally:
        advance(log.size - place)


class Part(NamedTuple):
    """Logs that go on from one another: an attempt."""

    resume_step: int | None
    logs: list[tuple[Log, Survey]]


def parts_of(found: Surveyed) -> list[Part]:
    """The logs of a run by attempt.

    A log that begins after another had ended, before the other's last step, and has the same metrics, is that of a
    training that went on from an earlier checkpoint: it hides what was there from its first step on. One that begins at
    the last step is what was found out at the end, such as an evaluation.
    """
    parts: list[Part] = []
    for log, seen in zip(found.run.logs, found.surveys, strict=True):
        if not seen.num_rows:
            continue
        went_back = bool(parts) and any(
            other.ended <= seen.began and other.last_step > seen.first_step and other.names.keys() & seen.names.keys()
            for _, other in parts[-1].logs
        )
        if not parts:
            parts.append(Part(None, [(log, seen)]))
        elif went_back:
            parts.append(Part(seen.first_step, [(log, seen)]))
        else:
            parts[-1].logs.append((log, seen))
    return parts


def bring(
    found: Surveyed, naming: Naming, begin: Begin, *, run: str | None, project: str | None, advance: Advance
) -> Outcome:
    """Read the run again, and hand its frames to a writer for each attempt."""
    parts, notes = parts_of(found), Notes()
    outcome, edition = None, 0
    while outcome is None:
        outcome = Outcome(run=title(run or found.run.name), project=project_of(found.run, project))
        writers: list[RunWriter] = []
        for number, part in enumerate(parts):
            body = registration(found, outcome.project, outcome.run, part, attempt_key(found, naming, number, part))
            with begin(body, len(parts) - 1 - number, edition) as writer:
                edition = writer.edition if not writers else edition
                if writers and not _goes_on(writers[-1], writer):
                    outcome, edition = None, writer.edition + 1
                    writer.give_up()
                    break
                for log, seen in part.logs:
                    for name, frame in frames(log, seen, found.plan, advance, notes):
                        writer.put(name, frame)
                writer.finish(found.run.state if number == len(parts) - 1 else "failed")
            writers.append(writer)
    outcome.run_id = writers[-1].run_id if writers else None
    outcome.num_new, outcome.num_known = sum(w.num_new for w in writers), sum(w.num_known for w in writers)
    outcome.num_attempts = len(writers)
    found.notes.damages.extend(damage for damage in notes.damages if damage not in found.notes.damages)
    return outcome


def _goes_on(writer: RunWriter, after: RunWriter) -> bool:
    """Whether no other attempt is between these two."""
    return writer.edition == after.edition and (
        writer.attempt is None or after.attempt is None or after.attempt == writer.attempt + 1
    )


def frames(log: Log, seen: Survey, plan: Plan, advance: Advance, notes: Notes) -> Iterator[tuple[str, Frame]]:
    """The frames of a log, each with its writer, up to where the survey came."""
    writer = f"import-{digest(log.name, length=16)}"
    rows = (row for row in _counted(log, notes, advance) if row.ordinal < seen.num_rows)
    for step in joined(rows):
        for band, frame in frames_of(step, plan):
            yield f"{writer}-{band}", frame


def attempt_key(found: Surveyed, naming: Naming, number: int, part: Part) -> str:
    """The same for the same source, however much it has grown, unless its frames would be others."""
    run, plan = found.run, found.plan
    said = json.dumps([VERSION, naming.patterns, naming.same, plan.num_blocks, number, part.resume_step])
    return f"import-{digest(run.kind, run.key, run.columns, said, part.logs[0][0].name, length=32)}"


def registration(found: Surveyed, project: str, run: str, part: Part, key: str) -> dict[str, Any]:
    """The body of `POST /runs`."""
    source = found.run
    return {
        "project": project,
        "run": run,
        "config": _config(source),
        "tags": list(dict.fromkeys(title(tag) for tag in source.tags if tag))[:MAX_TAGS],
        "blocks": [f"layer {number}" for number in range(found.plan.num_blocks)],
        "frozen_blocks": [],
        "resume_step": part.resume_step,
        "attempt_key": key,
    }


def _config(source: SourceRun) -> dict[str, Any]:
    origin = {"imported": {"from": source.kind, "key": source.key}}
    kept = {str(name): _plain(value) for name, value in source.config.items() if name != "imported"}
    if len(json.dumps(kept, ensure_ascii=False).encode(errors="replace")) > MAX_CONFIG_BYTES - 1024:
        return {**origin, "note": "the config of the source was larger than the 1 MiB that is kept"}
    return origin | kept


def _plain(value: Any, depth: int = 0) -> Any:
    """As strict JSON can carry it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, int) and abs(value) >= 2**63:
        return str(value) if abs(value) < 10**4000 else "a very large integer"
    if isinstance(value, bool | int | float) or value is None:
        return value
    if depth < 20 and isinstance(value, Mapping):
        return {str(name).encode(errors="replace").decode(): _plain(inner, depth + 1) for name, inner in value.items()}
    if depth < 20 and isinstance(value, Sequence):
        return [_plain(inner, depth + 1) for inner in value]
    return str(value)


def project_of(run: SourceRun, wanted: str | None) -> str:
    """The project that it goes to."""
    return title(wanted or run.project or "default")


def title(text: str) -> str:
    """As a run, a project or a tag may be called: on one line, and not too long."""
    clean = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", text).encode(errors="replace").decode() or "unnamed"
    return clean if len(clean) <= 128 else f"{clean[:111]}~{digest(text, length=16)}"
