import pytest
import torch

from tests.setups import hugging_face
from tests.setups.contract import TestEverySetup
from tests.setups.harness import values, watched
from tests.setups.hugging_face import SETUPS

__all__ = ["SETUPS", "TestEverySetup"]


@pytest.mark.parametrize(
    ("eager", "sdpa"), hugging_face.PAIRS.values(), ids=[make.__name__ for make in hugging_face.PAIRS]
)
class TestEagerAndFusedAttention:
    def test_are_measured_alike(self, eager, sdpa):
        """In the first step, before the two round differently into weights of their own."""
        first, second = watched(eager, 1).frames[0], watched(sdpa, 1).frames[0]
        assert first["layers"].keys() == second["layers"].keys()
        for metric in ("attention_entropy", "attention_entropy_min", "token_similarity", "hidden_rms", "grad_norm"):
            a, b = values(first, metric), values(second, metric)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
