"""What two processes do for `test_acting_ranks`, each by `main`.

They train by DDP until an alert stops them. What each saw is kept in FOLDER/RANK.json.
"""

import datetime
import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import tsemon
from tests import zoo
from tsemon.actions import Burst, LowerLearningRate, SaveCheckpoint, Stop, when
from tsemon.errors import RanksDisagree

EVERY = 12
"""As many as between two exchanges of bursts, so that a burst is apart from the other samples."""
BURST = 6
MAX_STEPS = 20_000


def main(rank, size, folder, server):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=size,
        init_method=f"file://{folder}/store",
        timeout=datetime.timedelta(seconds=120),
    )
    torch.manual_seed(0)
    (model, _), x_TBD = zoo.torch_encoder(), torch.randn(12, 4, 32)
    model.layers[1].requires_grad_(False)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    schedule = LambdaLR(optimizer, lambda step: 0.999**step)
    seen = {"told": [], "incidents": [], "rates": [], "saved": []}

    def attach(on_alert, **options):
        options = {"server": server, "spool_dir": folder / f"spool{rank}", "every": EVERY} | options
        group = dist.group.WORLD
        return tsemon.attach(parallel, optimizer, run="r", on_alert=on_alert, process_group=group, **options)

    try:
        attach(Stop() if rank == 0 else None)
    except RanksDisagree as error:
        seen["error"] = str(error)

    def save(alert):
        seen["saved"].append((alert.alert_id, schedule.last_epoch))
        if rank == 1:
            raise OSError("no space left")

    def note(alert):
        seen["told"].append((alert.alert_id, alert.state, schedule.last_epoch, len(alert.evidence)))

    def note_incident(incident):
        open_ids = [one.incident_id for one in monitor.incidents]
        seen["incidents"].append((incident.incident_id, incident.state, schedule.last_epoch, open_ids))

    lower = LowerLearningRate(optimizer, schedulers=schedule)
    tse = when(do=[SaveCheckpoint(save), lower, Burst(steps=BURST)], families="tse")
    with attach([note, tse, when(do=Stop(), severity="critical")], on_incident=note_incident) as monitor:
        while not monitor.should_stop and schedule.last_epoch < MAX_STEPS:
            optimizer.zero_grad()
            loss = parallel(x_TBD).square().mean()
            loss.backward()
            optimizer.step()
            seen["rates"].append(optimizer.param_groups[0]["lr"])
            schedule.step()
            monitor.step(loss=loss)
        seen["alerts"] = [alert.alert_id for alert in monitor.alerts]
        seen["faults"] = monitor.status.faults
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    # The group is not destroyed. DDP would hold the last reference to it, and PyTorch 2.13 can hang when that goes: it holds
    # the GIL while it waits for gloo's thread, which may need the GIL to release the last all-reduce.
