"""What an example finds, in a service where that is known."""

import os
import subprocess
import sys
from pathlib import Path

from tests.clients.conftest import Writer
from tsemon.wire import Array, Frame

EXAMPLE = Path(__file__).parents[2] / "examples/first_escalation.py"
NUM_FRAMES = 1100  # more than a series has points
FIRST = {"at once": 0, "at the end": NUM_FRAMES - 1, "late": 801, "never": NUM_FRAMES}


def test_first_escalation_finds_the_very_step(service):
    writer = Writer(service)
    for name, first in FIRST.items():
        # A spike of one step, and low for good from later on: the first step counts, not the first that lasts.
        last = [0.01 if i == first or i > first + 50 else 0.1 for i in range(NUM_FRAMES)]
        frames = (Frame(i, 7 * i, 1.0, {}, {"token_diversity": Array.of([0.05, 0.05, t])}) for i, t in enumerate(last))
        writer.send(writer.register(name), *frames)
    writer.register("has none")
    environment = os.environ | {"TSEMON_SERVER": service.url}
    printed = subprocess.run(
        [sys.executable, EXAMPLE], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert printed.splitlines() == [
        "p/at once: step 0",
        f"p/at the end: step {7 * (NUM_FRAMES - 1)}",
        f"p/late: step {7 * 801}",
        "p/never: never",
        "3 of 4 runs fell below 0.1",
    ]
