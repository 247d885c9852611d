"""`tsemon scan`: a folder of checkpoints becomes a run."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.markup import escape

from tsemon.errors import InvalidArgument, MissingData, ServerUnreachable, TsemonError
from tsemon.registration import registration
from tsemon.terminal import printable
from tsemon.tools.scanning.finding import step_pattern
from tsemon.tools.scanning.inputs import Source
from tsemon.tools.scanning.report import Report
from tsemon.tools.scanning.scanner import Record, Scanner
from tsemon.tools.scanning.stored import Mark, Served, Spooled, Stored, num_stacks
from tsemon.transport import RunWriter, attempt_key, run_writer
from tsemon.wire import MAX_REASON

TAG = "scan"
"""Which says of a run that no training writes it."""
WRITER = "scan"
SPOOL_DIR = ".tsemon"
PATIENCE_S = 120.0
"""For so long a service is asked again that is busy, or does not answer."""
OF_THE_ATTEMPT = ("begins", "attempts_before")
"""What the config has besides the settings of the scan: where an attempt begins, and how many there were before."""
POLL_S = 2.0
"""How long after one look at a folder that is followed the next one comes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    folder: Path
    run: str | None = None
    """By default the folder's name and `-scan`."""
    project: str = "default"
    server: str | None = None
    spool: Path | None = None
    step_pattern: str | None = None
    blocks: tuple[str, ...] = ()
    text: Path | None = None
    tokens: Path | None = None
    saturation: bool = True
    follow: bool = False
    as_json: bool = False


def run_scan(options: Options) -> None:
    """Scan, write and tell. Raises MissingData where the folder holds no checkpoint."""
    if options.server is not None and options.spool is not None:
        raise InvalidArgument("expected --server or --spool, got both")
    server = options.server or (None if options.spool else os.environ.get("TSEMON_SERVER") or None)
    spool = None if server else options.spool or Path(SPOOL_DIR)
    console, progress = Console(highlight=False), Console(stderr=True, highlight=False)
    run = options.run or f"{options.folder.resolve().name or 'checkpoints'}-scan"
    report = Report(options.project, run, f"at {server}" if server else f"in the folder {spool}")
    source = Source(text=options.text, tokens=options.tokens) if options.saturation else None
    with progress.status("looking for checkpoints") as status:
        scanner = Scanner(
            options.folder,
            pattern=step_pattern(options.step_pattern),
            blocks=options.blocks,
            source=source,
            on_begin=lambda name: status.update(escape(f"{len(report.records) + 1}: {printable(name)}")),
        )
        try:
            _write(scanner, report, options, server, spool, progress)
        finally:
            scanner.close()
    if not report.records:
        left_out = "".join(
            f"\n  {printable(name)}: {printable(reason)}" for name, reason in sorted(scanner.left_out.items())
        )
        raise MissingData(f"no checkpoint was found in {options.folder}{left_out and '; left out:'}{left_out}")
    if options.as_json:
        print(json.dumps(report.as_json(scanner), allow_nan=False, indent=1))
    else:
        report.show(scanner, console)


def _write(
    scanner: Scanner, report: Report, options: Options, server: str | None, spool: Path | None, progress: Console
) -> None:
    def warn(text: str) -> None:
        progress.print(printable(text), markup=False, soft_wrap=True)

    # While a folder is followed, what was measured waits, and the folder is looked at meanwhile.
    patience_s = 0.0 if options.follow else PATIENCE_S
    stored: Stored
    if server is not None:
        stored = Served(report.project, report.run, server, patience_s, warn)
    else:
        assert spool is not None
        stored = Spooled(report.project, report.run, spool)

    def begin(body: dict[str, object]) -> RunWriter:
        check = _check_is_ours(body)
        return run_writer(body, server=server, spool=spool, check=check, on_warning=warn, patience_s=patience_s)

    is_away = False

    def deliver(act: Callable[[], None]) -> None:
        nonlocal is_away
        try:
            act()
            is_away = False
        except ServerUnreachable as error:
            if not options.follow:
                raise
            if not is_away:
                warn(f"{error}; what was measured waits here")
            is_away = True

    with _Delivery(lambda: _registration(scanner, report, options), begin, stored, report) as delivery:
        with _ending_at_ctrl_c(options.follow):
            while True:
                for record in scanner.look():
                    report.records.append(record)
                    delivery.keep(record, scanner.not_measured)
                    deliver(delivery.flush)
                deliver(delivery.settle)
                if not options.follow:
                    return
                time.sleep(POLL_S)
        delivery.stop()


class _Delivery:
    """Frames on their way, which wait while the service is away.

    A scan goes on in the newest attempt where that had the same settings. A checkpoint that is not the one that the run
    shows at its step was overwritten since, as by a training that went back and did it again: a new attempt goes on from
    it, and hides what is behind it. Other settings give other values all along: their attempt hides all.
    """

    def __init__(
        self,
        register: Callable[[], dict[str, Any]],
        begin: Callable[[dict[str, Any]], RunWriter],
        stored: Stored,
        report: Report,
    ) -> None:
        self._register = register
        self._begin = begin
        self._stored = stored
        self._report = report
        self._waiting: deque[tuple[Record, dict[str, str]]] = deque()
        self._writer: RunWriter | None = None
        self._is_new_run = False
        self._told: dict[str, str] | None = None
        """Why something is not measured, as this attempt was told last."""
        self._num_new = self._num_refused = 0
        """Of the attempts before this one."""
        self._is_settled = True

    def keep(self, record: Record, not_measured: Mapping[str, str]) -> None:
        """Take what was measured of a checkpoint; `flush` brings it away."""
        self._waiting.append((record, {name: text[:MAX_REASON] for name, text in not_measured.items()}))
        self._is_settled = False

    def settle(self) -> None:
        """Say that the run has ended: between two checkpoints there is nothing to watch, and it would be called silent."""
        if not self._is_settled:
            self.flush()
            assert self._writer is not None
            self._writer.finish()
            self._is_settled = True

    def stop(self) -> None:
        """Say that the run has ended, though something may wait here yet."""
        if self._writer is not None:
            with contextlib.suppress(TsemonError):
                self._writer.give_up("finished")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stored.close()
        if self._writer is not None:
            self._writer.__exit__(*raised)

    def flush(self) -> None:
        """Bring away what was kept. Do it again where that fails: nothing is lost."""
        if self._writer is None:
            self._go_on(self._waiting[0][0])
        while self._waiting:
            record, why = self._waiting[0]
            frame = record.frame(why if why != self._told else None)
            there = None if self._is_new_run else self._stored.at(record.step)
            if there is not None and there.is_same(Mark.of(frame)):
                self._report.num_known += 1
            else:
                if there is not None:
                    self._go_back(record)
                    frame = record.frame(why)
                assert self._writer is not None
                self._writer.put(WRITER, frame)
                self._told = why
            self._waiting.popleft()
        assert self._writer is not None
        self._writer.flush()
        self._report.run_id = self._writer.run_id
        self._report.num_new = self._num_new + self._writer.num_new
        self._report.num_refused = self._num_refused + self._writer.num_refused

    def _go_on(self, record: Record) -> None:
        """In the newest attempt, or in a new one from the start where that had other settings."""
        body = self._register()
        newest = self._stored.newest()
        self._is_new_run = newest is None
        about = body["config"]["scan"]
        there = newest.config.get("scan") if newest is not None else None
        if (
            newest is not None
            and isinstance(there, dict)
            and {name: value for name, value in there.items() if name not in OF_THE_ATTEMPT} == about
            and list(newest.blocks) == body["blocks"]
            and newest.num_stacks == num_stacks(body)
        ):
            about |= {name: there.get(name) for name in OF_THE_ATTEMPT}
        else:
            _set_attempt(about, record, 0 if newest is None else newest.num_attempts)
            if newest is not None:
                self._stored.hide_from(0)
            elif self._stored.may_have_been_sent:
                body["resume_step"] = record.step or None  # what was sent before of older steps stays
        self._writer = self._begin(_with_key(body))

    def _go_back(self, record: Record) -> None:
        """To a checkpoint that is there anew."""
        assert self._writer is not None
        self._writer.finish()
        newest, body = self._stored.newest(), self._register()
        _set_attempt(body["config"]["scan"], record, 0 if newest is None else newest.num_attempts)
        body["resume_step"] = record.step
        writer = self._begin(_with_key(body))
        self._stored.hide_from(record.step)
        self._num_new, self._num_refused = (
            self._num_new + self._writer.num_new,
            self._num_refused + self._writer.num_refused,
        )
        self._writer.close()
        self._writer = writer
        self._report.overwritten_from = min(record.step, self._report.overwritten_from or record.step)


def _set_attempt(about: dict[str, Any], record: Record, num_before: int) -> None:
    """What tells an attempt from others of the same settings."""
    about |= {"begins": [record.step, record.time], "attempts_before": num_before}


def _with_key(body: dict[str, Any]) -> dict[str, Any]:
    """The same again is the same attempt, something else a new one."""
    about = [TAG, body["project"], body["run"], body["config"]["scan"], body["blocks"]]
    return {**body, "attempt_key": attempt_key(*about)}


def _check_is_ours(body: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], None]:
    """A run without the tag is somebody's training, one of another folder another scan; a new attempt would hide it."""

    def check(there: Mapping[str, Any]) -> None:
        if TAG not in (there.get("tags") or ()):
            raise InvalidArgument(
                f"there is a run {body['run']!r} in project {body['project']!r} that is no {TAG} (it has no tag {TAG!r}), "
                "and its frames would be hidden; choose another --run"
            )
        about = (there.get("config") or {}).get("scan")
        folder = about.get("folder") if isinstance(about, dict) else None
        if folder != body["config"]["scan"]["folder"]:
            raise InvalidArgument(
                f"the run {body['run']!r} in project {body['project']!r} is the scan of another folder, "
                f"{folder or 'which its config does not name'}, and its frames would be hidden; choose another --run"
            )

    return check


def _registration(scanner: Scanner, report: Report, options: Options) -> dict[str, Any]:
    """Without its key; what is in the config of the scan decides the values."""
    assert scanner.groups is not None
    about = {
        "folder": os.fsencode(options.folder.resolve()).decode(errors="replace"),  # a name need not be UTF-8
        "saturation_on": scanner.saturation_on,
        "saturation_inputs": scanner.saturation_inputs,
        "step_pattern": options.step_pattern,
    }
    return registration(
        project=report.project,
        run=report.run,
        config={"scan": about},
        tags=[TAG],
        blocks=list(scanner.groups.blocks),
        stacks=scanner.groups.stacks,
        frozen_blocks=[],
        resume=None,
    )


@contextlib.contextmanager
def _ending_at_ctrl_c(is_following: bool) -> Iterator[None]:
    """To stop following a folder is no failure."""
    try:
        yield
    except KeyboardInterrupt:
        if not is_following:
            raise
