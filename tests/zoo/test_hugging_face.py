from tests.zoo.contract import TestEverySpecimen
from tests.zoo.hugging_face import SPECIMENS

__all__ = ["SPECIMENS", "TestEverySpecimen"]
