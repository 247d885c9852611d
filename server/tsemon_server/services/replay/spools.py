"""Runs that training processes wrote to spool folders, and that nobody has delivered yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from heapq import merge
from itertools import chain, groupby
from pathlib import Path

from tsemon.errors import InvalidArgument
from tsemon.stacks import Stacks
from tsemon.transport import SpoolReader
from tsemon.wire import Frame, Rows, frames_to_body
from tsemon_server.rules.views import views_in_order
from tsemon_server.services.ingest import schemas
from tsemon_server.services.replay.recording import Attempt


class SpooledRun:
    """The spools of one run, oldest first: those of one key are an attempt, in which each is a writer.

    Raises SpoolError where one is damaged at its head.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._spools = [_Spool(SpoolReader(folder)) for folder in folders]
        self.name = str(self._spools[0].reader.registration["run"])

    @property
    def problems(self) -> list[str]:
        return [problem for spool in self._spools for problem in spool.problems]

    def attempts(self, own: Collection[str] = ()) -> Iterator[Attempt]:
        for _, spools in groupby(self._spools, key=lambda spool: spool.attempt_key):
            writers = list(spools)
            first_step = writers[0].reader.registration.get("resume_step") or 0
            frames = merge(*(writer.frames(own) for writer in writers), key=lambda frame: (frame.step, frame.seq))
            views = views_in_order(frames, writers[0].frozen, writers[0].stacks)
            yield Attempt(first_step, views, writers[-1].has_ended)


class _Spool:
    """What one writer left."""

    def __init__(self, reader: SpoolReader) -> None:
        self.reader = reader
        self.problems: list[str] = []
        self.attempt_key = reader.registration.get("attempt_key")
        self.stacks = Stacks.of(len(reader.registration.get("blocks", ())), reader.registration.get("stacks"))
        self.frozen = frozenset(reader.registration.get("frozen_blocks", ()))

    def has_ended(self) -> bool:
        """True if the writer said that the run ended."""
        return self.reader.end_state() in ("finished", "failed")

    def frames(self, own: Collection[str]) -> Iterator[Frame]:
        """The frames, each with the newest of these scalars since the one before."""
        self.reader.is_living()  # what a living writer has not ended yet is no damage
        newest: dict[str, tuple[int, float]] = {}
        for text in chain.from_iterable(self.reader.new_texts()):
            frames, some = self._read(text)
            for rows in some:
                of_names = (
                    (name, (rows.steps[-1], column[-1])) for name, column in rows.scalars.items() if name in own
                )
                newest |= {name: max(found, newest.get(name, found)) for name, found in of_names}
            for frame in frames:
                known = {name: value for name, (_, value) in newest.items()}
                yield replace(frame, scalars={**known, **frame.scalars})
                newest = {}
        damaged = [path.name for path in self.reader.damaged()]
        if damaged:
            self.problems.append(
                f"{self.reader.folder}: {', '.join(damaged)} is damaged, what stands behind that is not read"
            )

    def _read(self, text: str) -> tuple[list[Frame], list[Rows]]:
        """The frame or the rows as the server would take them; nothing if it would refuse them."""
        try:
            sent = schemas.read_frames(frames_to_body(self.reader.writer, 1, [text]))
            return sent.to_frames(self.stacks), sent.to_rows()
        except InvalidArgument as error:
            self.problems.append(f"{self.reader.folder}: a frame is left out, as the service would refuse it: {error}")
            return [], []
