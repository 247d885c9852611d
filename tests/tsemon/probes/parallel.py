"""What several processes do for `test_ranks`, each by `main`.

Each function below is one scenario, run by all ranks one after the other in one process group; what it returns is kept in
FOLDER/<scenario>.<rank>.pt.
"""

import copy
import datetime
import itertools
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import tsemon
from tsemon.errors import TsemonError
from tsemon.measures.sums import Partial
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig
from tsemon.probes import Probe, Ranks, find_blocks

STEPS = 4
SIZES = {"vocab": 30, "context": 8, "depth": 4, "width": 12, "heads": 3, "ffn": 20}


def language_model():
    torch.manual_seed(0)
    model = CausalLanguageModel(CausalLanguageModelConfig(**SIZES))
    model.blocks[0].register_parameter("lone", nn.Parameter(torch.ones(1, 5)))  # one row: a shard of it is empty
    return model


def adamw(params):
    # A large eps: a gradient that is zero but for rounding must not become a step of full length.
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-3)


def tokens_of(step, batch=6):
    return torch.randint(SIZES["vocab"], (batch, 9), generator=torch.Generator().manual_seed(step))


def loss_of(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model, optimizer, monitor=None, rank=0, size=1, steps=STEPS):
    """A plain loop over this rank's part of each batch; the loss of each step."""
    losses = []
    for step in range(steps):
        tokens = tokens_of(step).chunk(size)[rank]
        optimizer.zero_grad()
        loss = loss_of(model(tokens[:, :-1]), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step(loss=loss)
    return losses


def attached(model, optimizer, folder, **kwargs):
    settings = {"run": "r", "every": 1, "spool_dir": folder, "process_group": dist.group.WORLD} | kwargs
    return tsemon.attach(model, optimizer, **settings)


def state_of(model):
    def whole(value):
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    return {name: whole(value).clone() for name, value in model.state_dict().items()}


def told(monitor):
    return {"not_measured": dict(monitor.status.not_measured), "faults": list(monitor.status.faults)}


def twice(make, rank, size, folder):
    """Train with and without tsemon: what it told, the losses and the parameters at the end."""
    plain, optimizer = make()
    losses = train(plain, optimizer, None, rank, size)
    model, optimizer = make()
    with attached(model, optimizer, folder) as monitor:
        same = train(model, optimizer, monitor, rank, size)
        return told(monitor) | {"losses": (losses, same), "states": (state_of(plain), state_of(model))}


def ddp(rank, size, folder):
    def make():
        model = language_model()
        model.blocks[0].lone.requires_grad_(False)  # DDP waits for the gradient of whatever has one
        model = DistributedDataParallel(model)
        return model, adamw(model.parameters())

    return twice(make, rank, size, folder)


def fsdp_model():
    model = language_model()
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, adamw(model.parameters())


def fsdp(rank, size, folder):
    result = twice(fsdp_model, rank, size, folder)
    model, _ = fsdp_model()
    return result | {"rows_of_lone": model.blocks[0].lone.to_local().shape[0]}


def fsdp_sgd(rank, size, folder):
    def make():
        model, _ = fsdp_model()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    return twice(make, rank, size, folder)


def own_quantities(rank=0):
    """Of the user's own; one of them fails in rank 1, one in the second block of it."""

    def energy(x, valid):
        return x.square().mean(dim=(1, 2))

    def squares(tensors):
        return sum(tensor.square().sum() for tensor in tensors)

    def fails(x, valid):
        return energy(x, valid) if rank == 0 else x.nothing

    def sums(x, valid):
        return torch.stack([valid.sum() * x.shape[-1], x.sum(), x.square().sum()])

    def deviation(sums):
        count, total, squares = sums.tolist()
        return (squares / count - (total / count) ** 2) ** 0.5

    return [
        tsemon.Quantity(name="energy", of="output", axis="activation", function=energy),
        tsemon.Quantity(name="highest", of="output", function=lambda x, _: x.amax(dim=(1, 2)), merge="max"),
        tsemon.Quantity(name="lowest", of="values", function=lambda x, _: x.amin(), merge="min"),
        tsemon.Quantity(name="deviation", of="output", axis="run", function=sums, merge="sum", finish=deviation),
        tsemon.Quantity(name="parameter_squares", of="parameters", function=squares, merge="sum"),
        tsemon.Quantity(name="gradient_squares", of="gradients", function=squares, merge="sum"),
        tsemon.Quantity(name="fails", of="output", function=fails, merge="sum"),
    ]


def quantities_of_ddp(rank, size, folder):
    model = language_model()
    model.blocks[0].lone.requires_grad_(False)
    model = DistributedDataParallel(model)
    optimizer = adamw(model.parameters())
    with attached(model, optimizer, folder, measures=own_quantities(rank)) as monitor:
        train(model, optimizer, monitor, rank, size)
        return told(monitor)


def quantities_of_fsdp(rank, size, folder):
    model, optimizer = fsdp_model()
    with attached(model, optimizer, folder, measures=own_quantities(rank)) as monitor:
        train(model, optimizer, monitor, rank, size)
        return told(monitor)


def quantities_of_pipeline(rank, size, folder):
    return run_pipeline(rank, folder, ("early", "late"), measures=own_quantities(rank))


def quantities_that_differ(rank, size, folder):
    model = language_model()
    try:
        attached(model, None, folder, measures=own_quantities()[rank:])
    except TsemonError as error:
        return {"text": str(error)}


def fsdp_alone(rank, size, folder):
    model, optimizer = fsdp_model()
    with attached(model, optimizer, folder / str(rank), process_group=None) as monitor:
        train(model, optimizer, monitor, rank, size, steps=1)
        return told(monitor)


def ddp_of_rank_0(rank, size, folder):
    """Only rank 0 attaches, without a group."""
    model = language_model()
    model.blocks[0].lone.requires_grad_(False)
    model = DistributedDataParallel(model)
    optimizer = adamw(model.parameters())
    monitor = attached(model, optimizer, folder, process_group=None) if rank == 0 else None
    with counted_collectives() as calls:
        train(model, optimizer, monitor, rank, size)
    if monitor is not None:
        monitor.close()
    return calls


class Stage(nn.Module):
    """One half of the language model."""

    def __init__(self, whole, is_first, names):
        super().__init__()
        self.is_first = is_first
        half = len(whole.blocks) // 2
        kept = whole.blocks[:half] if is_first else whole.blocks[half:]
        self.add_module(names[0] if is_first else names[1], nn.ModuleList(kept))
        self.list_name = names[0] if is_first else names[1]
        if is_first:
            self.embed, self.positions = whole.embed, whole.positions
        else:
            self.head = whole.head

    def forward(self, x):
        if self.is_first:
            x = self.embed(x) + self.positions(torch.arange(x.shape[1]))
        for block in getattr(self, self.list_name):
            x = block(x)
        return x if self.is_first else self.head(x)


def train_pipeline(stage, optimizer, monitor, rank):
    for step in range(STEPS):
        tokens = tokens_of(step)
        optimizer.zero_grad()
        if rank == 0:
            hidden = stage(tokens[:, :-1])
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
            loss = {}
        else:
            hidden = torch.empty(6, 8, SIZES["width"])
            dist.recv(hidden, 0)
            hidden.requires_grad_()
            value = loss_of(stage(hidden), tokens)
            value.backward()
            dist.send(hidden.grad, 0)
            loss = {"loss": value}
        optimizer.step()
        if monitor is not None:
            monitor.step(**loss)


def run_pipeline(rank, folder, names, **kwargs):
    states = []
    for is_watched in (False, True):
        stage = Stage(language_model(), rank == 0, names)
        optimizer = adamw(stage.parameters())
        monitor = attached(stage, optimizer, folder, **kwargs) if is_watched else None
        train_pipeline(stage, optimizer, monitor, rank)
        states.append(state_of(stage))
    result = told(monitor) | {"states": tuple(states), "blocks": list(monitor.status.blocks)}
    monitor.close()
    return result


def pipeline(rank, size, folder):
    return run_pipeline(rank, folder, ("early", "late"))


def pipeline_with_clashing_names(rank, size, folder):
    return run_pipeline(rank, folder, ("blocks", "blocks"), stage=rank)


class counted_collectives:
    """The collectives of torch.distributed that are begun within, by name."""

    NAMES = (
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_gather",
        "broadcast",
        "barrier",
        "reduce",
    )

    def __enter__(self):
        self.kept, self.calls = {name: getattr(dist, name) for name in self.NAMES}, []
        for name, function in self.kept.items():
            setattr(
                dist, name, lambda *a, name=name, function=function, **k: self.calls.append(name) or function(*a, **k)
            )
        return self.calls

    def __exit__(self, *_):
        for name, function in self.kept.items():
            setattr(dist, name, function)


def number_of_collectives(rank, size, folder):
    """Replicas that do not talk to each other: every collective is tsemon's. After each step, those so far."""
    model = language_model()
    optimizer = adamw(model.parameters())
    with attached(model, optimizer, folder, every=3) as monitor, counted_collectives() as calls:
        so_far = []
        for step in range(10):
            tokens = tokens_of(step).chunk(size)[rank]
            loss_of(model(tokens[:, :-1]), tokens).backward()
            optimizer.step()
            monitor.step()
            so_far.append(list(calls))
            calls.clear()
    return so_far


def trouble_in_one_rank(rank, size, folder):
    """In rank 1 a scalar that is none, no step in the second sample, a fault in the third, a sum of no value in the next."""
    model = language_model()
    optimizer = adamw(model.parameters())
    with attached(model, optimizer, folder) as monitor:
        for step in range(5):
            tokens = tokens_of(step).chunk(size)[rank]
            loss_of(model(tokens[:, :-1]), tokens).backward()
            if not (rank == 1 and step == 1):
                optimizer.step()
            if rank == 1 and step == 2:
                monitor._probe._parts["parameters"]._sums._found["param"] = "no set"
            if rank == 1:
                activations = monitor._probe._parts["activations"]
                lost = {"token_similarity": Partial(torch.empty(5, device="meta"))}
                activations.collect = (
                    (lambda lost=lost: lost) if step == 3 else type(activations).collect.__get__(activations)
                )
            own = {"odd": 10**400, "late": 3.0} if rank == 1 and step > 0 else {}
            monitor.step(loss=float(rank), **own)
        return told(monitor)


def failing_collective(rank, size, folder):
    """From the second sample on the network is gone."""
    model = language_model()
    optimizer = adamw(model.parameters())
    gather, calls = dist.all_gather, []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) > 1:
            raise RuntimeError("connection closed by peer")
        return gather(*args, **kwargs)

    dist.all_gather = fail
    try:
        with attached(model, optimizer, folder) as monitor:
            train(model, optimizer, monitor, rank, size)
            return told(monitor) | {"num_calls": len(calls)}
    finally:
        dist.all_gather = gather


def errors_of_attach(rank, size, folder):
    """What each rank is told where only rank 1 is wrong."""
    texts = {}
    for name, wrong in {
        "model": {"model": nn.Linear(2, 2)},
        "every": {"every": 7},
        "layout": {"layout": "TBC"},
        "attention_rows": {"attention_rows": 8},
        "resume": {"resume": 3},
        "stage": {"stage": 1},
        "run": {"run": ""},
    }.items():
        arguments = {"model": language_model()} | (wrong if rank == 1 else {})
        try:
            attached(arguments.pop("model"), None, folder, **arguments)
        except TsemonError as error:
            texts[name] = f"{type(error).__name__}: {error}"
    return texts


def checkpoint(rank, size, folder):
    """A step that all ranks go on from; before that, what each is told where rank 1 has another state."""
    model = language_model()
    optimizer, texts = adamw(model.parameters()), []
    with attached(model, optimizer, folder) as monitor:
        state = monitor.state_dict() | {"step": 5}
        for wrong in (state | {"step": 6}, "no state"):
            try:
                monitor.load_state_dict(wrong if rank == 1 else state)
            except TsemonError as error:
                texts.append(str(error))
        monitor.load_state_dict(state)
        train(model, optimizer, monitor, rank, size, steps=2)
    return texts


def gaps_of(steps):
    """The different numbers of steps from one sample to the next, once the first few are over."""
    return {later - earlier for earlier, later in itertools.pairwise(steps[4:])}


def cadence(rank, size, folder):
    """Ranks of very different speed, no agreed interval: which steps each of them samples."""
    model = language_model()
    optimizer = adamw(model.parameters())
    work = torch.randn(300, 300)
    steps = []
    with attached(model, optimizer, folder, every=None, budget=0.2) as monitor:
        step = 0
        while step < 150 or (len(gaps_of(steps)) < 2 and step < 3000):  # a busy machine samples few steps
            tokens = tokens_of(step % 150).chunk(size)[rank]
            optimizer.zero_grad()
            loss_of(model(tokens[:, :-1]), tokens).backward()
            for _ in range(3 * rank * (1 + min(step, 150) // 50)):
                work = work @ work / work.norm()
            optimizer.step()
            monitor.step()
            step += 1
            if not steps or monitor._last_sample != steps[-1]:
                steps.append(monitor._last_sample)
        return {"steps": steps, "overhead_ratio": monitor.status.overhead_ratio}


def hybrid(rank, size, folder):
    """Shards within a row of the mesh, replicas over its column: what a probe makes of it."""
    norms = {}
    for shape in ((size, 1), (1, size)):
        model = language_model()
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
        probe = Probe(model, [], find_blocks(model), faults := [], ranks=Ranks(dist.group.WORLD))
        probe._guard.on_fault = faults.append
        probe.arm({"total_param_norm"})
        norms[shape] = probe.collect().scalars["total_param_norm"]
        probe.disarm()
    return norms


def part_of_a_mesh(rank, size, folder):
    """Shards over all processes, of which the group holds one."""
    model, optimizer = fsdp_model()
    groups = [dist.new_group([each]) for each in range(size)]
    with attached(model, optimizer, folder / str(rank), process_group=groups[rank]) as monitor:
        train(model, optimizer, monitor, rank, size, steps=1)
        return told(monitor)


OF_TWO = (
    ddp,
    fsdp,
    fsdp_sgd,
    quantities_of_ddp,
    quantities_of_fsdp,
    quantities_of_pipeline,
    quantities_that_differ,
    fsdp_alone,
    ddp_of_rank_0,
    pipeline,
    pipeline_with_clashing_names,
    number_of_collectives,
    trouble_in_one_rank,
    failing_collective,
    errors_of_attach,
    checkpoint,
    cadence,
    part_of_a_mesh,
)
OF_THREE = (fsdp, hybrid, cadence)


def main(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    for scenario in OF_TWO if size == 2 else OF_THREE:
        own = folder / scenario.__name__
        own.mkdir(exist_ok=True)
        try:
            result = scenario(rank, size, own)
        except Exception:
            result = traceback.format_exc()
        torch.save(copy.deepcopy(result), folder / f"{scenario.__name__}.{rank}.pt")
    dist.destroy_process_group()
