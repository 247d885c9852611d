"""Recounts a database: whether everything in it is whole, and one half of it goes with the other."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, literal, select, union_all

from tsemon.errors import StoreError
from tsemon_server.store.engine import Database, Unit
from tsemon_server.store.ledger import tables
from tsemon_server.store.series import Series
from tsemon_server.store.series.checks import Checked, Finding, Report
from tsemon_server.store.streams import history_of, run_of


def check(database: Database, series: Series[Unit], report: Report) -> Iterator[Checked]:
    """Go through all runs, one after the other."""
    for problem in database.problems():
        report(Finding("", "database", problem))
    with database.reading() as connection:
        run_ids = connection.execute(select(tables.run.c.run_id).order_by(tables.run.c.run_id)).scalars().all()
        known = {*run_ids, *connection.execute(select(tables.tombstone.c.run_id)).scalars()}
        for table, run_id in (*_rows_of_runs(connection), *series.run_ids(Unit(connection))):
            if run_of(run_id) not in known:
                report(Finding(run_id, table, "rows of a run that is not there, nor marked as deleted"))
    for run_id in run_ids:
        findings: list[Finding] = []
        before = _num_frames(database, run_id)
        try:
            checked = series.check(run_id, findings.append)
            of_rows = series.check(history_of(run_id), findings.append)
        except StoreError as error:  # such as a page that SQLite cannot read
            report(Finding(run_id, "run", str(error)))
            continue
        after = _num_frames(database, run_id)
        if before is None or after is None:  # deleted meanwhile, and half of it was gone when it was looked at
            continue
        # Frames may have come while they were counted.
        if not before <= checked.num_hot + checked.num_settled <= after:
            told = f"counts {after} frames, has {checked.num_hot} + {checked.num_settled} settled ones"
            report(Finding(run_id, "run", told))
        for finding in findings:
            report(finding)
        yield _added(checked, of_rows)


def _added(one: Checked, other: Checked) -> Checked:
    return Checked(one.run_id, *map(sum, zip(one[1:], other[1:], strict=True)))


def _num_frames(database: Database, run_id: str) -> int | None:
    """Number of frames that the ledger counts."""
    c = tables.run.c
    with database.reading() as connection:
        return connection.execute(select(c.num_frames).where(c.run_id == run_id)).scalar_one_or_none()


def _rows_of_runs(connection: Connection) -> list[tuple[str, str]]:
    """Tables of the ledger, and the runs that they have rows of."""
    of_tables = (select(literal(table.name), table.c.run_id).distinct() for table in tables.OF_RUN)
    return [(table, run_id) for table, run_id in connection.execute(union_all(*of_tables))]
