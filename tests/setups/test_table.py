"""docs/compatibility.md says what these tests saw. Runs after all others."""

from collections import Counter

from scripts import compatibility
from tests.setups.every import ROWS


class TestTheTableOfSetups:
    def test_says_what_was_seen(self, matrix):
        """Of every set-up whose tests have all run, and passed."""
        committed = compatibility.read(compatibility.DOCUMENT.read_text())
        seen = {row.name: cells for row in ROWS if (cells := matrix.cells(row))}
        different = {name: cells for name, cells in seen.items() if cells != committed.get(name)}
        assert different == {}, f"{compatibility.DOCUMENT.name} says otherwise; write it anew: {compatibility.COMMAND}"

    def test_has_each_setup_once_and_no_other(self):
        names = [row.name for row in ROWS]
        assert max(Counter(names).values()) == 1
        in_document = [*compatibility.read(compatibility.DOCUMENT.read_text())]
        assert in_document == names, f"write {compatibility.DOCUMENT.name} anew: {compatibility.COMMAND}"
