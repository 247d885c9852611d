from tests.setups.contract import TestEverySetup
from tests.setups.loops import SETUPS

__all__ = ["SETUPS", "TestEverySetup"]
