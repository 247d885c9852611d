"""torch.compile, of the whole and of parts, attached before the first call and after it."""

import torch
from torch._dynamo.backends.registry import lookup_backend

from tests.setups.harness import GPT, Setup, next_token_loss, plain_loop
from tests.setups.matrix import ATTENTION, COLUMNS, HIDDEN_STATES


class Counting:
    """A backend of torch.compile that keeps the graphs it is given."""

    def __init__(self, name):
        self.graphs = []
        self._compile = lookup_backend(name)

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


def training_of(compiled, backend_name, is_called_first, **options):
    """Without dropout by default: where tsemon looks at a pass of its own, that has other masks."""
    backend = Counting(backend_name)
    model = compiled(GPT(**{"dropout": 0.0, **options}), backend)
    training = plain_loop(lambda: model, graphs=backend.graphs)
    if is_called_first:
        training.step()
    return training


def the_loss(backend_name, is_called_first):
    """The model is called from a compiled function; it is not compiled itself."""
    backend = Counting(backend_name)
    training = plain_loop(
        lambda: GPT(dropout=0.0), loss_of=torch.compile(next_token_loss, backend=backend), graphs=backend.graphs
    )
    if is_called_first:
        training.step()
    return training


def setups(name, build, lacks, more_graphs=""):
    return [
        Setup(
            kind="torch.compile",
            name=f"{name}, attached {'after' if is_called_first else 'before'} the first call",
            columns=COLUMNS,
            build=lambda first=is_called_first: build(first),
            twin=lambda first=is_called_first: training_of(uncompiled, "eager", first),
            lacks=lacks,
            more_graphs="" if is_called_first else more_graphs,
        )
        for is_called_first in (False, True)
    ]


UNSEEN = dict.fromkeys((HIDDEN_STATES, ATTENTION), "is the model compiled")

SETUPS = [
    *setups("torch.compile(model)", lambda first: training_of(wrapped, "aot_eager", first), UNSEEN),
    *setups("model.compile()", lambda first: training_of(in_place, "eager", first), UNSEEN),
    *setups(
        "block.compile() of each block",
        lambda first: training_of(per_block, "eager", first),
        dict.fromkeys((HIDDEN_STATES, ATTENTION), "are they compiled"),
    ),
    *setups(
        "a compiled function that calls the model",
        lambda first: the_loss("eager", first),
        UNSEEN,
        "compiled once more, for the steps without hooks: torch looks at the hooks of a module that compiled code calls",
    ),
    Setup(
        kind="torch.compile",
        name="torch.compile(model), dropout",
        columns=COLUMNS,
        build=lambda: training_of(wrapped, "aot_eager", False, dropout=0.1),
        twin=lambda: training_of(uncompiled, "eager", False, dropout=0.1),
        lacks=UNSEEN,
    ),
    Setup(
        kind="torch.compile",
        name="torch.compile(model), inductor",
        columns=COLUMNS,
        build=lambda: training_of(wrapped, "inductor", False),
        twin=lambda: training_of(uncompiled, "eager", False),
        lacks=UNSEEN,
        needs_program="g++",
    ),
]
