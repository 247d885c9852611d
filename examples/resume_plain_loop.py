"""Go on from a checkpoint after a crash.   python examples/resume_plain_loop.py

The training runs twice: the first process is killed at step 25, the second goes on from the checkpoint of step 20. Then
comes what the spool folder holds: two attempts at one run. The second hides, and keeps, what the first has from step 20 on.
"""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import torch

import tsemon
from tsemon.lab.train import standard_library_text, text_batches
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig
from tsemon.transport import SpoolReader, find_spools

CHECKPOINT, SPOOL = Path("resume_plain_loop.pt"), Path("resume_plain_loop_spool")


def train() -> None:
    torch.manual_seed(0)
    model = CausalLanguageModel(CausalLanguageModelConfig(vocab=256, context=32, depth=4, width=32, heads=4, ffn=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = text_batches(standard_library_text(100_000), context=32, batch_size=4, seed=0)
    monitor = tsemon.attach(model, optimizer, run="resume-plain-loop", project="examples", every=5, spool_dir=SPOOL)
    parts = {"model": model, "optimizer": optimizer, "batches": batches, "monitor": monitor}

    is_resumed = CHECKPOINT.exists()
    if is_resumed:
        state = torch.load(CHECKPOINT, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    with monitor:
        for step in range(monitor.state_dict()["step"], 40):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
            if step % 10 == 9:  # after monitor.step, so that the checkpoint counts this step
                torch.save({name: part.state_dict() for name, part in parts.items()}, CHECKPOINT)
            if step == 24 and not is_resumed:
                os.kill(os.getpid(), signal.SIGKILL)


def show() -> None:
    for folder in find_spools(SPOOL):
        reader = SpoolReader(folder)
        steps = [json.loads(text)["step"] for texts in reader.new_frames() for text in texts]
        print(f"goes on from {reader.registration['resume_step'] or 0}: frames of the steps {steps}")


if __name__ == "__main__":
    CHECKPOINT.unlink(missing_ok=True)
    shutil.rmtree(SPOOL, ignore_errors=True)
    os.environ.pop("TSEMON_SERVER", None)  # which would take what is to be seen here
    for _ in range(2):
        process = multiprocessing.Process(target=train)
        process.start()
        process.join()
        print("killed" if process.exitcode else "finished")
    show()
