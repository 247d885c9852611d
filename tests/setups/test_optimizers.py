from tests.setups.contract import TestEverySetup
from tests.setups.optimizers import SETUPS

__all__ = ["SETUPS", "TestEverySetup"]
