"""docs/compatibility.md says what these tests saw. Runs after all others."""

from collections import Counter

from scripts import compatibility
from tests.setups.every import ROWS


class TestTheTableOfSetups:
    def test_says_what_was_seen(self, matrix):
        committed = compatibility.DOCUMENT.read_text().splitlines()
        seen = [line for row in ROWS if (line := matrix.line(row)) is not None]
        assert [line for line in seen if line not in committed] == [], f"now run: {compatibility.COMMAND}"

    def test_has_each_setup_once_and_no_other(self):
        names = [row.name for row in ROWS]
        assert max(Counter(names).values()) == 1
        assert compatibility.names_in(compatibility.DOCUMENT.read_text()) == names, f"run: {compatibility.COMMAND}"
