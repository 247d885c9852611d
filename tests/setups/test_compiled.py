from tests.setups.compiled import SETUPS
from tests.setups.contract import TestEverySetup
from tests.setups.harness import unwatched, watched
from tests.setups.matrix import GRAPHS, IN_PART, YES, Cell

__all__ = ["SETUPS", "TestEverySetup"]


class TestACompiledSetup:
    def test_is_compiled_to_the_same_graphs(self, setup, matrix):
        plain = unwatched(setup).num_graphs
        more = [watched(setup, every).num_graphs - plain for every in (1, 2)]
        assert plain > 0
        assert min(more) >= 0
        assert max(more) == bool(setup.more_graphs)
        matrix.record(setup, GRAPHS, Cell(IN_PART if setup.more_graphs else YES, setup.more_graphs))
