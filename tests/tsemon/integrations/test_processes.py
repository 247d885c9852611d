"""Two processes of a data-parallel training each, on one machine."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
from torch.distributed import TCPStore

from tests.processes import run, start_python
from tests.tsemon.integrations.recording import recorded

TRANSFORMERS = """
from transformers import Trainer, TrainingArguments
from tests.tsemon.integrations.test_transformers import SAMPLES, callback, zoo
args = TrainingArguments(f"{folder}/trainer", report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
    per_device_train_batch_size=1, num_train_epochs=1, ddp_backend="gloo")
watching = callback(f"{folder}/run")
Trainer(zoo.gpt2()[0], args, train_dataset=SAMPLES, callbacks=[watching]).train()
monitor = watching.monitor
"""
LIGHTNING = """
from tests.tsemon.integrations.test_lightning import GPT, SAMPLES, DataLoader, callback, pl
watching = callback(f"{folder}/run")
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, callbacks=[watching],
    enable_checkpointing=False, enable_progress_bar=False, default_root_dir=folder)
trainer.fit(GPT(), DataLoader(SAMPLES))
monitor = watching.monitor
"""
ACCELERATE = """
from tests.tsemon.integrations.test_accelerate import train
*_, attached = train(f"{folder}/run", batch_size=1)
monitor = attached.monitor
"""


def by_torchrun(program):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def as_by_torchrun(program):
    """With what torchrun gives each of them, forked."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    environments = [os.environ | place | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(run, start_python, program, environment=environment) for environment in environments]
        for done in as_completed(ranks):  # the one that failed, before the one that waits for it
            assert done.result().returncode == 0, done.result().stderr


@pytest.mark.parametrize("launch", [as_by_torchrun, pytest.param(by_torchrun, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("training", "block", "num_steps"),
    [
        (TRANSFORMERS, "transformer.h.0", 5),
        pytest.param(LIGHTNING, "gpt.transformer.h.0", 5, marks=pytest.mark.thorough),
        (ACCELERATE, "transformer.h.0", 6),
    ],
    ids=["transformers", "lightning", "accelerate"],
)
def test_only_the_main_process_attaches(launch, training, block, num_steps, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        f"import os; folder = {str(tmp_path)!r}\n{training}\n"
        "open(f'{folder}/watched-' + os.environ['RANK'], 'w').write(monitor.status.blocks[0] if monitor else 'nothing')\n"
        # A process that ends without this is aborted by PyTorch now and then: the Trainer leaves its group behind.
        "import torch.distributed as dist; dist.is_initialized() and dist.destroy_process_group()\n"
        "os._exit(0)\n"  # on a busy machine, what PyTorch takes apart after that hangs now and then
    )
    launch(program)
    assert [(tmp_path / f"watched-{rank}").read_text() for rank in (0, 1)] == [block, "nothing"]
    run = recorded(tmp_path / "run")
    assert (run.state, run.steps) == ("finished", [*range(num_steps)])
    assert all({"token_similarity", "grad_norm"} <= {*frame["layers"]} for frame in run.frames)
