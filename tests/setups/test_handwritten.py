import pytest
from torch import nn

import tsemon
from tests.setups.contract import TestEverySetup
from tests.setups.handwritten import POINTED_AT, SETUPS
from tests.setups.models import Tower
from tsemon.errors import InvalidArgument, NoBlocksFound

__all__ = ["SETUPS", "TestEverySetup"]


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


class TestAModelInWhichNothingIsFound:
    def test_is_told_with_the_nearest_guess_and_the_way_out(self, tmp_path):
        with pytest.raises(NoBlocksFound) as raised:
            tsemon.attach(Cells(), run="r", spool_dir=tmp_path)
        text = str(raised.value)
        assert "found no transformer blocks in Cells" in text
        assert "the lists of modules in it are cells (3 x Linear)" in text
        assert "attach(..., blocks=[" in text

    def test_is_told_what_of_the_way_out_is_wrong(self, tmp_path):
        with pytest.raises(InvalidArgument, match=r"no module named 'cells\.3'"):
            tsemon.attach(Tower(), run="r", blocks=["cells.0", "cells.3"], spool_dir=tmp_path)
        with pytest.raises(InvalidArgument, match="there are 3 blocks, got 1 attentions"):
            tsemon.attach(Tower(), run="r", **POINTED_AT | {"attention": ["cells.0.mix"]}, spool_dir=tmp_path)

    def test_leaves_no_run_behind(self, tmp_path):
        with pytest.raises(NoBlocksFound):
            tsemon.attach(Cells(), run="r", spool_dir=tmp_path)
        assert list(tmp_path.iterdir()) == []
