"""Delivers what processes that are gone have left in their spools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tsemon.errors import ServerUnreachable, SpoolError, SpoolInUse, TsemonError
from tsemon.transport.courier import Courier
from tsemon.transport.folders import find_spools
from tsemon.transport.http import HttpDelivery
from tsemon.transport.spool import Spool


@dataclass(frozen=True, kw_only=True)
class Synced:
    """What became of one spool."""

    folder: Path
    num_sent: int = 0
    num_remaining: int = 0
    num_refused: int = 0
    """Frames that the service does not take; they stay in the folder's `refused.jsonl`."""
    num_damaged: int = 0
    """Segments that were torn or altered; what stood behind the damage is lost."""
    error: TsemonError | None = None
    """Why it was not delivered to the end, where it was not."""

    @property
    def names(self) -> tuple[str, str]:
        """Project and run, as the folder names them."""
        project, run = map(unquote, self.folder.parts[-3:-1])
        return project, run

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        project, run = self.names
        counts = {name: getattr(self, name) for name in ("num_sent", "num_remaining", "num_refused", "num_damaged")}
        error = None if self.error is None else str(self.error)
        return {"project": project, "run": run, "folder": str(self.folder), **counts, "error": error}

    def __str__(self) -> str:
        """One line: project and run, and what became of their frames."""
        parts = [f"{self.num_sent} frames sent"]
        if self.num_refused:
            parts.append(f"{self.num_refused} refused, see {self.folder / 'refused.jsonl'}")
        if self.num_damaged:
            parts.append(f"{self.num_damaged} damaged segments, what stood behind the damage is lost")
        if self.error:
            parts.append(f"{self.num_remaining} remain: {self.error}")
        return f"{'/'.join(self.names)}: {', '.join(parts)}"


def sync(
    root: Path | str, server: str, *, timeout_s: float = 10.0, on_warning: Callable[[str], None] = lambda _text: None
) -> list[Synced]:
    """Deliver all spools under `root` whose writer is gone, the oldest first, and delete those that are drained.

    A spool that cannot be delivered is reported and does not hold up the others, but once the service does not answer,
    the rest is left for the next time. Calling it again is always right: what has arrived is not stored twice.
    Raises SpoolError where `root` is no folder.
    """
    if not Path(root).is_dir():
        raise SpoolError(f"expected a spool folder, as attach() wrote it, but {root} is not there or is no folder")
    delivery = HttpDelivery(server, timeout_s)
    try:
        return list(deliver_leftovers(find_spools(root), delivery, on_warning))
    finally:
        delivery.close()


def deliver_leftovers(
    folders: Iterable[Path], delivery: HttpDelivery, on_warning: Callable[[str], None]
) -> Iterator[Synced]:
    """Deliver one spool after the other, skipping those whose writer lives; no try is made once nobody answers."""
    unreachable: ServerUnreachable | None = None
    for folder in folders:
        try:
            spool = Spool.open(folder)
        except SpoolInUse:
            continue
        except TsemonError as error:
            yield Synced(folder=folder, error=error)
            continue
        synced = _deliver(spool, delivery, on_warning, unreachable)
        if isinstance(synced.error, ServerUnreachable):
            unreachable = synced.error
        yield synced


def _deliver(
    spool: Spool, delivery: HttpDelivery, on_warning: Callable[[str], None], error: TsemonError | None
) -> Synced:
    courier = Courier(delivery, spool.registration, spool.writer, on_warning=on_warning)
    try:
        if error is None:
            if courier.may_register(spool.has_frames):
                courier.register()
                while courier.send_next(spool):
                    pass
                # No end.json: the writer was killed or crashed, and a run left "running" would never end.
                courier.finish(spool.end_state or "failed")
            spool.discard()
    except TsemonError as reason:
        error = reason
    finally:
        num_remaining = spool.num_unsent
        spool.close()
    return Synced(
        folder=spool.folder,
        num_sent=courier.num_sent,
        num_remaining=num_remaining,
        num_refused=courier.num_refused,
        num_damaged=spool.num_damaged,
        error=error,
    )
