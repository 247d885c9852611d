"""What the server responds with, as values: the records of `tsemon_answers`, lists of them, and events.

They do not change once they are read. Fields that a newer server adds are left out; fields that an older one lacks are
None or empty. Times are aware, in UTC; steps are optimizer steps, the first is 0; values that are not finite are None.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tsemon_answers import display
from tsemon_answers.alerts import *  # noqa: F403
from tsemon_answers.alerts import Alert
from tsemon_answers.events import EventKind as EventKind
from tsemon_answers.incidents import *  # noqa: F403
from tsemon_answers.operation import *  # noqa: F403
from tsemon_answers.record import Record as Record
from tsemon_answers.replies import *  # noqa: F403
from tsemon_answers.rows import *  # noqa: F403
from tsemon_answers.rules import *  # noqa: F403
from tsemon_answers.runs import *  # noqa: F403
from tsemon_answers.runs import Run
from tsemon_answers.series import *  # noqa: F403
from tsemon_answers.tables import Column, Table, columns_of


class Connected(Record):
    """The server is listening: every change from here on is reported. After the first, the connection was lost."""


class RunChanged(Record):
    """A run has new frames or another state, or was registered."""

    run: Run
    """The run as lists show it."""


class AlertChanged(Record):
    """An alert opened or changed."""

    alert: Alert
    """The alert as it is now."""


class RunDeleted(Record):
    """A run was deleted, with its frames and alerts."""

    run_id: str
    """Id of the run."""


Event = Connected | RunChanged | AlertChanged | RunDeleted

R = TypeVar("R", bound=Record)


class Records(list[R], Table):
    """Records as a list that can become a table with a column per field, and that a notebook shows as one."""

    def __init__(self, model: type[R], records: Iterable[R] = ()) -> None:
        super().__init__(records)
        self._model = model

    def columns(self) -> list[Column]:
        """A row per record, a column per field; lists and objects as JSON text."""
        return columns_of(self._model, self)

    def _repr_html_(self) -> str:
        return display.records(self._model, self)
