"""The ledger and the series know nothing of each other, and only an engine of the series knows its tables.

These tests read imports only. The proof that an engine can be replaced is contract/test_protocol.py.
"""

import pytest
from sqlalchemy import Table

from tests.test_imports import SOURCES, imports_of
from tsemon_server.store.ledger import tables as ledger
from tsemon_server.store.series import Series
from tsemon_server.store.series.sql import tables as series

STORE = SOURCES["tsemon_server"] / "store"


def imports(folder):
    """{file: the parts of the store, and the packages of others, that it imports}"""
    found = {}
    for path in (STORE / folder).rglob("*.py"):
        names = [name.removeprefix("tsemon_server.store.").split(".") for name in imports_of(path)]
        found[str(path.relative_to(STORE))] = {parts[0] for parts in names}
    return found


def tables_of(module):
    return {value.name for value in vars(module).values() if isinstance(value, Table)}


class TestTheSeam:
    @pytest.mark.parametrize(("folder", "other"), [("ledger", "series"), ("series", "ledger")])
    def test_is_crossed_by_no_import(self, folder, other):
        assert [file for file, names in imports(folder).items() if other in names] == []

    @pytest.mark.parametrize("common", ["engine", "prepared", "schema", "streams", "times"])
    def test_has_what_both_halves_use_below_it(self, common):
        assert not {"ledger", "series"} & {*imports(".")[f"{common}.py"]}

    def test_has_each_table_on_one_side(self):
        assert tables_of(ledger) & tables_of(series) == set()
        assert tables_of(ledger) | tables_of(series) == {*ledger.run.metadata.tables}


class TestTheSeries:
    def test_knows_sql_only_in_its_folder_of_that_name(self):
        free = {file: names for file, names in imports("series").items() if not file.startswith("series/sql/")}
        assert [file for file, names in free.items() if {"sqlalchemy", "engine", "prepared"} & names] == []

    def test_is_a_protocol_without_an_engine(self):
        asked = {name for name, value in vars(Series).items() if callable(value) and not name.startswith("_")}
        asking = {"known", "newest", "live", "at", "nearest", "seconds_at", "read", "export", "backlog", "run_ids"}
        assert asked == {"add", *asking, "settle", "reduce", "drop", "check"}
        assert "Connection" not in (STORE / "series/__init__.py").read_text()
