"""Go on from a checkpoint of Hugging Face's Trainer after a crash.   python examples/resume_trainer.py

The training runs twice: the first process is killed at step 25, the second goes on from the checkpoint of step 20. Nothing
is to be told to tsemon: the callback reads the step from the Trainer. Then comes what the spool folder holds.
"""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tsemon.integrations.transformers import TsemonCallback
from tsemon.transport import SpoolReader, find_spools

CHECKPOINTS, SPOOL = Path("resume_trainer"), Path("resume_trainer_spool")


class Killed(TrainerCallback):
    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 25:
            os.kill(os.getpid(), signal.SIGKILL)


def train() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    dataset = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(256, (160, 32))]
    arguments = TrainingArguments(
        str(CHECKPOINTS),
        max_steps=40,
        save_steps=10,
        logging_steps=5,
        per_device_train_batch_size=4,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    is_resumed = any(CHECKPOINTS.glob("checkpoint-*"))
    watching = TsemonCallback(run="resume-trainer", project="examples", every=5, spool_dir=SPOOL)
    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[watching])
    if not is_resumed:
        trainer.add_callback(Killed())
    trainer.train(resume_from_checkpoint=is_resumed)


def show() -> None:
    for folder in find_spools(SPOOL):
        reader = SpoolReader(folder)
        steps = [json.loads(text)["step"] for texts in reader.new_frames() for text in texts]
        print(f"goes on from {reader.registration['resume_step'] or 0}: frames of the steps {steps}")


if __name__ == "__main__":
    for folder in (CHECKPOINTS, SPOOL):
        shutil.rmtree(folder, ignore_errors=True)
    os.environ.pop("TSEMON_SERVER", None)  # which would take what is to be seen here
    for _ in range(2):
        process = multiprocessing.Process(target=train)
        process.start()
        process.join()
        print("killed" if process.exitcode else "finished")
    show()
