"""What two processes do for `test_cadence_of_ranks`, each by `main`: rank 1 comes late to its first step,
and both pause between two samples that are near."""

import datetime
import json
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tsemon
from tests import zoo

STEPS = 200
LATE_S = 0.3
PAUSE_AT, PAUSE_S = 15, 0.5


def main(rank, size, folder):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{folder}/store", timeout=timeout)
    torch.manual_seed(0)
    (model, _), x_TBD = zoo.torch_encoder(), torch.randn(12, 4, 32)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampled, costs = [], []
    with tsemon.attach(
        parallel, optimizer, run="r", spool_dir=folder / f"spool{rank}", process_group=dist.group.WORLD
    ) as monitor:
        next_gap = monitor._cadence.next_gap
        monitor._cadence.next_gap = lambda spent, **tiers: costs.append(spent) or next_gap(spent, **tiers)
        time.sleep(LATE_S * rank)
        begun_at = time.perf_counter()
        for step in range(STEPS):
            time.sleep(PAUSE_S if step == PAUSE_AT else 0.0)
            optimizer.zero_grad()
            loss = parallel(x_TBD).square().mean()
            loss.backward()
            optimizer.step()
            if monitor.is_sampling:
                sampled.append(step)
            monitor.step(loss=loss)
        seconds = time.perf_counter() - begun_at
        faults = list(monitor.status.faults)
    seen = {"sampled": sampled, "costs": costs, "faults": faults, "seconds": seconds}
    (folder / f"{rank}.json").write_text(json.dumps(seen))
