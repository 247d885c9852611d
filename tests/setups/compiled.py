"""torch.compile, of the whole and of parts, attached before the first call and after it."""

import dataclasses
import functools

import torch

from tests.setups.harness import GPT, Setup, batches, next_token_loss, plain_loop
from tests.setups.matrix import (
    ATTENTION,
    COMPILED,
    FEED_FORWARD,
    GRADIENTS,
    HIDDEN_STATES,
    OUTPUTS,
    SATURATION,
    UPDATES,
)

NUM_BLOCKS = 2
"""Each is compiled again for every training."""


class Counting:
    """A backend of torch.compile that keeps the graphs it is given."""

    def __init__(self, backend):
        self.graphs = []
        self._compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return self._compile(graph, inputs)


def wrapped(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def per_block(model, backend):
    for block in model.transformer["h"]:
        block.compile(backend=backend)
    return model


def uncompiled(model, backend):
    return model


def small_gpt(**options):
    """Without dropout by default: where tsemon looks at a pass of its own, that has other masks."""
    return GPT(**{"dropout": 0.0, "depth": NUM_BLOCKS, **options})


def training_of(compile_model, backend, is_called_first, **options):
    backend = Counting(backend)
    model = compile_model(small_gpt(**options), backend)
    training = plain_loop(lambda: model, graphs=backend.graphs)
    if is_called_first:
        training.step()
    return training


def model_inside(is_called_first):
    """What is compiled trains; what is inside it is watched."""
    training = training_of(wrapped, "eager", is_called_first)
    return dataclasses.replace(training, model=training.model._orig_mod)


def compiled_after_attach(**options):
    """Where the model is called for the first time, it has been attached."""
    backend = Counting("eager")
    model = small_gpt()
    compiled = torch.compile(model, backend=backend)
    return plain_loop(
        lambda: model, loss_of=lambda _, ids_BT: next_token_loss(compiled, ids_BT), graphs=backend.graphs, **options
    )


def with_less_overhead():
    """The settings of a mode, which a backend of one's own would not get."""
    from torch._inductor.compile_fx import compile_fx  # a second of imports, which no other file needs

    settings = torch._inductor.list_mode_options("reduce-overhead")
    return training_of(wrapped, functools.partial(compile_fx, config_patches=settings), False, depth=1)


def uncompiled_step(**more):
    return plain_loop(small_gpt, functools.partial(torch.optim.SGD, lr=0.1), **more)


def compiled_step():
    backend = Counting("eager")
    training = uncompiled_step(graphs=backend.graphs)
    training.optimizer.step = torch.compile(training.optimizer.step, backend=backend)
    return training


def the_loss(is_called_first):
    """The model is called from a compiled function; it is not compiled itself."""
    backend = Counting("eager")
    training = plain_loop(small_gpt, loss_of=torch.compile(next_token_loss, backend=backend), graphs=backend.graphs)
    if is_called_first:
        training.step()
    return training


def compiled(name, build, **more):
    more.setdefault("twin", functools.partial(training_of, uncompiled, "eager", False))
    more.setdefault("num_blocks", NUM_BLOCKS)
    return Setup(kind="torch.compile", name=name, columns=COMPILED, build=build, **more)


BEFORE, AFTER = "attached before the first call", "attached after the first call"


def before_and_after(name, build, more_graphs="", likes=("", ""), **more):
    """Attached to what has not been compiled yet, and to what has."""
    before, after = likes
    yield compiled(f"{name}, {BEFORE}", lambda: build(False), more_graphs=more_graphs, like=before, **more)
    more["twin"] = functools.partial(training_of, uncompiled, "eager", True)
    yield compiled(f"{name}, {AFTER}", lambda: build(True), like=after, **more)


LOOKED_INTO = (HIDDEN_STATES, ATTENTION, FEED_FORWARD, OUTPUTS, SATURATION)
UNSEEN = dict.fromkeys(LOOKED_INTO, "no training pass came through")
LATE = {family: "torch.compile made" for family in UNSEEN if family != OUTPUTS}
"""Found at the second sample: what not every sample has, the first has not."""
PROBE_BATCH = {"probe_batch": next(batches(3))}
UNSEEN_STEP = dict.fromkeys((GRADIENTS, UPDATES), "or a compiled one")
ONCE_MORE = "compiled once more, for steps without hooks: torch looks at the hooks of a module that compiled code calls"

WHOLE, IN_PLACE = f"torch.compile(model), {BEFORE}", f"model.compile(), {AFTER}"
INSIDE, CALLING = "torch.compile(model), the model inside", "a compiled function that calls the model"
GIVEN = "attach(probe_batch=...)"

SETUPS = [
    *before_and_after(
        "torch.compile(model)",
        lambda first: training_of(wrapped, "aot_eager", first),
        held_batch=0,
        likes=("", IN_PLACE),
    ),
    *before_and_after(INSIDE, model_inside, held_batch=1, lacks=LATE, likes=("", f"{INSIDE}, {BEFORE}")),
    compiled(
        f"{INSIDE}, {GIVEN}",
        lambda: compiled_after_attach(options=PROBE_BATCH),
        twin=lambda: dataclasses.replace(training_of(uncompiled, "eager", False), options=PROBE_BATCH),
        held_batch=0,
        like=f"{CALLING}, {GIVEN}",
    ),
    *before_and_after(
        "model.compile()", lambda first: training_of(in_place, "eager", first), held_batch=0, likes=(WHOLE, "")
    ),
    *before_and_after(
        "block.compile() of each block",
        lambda first: training_of(per_block, "eager", first),
        held_batch=0,
        likes=("", IN_PLACE),
    ),
    *before_and_after(CALLING, the_loss, ONCE_MORE, lacks=UNSEEN, likes=("", f"{CALLING}, {BEFORE}")),
    compiled(
        f"{CALLING}, {GIVEN}",
        lambda: dataclasses.replace(the_loss(False), options=PROBE_BATCH),
        twin=lambda: dataclasses.replace(training_of(uncompiled, "eager", False), options=PROBE_BATCH),
        held_batch=0,
        more_graphs=ONCE_MORE,
    ),
    compiled("a compiled optimizer step", compiled_step, twin=uncompiled_step, lacks=UNSEEN_STEP),
    compiled(
        "torch.compile(model), dropout",
        lambda: training_of(wrapped, "eager", False, dropout=0.1),
        twin=lambda: training_of(uncompiled, "eager", False, dropout=0.1),
        held_batch=0,
        like=WHOLE,
    ),
    compiled(
        "torch.compile(model), inductor",
        lambda: training_of(wrapped, "inductor", False, depth=1),
        twin=lambda: training_of(uncompiled, "eager", False, depth=1),
        held_batch=0,
        num_blocks=1,
        needs_program="g++",
        like=WHOLE,
    ),
    compiled(
        'torch.compile(model, mode="reduce-overhead")',
        with_less_overhead,
        twin=lambda: training_of(uncompiled, "eager", False, depth=1),
        held_batch=0,
        num_blocks=1,
        needs_program="g++",
        like=WHOLE,
    ),
]
