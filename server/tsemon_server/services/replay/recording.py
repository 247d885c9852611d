"""What can be replayed: a run that was recorded, wherever that was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, Protocol

from tsemon_server.rules.program import View


class Attempt(NamedTuple):
    """One start of a training process, and what it measured."""

    first_step: int
    """Where it began, or went on from a checkpoint."""
    views: Iterator[View]
    """Its frames in the order of their steps, as the rules of the service would see them."""
    has_ended: Callable[[], bool] = bool
    """True if its training ended. To be asked once its frames are read."""


class Recording(Protocol):
    """A run."""

    @property
    def name(self) -> str: ...
    @property
    def problems(self) -> list[str]:
        """What could not be read; complete once all was."""

    def attempts(self, own: Collection[str] = ()) -> Iterator[Attempt]:
        """Its attempts, oldest first: each is read to its end before the next. Can be gone through once.

        own: Names of the user's own scalars that the rules read. Each frame gets their newest values since the frame before.
        """
