"""docs/compatibility.md has the set-ups that are tested. What it says of each, their tests hold against what they saw."""

from collections import Counter

from scripts import compatibility
from tests.setups.every import ROWS


class TestTheTableOfSetups:
    def test_has_each_setup_once_and_no_other(self):
        names = [row.name for row in ROWS]
        assert max(Counter(names).values()) == 1
        in_document = [*compatibility.read(compatibility.DOCUMENT.read_text())]
        assert in_document == names, f"write {compatibility.DOCUMENT.name} anew: {compatibility.COMMAND}"
