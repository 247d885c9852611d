"""The verdicts on all recorded trainings, as a replay gives them."""

import functools

import pytest

from tests.server.rules.traces import FOLDER, read
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.services.replay.replaying import replay
from tsemon_server.services.replay.traces import Trace

WITH_BLOCKS = {"tse", "norm", "rank", "entropy", "dead"}
"""Families whose verdicts always name blocks."""
ALSO_RIGHT = {"diverge": {"loss"}}
"""Other families that are the right verdict: a loss that jumps is what there is to see."""
WRONG = {"tse_pre_lr-s0"}
"""Attention collapses within 15 steps, long before tokens grow alike."""
EVALUATOR = Evaluator(PACK)


@functools.cache
def recorded(name):
    path = FOLDER / f"{name}.jsonl.gz"
    return read(path).header, replay(Trace(path), EVALUATOR).incidents


NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_training_has_one_verdict_with_blocks_or_none_if_it_is_healthy(name):
    header, incidents = recorded(name)
    if not header["failing"]:
        assert header["gray"] or not incidents
        return
    (verdict,) = incidents
    assert verdict.step >= header["event_step"]
    assert (verdict.family in {header["family"]} | ALSO_RIGHT.get(header["family"], set())) is (name not in WRONG)
    assert verdict.blocks is not None or verdict.family not in WITH_BLOCKS
