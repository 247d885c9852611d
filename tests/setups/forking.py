"""A program that trains, forks between two sampled steps, and goes on in both processes: `forking.py FOLDER SERVER`."""

import os
import sys
from pathlib import Path

import torch

from tests.setups import loops
from tests.setups.harness import NUM_STEPS, attach, outcome_of, seeded


def main(folder, server):
    torch.set_num_threads(1)
    training, losses = seeded(loops.SETUPS[0].build), []
    monitor, child = attach(training, folder / "spool", server=server), None
    for step in range(NUM_STEPS):
        if step == 2:
            child = os.fork()
            if child:
                _, status = os.waitpid(child, 0)
                (folder / "exit code").write_text(str(os.waitstatus_to_exitcode(status)))
                is_ended = (monitor.status.delivery.spool_folder / "end.json").exists()
                (folder / "run").write_text("ended" if is_ended else "goes on")
        losses.append(training.step())
        monitor.step(loss=losses[-1])
    monitor.close(timeout_s=0.5)
    torch.save(outcome_of(training, losses), folder / ("parent" if child else "child"))
    if child == 0:
        # Closed, and closed again at the interpreter's exit, which runs in a forked process, too.
        sys.exit(7)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
