"""Who wrote a frame: part of the key of all that is stored of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import and_


class Stream(NamedTuple):
    """What one writer sent in one attempt."""

    run_id: str
    attempt: int
    writer: str

    def of(self, table: Any) -> Any:
        """Its rows of a table."""
        c = table.c
        return and_(c.run_id == self.run_id, c.attempt == self.attempt, c.writer == self.writer)
