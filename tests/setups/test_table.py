"""docs/compatibility.md has the set-ups that are tested. What it says of each, their tests hold against what they saw."""

from collections import Counter

from scripts import compatibility
from tests.setups.every import ROWS
from tests.setups.matrix import COLUMNS


class TestTheTableOfSetups:
    def test_has_each_setup_once_and_no_other(self):
        names = [row.name for row in ROWS]
        assert max(Counter(names).values()) == 1
        assert [*documented()] == names, f"write {compatibility.DOCUMENT.name} anew: {compatibility.COMMAND}"

    def test_has_a_dash_where_nothing_is_tried(self):
        tried = {
            name: [column for column in COLUMNS if cells[column] != ["-", ""]] for name, cells in documented().items()
        }
        assert tried == {row.name: [*row.columns] for row in ROWS}


class TestASetupThatIsTriedOnlyWithAll:
    def test_is_like_one_that_is_always_tried(self):
        always = {row.name for row in ROWS if not row.like}
        assert [row.name for row in ROWS if row.like and row.like not in always] == []


def documented():
    return compatibility.read(compatibility.DOCUMENT.read_text())
