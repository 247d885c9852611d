from tests.zoo.contract import TestEverySpecimen
from tests.zoo.handmade import SPECIMENS

__all__ = ["SPECIMENS", "TestEverySpecimen"]
