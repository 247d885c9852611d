"""Ranks that follow a budget choose the same steps, whatever the time that each of them takes."""

import json
import subprocess

from tests.processes import Program
from tests.tsemon import pacing

SIZE = 2


def test_ranks_sample_the_same_steps_though_one_is_late_for_the_first(tmp_path):
    ranks = [Program(pacing.main, rank, SIZE, tmp_path, stderr=subprocess.PIPE) for rank in range(SIZE)]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(SIZE))
    # Different costs could still lead to equal gaps by chance.
    assert first == second
    assert not first["faults"]
    assert first["sampled"][:2] == [0, 10]
    assert len(first["costs"]) == len(first["sampled"]) >= 3
