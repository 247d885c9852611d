"""Training on two processes: the same model on both, sharded over both, and cut in two."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.setups.harness import (
    GPT,
    Outcome,
    Setup,
    Training,
    adamw,
    attached_twice,
    batches,
    next_token_loss,
    plain_loop,
    seen_plainly,
    train,
    watched,
)
from tests.setups.matrix import (
    ATTENTION,
    BIT_EQUAL,
    CLEAN,
    FAMILIES,
    GRADIENTS,
    HIDDEN_STATES,
    OUTPUTS,
    PARAMETERS,
    SATURATION,
    UPDATES,
)
from tests.setups.models import DEPTH, Stage

NUM_RANKS = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class RankedSetup(Setup):
    """`build` is called on every rank."""

    watching: tuple[int, ...] = (0, 1)
    """The ranks that attach."""
    whole: Setup | None = None
    """What the ranks train together, in one process, where they are measured together and rank 0 alone has frames."""

    @property
    def writing(self):
        return self.watching if self.whole is None else (0,)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw of one set-up."""

    unwatched: Outcome
    watched: dict[int, Outcome]
    """By `every`."""
    plain: list[dict[str, torch.Tensor]]
    visits: tuple[list[list[str]], list[set[str]]]
    """Traces of two visits, and what was measured in them."""


def halves():
    """This rank's half of every batch."""
    return (ids_BT.chunk(NUM_RANKS)[distributed.get_rank()] for ids_BT in batches(8))


def data_parallel():
    return plain_loop(lambda: DistributedDataParallel(GPT(dropout=0.0)), data=halves())


def together(build):
    """The same, measured over all ranks."""
    return lambda: dataclasses.replace(build(), options={"process_group": distributed.group.WORLD})


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def make_model():
        model, mesh = GPT(dropout=0.0), init_device_mesh("cpu", (NUM_RANKS,))
        for block in model.transformer["h"]:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return plain_loop(make_model, data=halves())


def untied(is_fused=True):
    gpt = GPT(dropout=0.0, is_fused=is_fused)
    gpt.lm_head.weight = nn.Parameter(gpt.lm_head.weight.detach().clone())
    return gpt


def pipeline():
    """By hand: activations go forward, their gradients come back."""
    rank, gpt, data = distributed.get_rank(), untied(), batches()
    model = Stage(gpt, 0, 2) if rank == 0 else Stage(gpt, 2, DEPTH)
    optimizer = adamw(model.parameters())

    def step_of_first(ids_BT):
        x_BTD = model(ids_BT)
        distributed.send(x_BTD.detach(), dst=1)
        gradient = torch.empty_like(x_BTD)
        distributed.recv(gradient, src=1)
        x_BTD.backward(gradient)
        return gradient.norm()

    def step_of_last(ids_BT):
        x_BTD = torch.empty(*ids_BT.shape, gpt.lm_head.in_features)
        distributed.recv(x_BTD, src=0)
        x_BTD.requires_grad_()
        loss = next_token_loss(lambda _: model(x_BTD), ids_BT)
        loss.backward()
        distributed.send(x_BTD.grad, dst=0)
        return loss.detach()

    def step():
        loss = (step_of_first if rank == 0 else step_of_last)(next(data))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model=model, optimizer=optimizer, step=step)


def ranked(name, build, **more):
    columns = (BIT_EQUAL, *FAMILIES, CLEAN)
    return RankedSetup(kind="Several processes", name=name, columns=columns, build=build, **more)


def in_one_process(name, build):
    """`build` takes a model's maker, to be watched with attention in plain sight, too."""
    return Setup(kind="One process", name=name, build=build, attention_twin=lambda: build(is_fused=False))


def with_both_halves(is_fused=True):
    return plain_loop(lambda: GPT(dropout=0.0, is_fused=is_fused), data=batches(8))


def with_both_stages(is_fused=True):
    return plain_loop(lambda: untied(is_fused))


HALVES = in_one_process("both halves of every batch", with_both_halves)
STAGES = in_one_process("both stages", with_both_stages)

SHARDED = dict.fromkeys((PARAMETERS, GRADIENTS, UPDATES, SATURATION), "sharded over processes")
HALF_OUTPUTS = [OUTPUTS]
"""Predictions are compared with those of the same rank."""
BY_STAGE = dict.fromkeys((HIDDEN_STATES, ATTENTION), "this process's stage alone") | {
    SATURATION: "a stage of a pipeline"
}

SETUPS = [
    ranked("DistributedDataParallel, attached on rank 0", data_parallel, watching=(0,)),
    ranked(
        "DistributedDataParallel, attached on every rank",
        data_parallel,
        like="DistributedDataParallel, attached on rank 0",
    ),
    ranked(
        "DistributedDataParallel, attach(process_group=...)",
        together(data_parallel),
        whole=HALVES,
        partial=HALF_OUTPUTS,
    ),
    ranked(
        "FSDP2 (fully_shard), attached on rank 0",
        sharded,
        watching=(0,),
        lacks=SHARDED,
        like="FSDP2 (fully_shard), attached on every rank",
    ),
    ranked("FSDP2 (fully_shard), attached on every rank", sharded, lacks=SHARDED),
    ranked(
        "FSDP2 (fully_shard), attach(process_group=...)",
        together(sharded),
        whole=HALVES,
        partial=HALF_OUTPUTS,
        lacks={SATURATION: "sharded over processes"},
    ),
    ranked(
        "pipeline of two stages, attached on each",
        pipeline,
        lacks={OUTPUTS: "^$|holds no tensor named logits"},  # the last stage has them
    ),
    ranked("pipeline of two stages, attach(process_group=...)", together(pipeline), whole=STAGES, lacks=BY_STAGE),
]


def work(rank, folder, names):
    """One of the processes: goes through these set-ups and leaves what it saw."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS)
    seen = {setup.name: see(setup, rank in setup.watching) for setup in SETUPS if setup.name in names}
    torch.save(seen, f"{folder}/rank{rank}")
    distributed.destroy_process_group()


def see(setup, is_watching):
    return Seen(
        unwatched=train(setup),
        watched={every: watched(setup, every) if is_watching else train(setup) for every in (1, 2)},
        plain=seen_plainly(setup) if setup.whole is None else [],
        visits=attached_twice(setup, watch=is_watching),
    )
