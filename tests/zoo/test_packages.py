from tests.zoo.contract import TestEverySpecimen
from tests.zoo.packages import SPECIMENS

__all__ = ["SPECIMENS", "TestEverySpecimen"]
