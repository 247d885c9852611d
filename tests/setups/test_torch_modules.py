from tests.setups.contract import TestEverySetup
from tests.setups.torch_modules import SETUPS

__all__ = ["SETUPS", "TestEverySetup"]
