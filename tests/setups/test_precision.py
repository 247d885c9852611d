from tests.setups.contract import TestEverySetup
from tests.setups.precision import SETUPS

__all__ = ["SETUPS", "TestEverySetup"]
