"""Tests of every specimen. A test file imports this class and lists its SPECIMENS."""

import pytest

from tests.setups.matrix import BIT_EQUAL, BLOCKS, CLEAN, NO, WRONG, YES, Cell
from tests.zoo.known_wrong import KNOWN_WRONG
from tests.zoo.verdict import METRICS, answer, differences, stacks_of, wrong_values

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class TestEverySpecimen:
    pytestmark = pytestmark

    def test_has_the_blocks_that_it_is_known_to_have(self, trained, judge):
        found, expected = stacks_of(trained), trained.subject.depths()
        judge(BLOCKS, [] if found in expected else [f"found {found} of {expected[0]}"], Cell(found))

    def test_trains_as_without_tsemon(self, trained, judge):
        judge(BIT_EQUAL, differences(trained), Cell(YES if trained.has_blocks else NO))

    def test_is_left_as_it_was_found(self, trained, judge):
        judge(CLEAN, trained.traces, Cell(YES if trained.has_blocks else NO))

    @pytest.mark.parametrize("family", METRICS)
    def test_agrees_with_the_definitions_or_is_missing_with_a_reason(self, trained, family, judge):
        if not trained.has_blocks or BLOCKS in KNOWN_WRONG.get(trained.specimen.name, ()):
            judge(family, [], Cell(NO, "not before its blocks are found"))
            return
        wrong = wrong_values(family, trained)
        judge(family, wrong, None if wrong else answer(family, trained))


@pytest.fixture
def judge(trained, matrix, request):
    """Record a result in the table and fail if something is wrong, as an expected failure if it is in KNOWN_WRONG."""

    def record(column, wrong, right):
        known = KNOWN_WRONG.get(trained.specimen.name, {}).get(column)
        if known is not None:
            request.applymarker(pytest.mark.xfail(strict=True, reason=known))
        matrix.record(trained.specimen, column, Cell(WRONG, known or wrong[0]) if wrong else right)
        assert wrong == []

    return record
