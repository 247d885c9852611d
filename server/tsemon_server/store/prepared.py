"""Statements of the path that every frame takes, handed to the driver as they are.

SQLAlchemy takes some 0.2 ms to hand over one of them, and SQLite a tenth of that to run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Dialect
from sqlalchemy.sql.expression import ClauseElement

Values = Mapping[str, Any]


class Prepared:
    """A statement that is compiled once for each engine. Values and rows are the driver's: JSON goes as text."""

    def __init__(self, statement: ClauseElement) -> None:
        self._statement = statement
        self._compiled: dict[str, _Compiled] = {}

    def run(self, connection: Connection, values: Values) -> Any:
        """The driver's cursor."""
        compiled = self._for(connection.dialect)
        return _driver(connection).execute(compiled.sql, compiled.arrange(values))

    def run_many(self, connection: Connection, rows: Sequence[Values]) -> None:
        """Once for each of the rows."""
        if len(rows) == 1:  # PostgreSQL's driver makes more of many
            self.run(connection, rows[0])
            return
        compiled = self._for(connection.dialect)
        _driver(connection).cursor().executemany(compiled.sql, [compiled.arrange(row) for row in rows])

    def _for(self, dialect: Dialect) -> _Compiled:
        found = self._compiled.get(dialect.name)
        if found is None:
            found = self._compiled[dialect.name] = _compile(self._statement, dialect)
        return found


class _Compiled(NamedTuple):
    sql: str
    arrange: Callable[[Values], Any]
    """As the driver wants the values."""


def _compile(statement: ClauseElement, dialect: Dialect) -> _Compiled:
    compiled = statement.compile(dialect=dialect)
    fixed = {name: value for name, value in compiled.params.items() if value is not None}
    order: list[str] | None = compiled.positiontup  # type: ignore[attr-defined]
    if order is None:
        return _Compiled(str(compiled), lambda values: {**fixed, **values})
    return _Compiled(str(compiled), lambda values: [values[name] if name in values else fixed[name] for name in order])


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection
