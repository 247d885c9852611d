"""What two processes do for `test_zooming_ranks`, each by `main`.

Each function below is one scenario, with a process group of its own. What a rank saw is kept in FOLDER/RANK.json.
"""

import datetime
import json
import math
import os
import random
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import tsemon
from tests import zoo
from tests.tsemon.test_actions import alert
from tsemon import schedule

STEPS = 260
EVENTS = {1: 131, 0: 204}
"""The step of each rank whose loss is not finite: the last one before an exchange, and the first one after."""
BURST_AT = 195
"""The step at which rank 1 asks for a burst, alone or with rank 0."""
PENDING, HEARD_AT = range(130, 170), 205
ENDS_AT = 35
LATE_S, TIMEOUT_S = 0.4, 2.0
LONG = 4000


class Loop:
    """Steps without a model, so that all collectives are those of a monitor. Only zooms sample after step 90."""

    def __init__(self, rank, group, folder, **options):
        (model, _), options = zoo.torch_encoder(), {"budget": 1e-6} | options
        options |= {"measures": ["token_similarity", "effective_rank"], "spool_dir": folder / f"spool{rank}"}
        self.monitor = tsemon.attach(model, run="r", process_group=group, **options)
        self.sampled, self.begun_at = [], time.monotonic()

    def run(self, num_steps=STEPS, loss_of=lambda step: 2.0):
        for _ in range(num_steps):
            step = self.monitor.num_steps
            loss = loss_of(step)
            if self.monitor.is_sampling:
                self.sampled.append((step, self.monitor._cadence.gap, self.monitor._cadence.is_slow))
            try:
                self.monitor.step(loss=loss)
            except KeyboardInterrupt:  # in a notebook the next cell goes on
                assert self.monitor._ranks.is_broken

    def seen(self, **more):
        self.monitor.close()
        status = self.monitor.status
        seen = {"sampled": self.sampled, "zooms": status.zooms, "faults": status.faults}
        return seen | {"took_s": time.monotonic() - self.begun_at} | more


def loss_of_event(rank):
    return lambda step: math.nan if step == EVENTS.get(rank) else 2.0


def training(rank, group, folder):
    """Data parallel training with a loss that is not finite in each rank alone, and two samples before the second zoom."""
    (model, _), x_TBD = zoo.torch_encoder(), torch.randn(12, 4, 32)
    parallel = DistributedDataParallel(model, process_group=group)
    loop = Loop(rank, group, folder)

    def loss_of(step):
        parallel(x_TBD).square().mean().backward()
        if (rank, step) == (1, BURST_AT):
            loop.monitor.burst(steps=2, every=1)
        return loss_of_event(rank)(step)

    with mock.patch.object(schedule, "ZOOM_SHARE", 1e9):
        loop.run(loss_of=loss_of)
    return loop.seen()


def refused(rank, group, folder):
    """Earlier zooms have used up their part of the budget. In rank 1, two losses are not finite."""
    loop = Loop(rank, group, folder)
    loop.monitor._cadence._zoomed_s, loop.monitor._cadence._num_zoomed = 1e9, schedule.ZOOM_SAMPLES
    loop.run(loss_of=lambda step: math.nan if rank == 1 and step in EVENTS.values() else 2.0)
    return loop.seen(refusals=loop.monitor.status.refusals)


def fixed_interval(rank, group, folder):
    loop = Loop(rank, group, folder, every=50, budget=0.01)

    def loss_of(step):
        if step in {0: (BURST_AT,), 1: (BURST_AT - 1, BURST_AT)}[rank]:
            loop.monitor.burst(steps=2 + rank, every=1 + rank)
        return loss_of_event(rank)(step)

    loop.run(loss_of=loss_of)
    return loop.seen()


def endless_burst(rank, group, folder):
    """Rank 1 asks for one that is longer than any training."""
    loop = Loop(rank, group, folder, every=50)

    def loss_of(step):
        if (rank, step) == (1, BURST_AT):
            loop.monitor.burst(steps=10**400)
        return 2.0

    loop.run(loss_of=loss_of)
    return loop.seen()


def broken_on_the_way(rank, group, folder):
    """A collective of the model's fails while a burst that rank 1 has asked for is on its way."""
    loop = Loop(rank, group, folder)

    def loss_of(step):
        if (rank, step) == (1, 130):
            loop.monitor.burst(steps=2)
        loop.monitor._ranks.is_broken |= step == 140
        return 2.0

    loop.run(loss_of=loss_of)
    return loop.seen()


def counted(owner, name, then=lambda number: None):
    """Call `then` with the number of each call before it."""
    function, calls = getattr(owner, name), []

    def call(*args, **options):
        calls.append(name)
        then(len(calls))
        return function(*args, **options)

    setattr(owner, name, call)
    return calls


def failing_sign(rank, group, folder):
    """In rank 1 every look for a sign fails, and also from step 150 on in rank 0."""
    loop = Loop(rank, group, folder)

    counted(loop.monitor._suspicion, "sign", lambda number: 1 / (rank == 0 and loop.monitor.num_steps <= 150))
    calls = counted(dist, "all_reduce")
    loop.run(loss_of=lambda step: math.nan if (rank, step) in {(1, 100), (0, 131), (0, 200)} else 2.0)
    return loop.seen(num_exchanges=len(calls))


def pending(rank, group, folder):
    """Rank 0 alone knows of an alert that is pending, and zooms may cost anything. Rank 1 hears of it late."""
    loop = Loop(rank, group, folder)
    alerts = [alert("a", "pending")]
    if rank == 0:
        loop.monitor._outbox.alerts = lambda: alerts if loop.monitor.num_steps in PENDING else []

    def loss_of(step):
        if rank == 1 and step == HEARD_AT:
            loop.monitor._outbox.hear(alert("a", "firing"))
        return 2.0

    with mock.patch.object(schedule, "ZOOM_SHARE", 1e9):
        loop.run(loss_of=loss_of)
    return loop.seen()


def urgent(rank, group, folder):
    """Before an exchange rank 0 knows of a pending alert, and then its loss is not finite."""
    loop = Loop(rank, group, folder)
    alerts = [alert("a", "pending")]
    if rank == 0:
        loop.monitor._outbox.alerts = lambda: alerts if loop.monitor.num_steps in (133, 134) else []
    loop.run(loss_of=lambda step: math.nan if (rank, step) == (0, 137) else 2.0)
    return loop.seen()


def different_costs(rank, group, folder):
    """A long run in which costs, speed, signs, faults and clocks of the ranks differ, with a burst now and then."""
    loop, draw = Loop(rank, group, folder, budget=0.05), random.Random(rank)
    monitor, suspicion, held_up = loop.monitor, loop.monitor._suspicion, []
    suspicion._now_s = lambda: monitor.num_steps * (1 if rank == 0 else 1000)
    counted(suspicion, "sign", lambda number: 1 / (draw.random() > 0.01))

    def loss_of(step):
        time.sleep(draw.random() * 4e-4)
        monitor._outside_hooks_s += draw.random() * 1e-3 * monitor.is_sampling
        if step % 900 == 899:
            monitor.burst(steps=30, every=3)
        held_up.append(not suspicion._may_begin)
        return math.nan if draw.random() < 0.004 else 2.0

    with mock.patch.object(schedule, "ZOOM_SHARE", 1e9):
        loop.run(LONG, loss_of)
    return loop.seen(num_held_up=sum(held_up))


def rank_1_is_late(rank, group, folder):
    """For an exchange that rank 0 reads 12 steps later, and for another one in the last step."""
    loop, costs = Loop(rank, group, folder), []

    def loss_of(step):
        if rank == 1 and step in (35, 59):
            time.sleep(LATE_S)
        costs.append(loop.monitor._outside_hooks_s)
        return 2.0

    loop.run(60, loss_of)
    seen = loop.seen(cost_s=costs[50] - costs[30], waited_s=loop.monitor._ranks.waited_s)
    return seen | {"is_over": loop.monitor._shared_signs._asked.work.is_completed()}


def interrupted(rank, group, folder):
    """Ctrl-C in rank 1 during an exchange that asks for a burst, after which it trains on."""
    loop = Loop(rank, group, folder)

    def interrupt(number):
        if rank == 1 and number == 3:
            raise KeyboardInterrupt

    calls = counted(dist, "all_reduce", interrupt)
    # Not before, since a busy machine may take longer to attach.
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_S), group)
    if rank == 1:
        loop.run(30)
        loop.monitor.burst(steps=2)
    loop.run(STEPS - loop.monitor.num_steps, loss_of_event(rank))
    return loop.seen(num_exchanges=len(calls))


def rank_1_ends(rank, group, folder):
    """Without a word, in the middle of the training."""
    loop = Loop(rank, group, folder)
    calls = counted(dist, "all_reduce")
    loop.run(loss_of=lambda step: os._exit(0) if (rank, step) == (1, ENDS_AT) else loss_of_event(rank)(step))
    return loop.seen(num_exchanges=len(calls))


SCENARIOS = (
    training,
    refused,
    fixed_interval,
    endless_burst,
    broken_on_the_way,
    failing_sign,
    pending,
    urgent,
    different_costs,
    rank_1_is_late,
    interrupted,
    rank_1_ends,
)


def main(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{folder}/store")
    all_seen = {}
    for scenario in SCENARIOS:
        group = dist.new_group(timeout=datetime.timedelta(seconds=60))
        own = folder / scenario.__name__
        own.mkdir(exist_ok=True)
        original = dist.all_reduce
        all_seen[scenario.__name__] = scenario(rank, group, own)
        dist.all_reduce = original
        (folder / f"{rank}.json").write_text(json.dumps(all_seen))
