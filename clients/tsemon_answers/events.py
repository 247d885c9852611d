"""The stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from tsemon_answers.record import Query

EventKind = Literal["run", "alert"]
LONGEST_S = 3600
"""Maximum length of one stream, in seconds."""


class EventsQuery(Query):
    """Changes of runs and alerts, while they happen."""

    run_ids: Annotated[Sequence[str], Field(alias="run", max_length=100)] = ()
    """Only the runs with these ids, up to 100, each as `run=`."""
    kinds: Annotated[Sequence[EventKind], Field(alias="kind", max_length=2)] = ()
    """Only events of these kinds, each as `kind=`."""
    seconds: Annotated[int, Field(ge=0, le=LONGEST_S)] = LONGEST_S
    """End after this time; ask again for more."""
