"""Optimizers, one or several, around one and the same model."""

import functools

import torch

from tests.setups.harness import GPT, Setup, Training, batches, next_token_loss, plain_loop
from tests.setups.matrix import GRADIENTS, UPDATES


def with_optimizer(make_optimizer):
    return lambda make_model=GPT: plain_loop(make_model, make_optimizer)


def split(model):
    """The blocks' matrices, which Muon is for, and all others."""
    matrices = [p for p in model.transformer["h"].parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in chosen]


def two_optimizers(make_first, *, are_both_given):
    """For the blocks' matrices, and for the rest."""

    def build(make_model=GPT):
        model = make_model()
        matrices, others = split(model)
        first, second, data = make_first(matrices), torch.optim.AdamW(others, lr=1e-3), batches()

        def step():
            loss = next_token_loss(model, next(data))
            loss.backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return Training(model=model, optimizer=[first, second] if are_both_given else first, step=step)

    return build


def parameter_groups(make_model=GPT):
    def make_optimizer(parameters):
        parameters = list(parameters)
        matrices, others = ([p for p in parameters if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-3)

    return plain_loop(make_model, make_optimizer)


def with_closure(make_model=GPT):
    model = make_model()
    optimizer, data = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), batches()

    def step():
        ids_BT = next(data)

        def closure():
            optimizer.zero_grad()
            loss = next_token_loss(model, ids_BT)
            loss.backward()
            return loss

        loss = optimizer.step(closure).detach()
        optimizer.zero_grad()
        return loss

    return Training(model=model, optimizer=optimizer, step=step)


def in_backward(are_given, make_model=GPT):
    """An optimizer for each parameter, which steps as soon as the gradient is there."""
    model = make_model()
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}
    data = batches()

    def step_one(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_one)

    def step():
        loss = next_token_loss(model, next(data))
        loss.backward()
        return loss.detach()

    return Training(model=model, optimizer=[*optimizers.values()] if are_given else None, step=step)


def without_optimizer(make_model=GPT):
    training = plain_loop(make_model)
    return Training(model=training.model, optimizer=None, step=training.step)


def optimizer(name, build, **more):
    return Setup(kind="Optimizers", name=name, build=build, **more)


NO_OPTIMIZER = dict.fromkeys((GRADIENTS, UPDATES), "no optimizer was given")
ANOTHERS = {UPDATES: "if another optimizer trains them"}


def of_two(name, make_first, like=""):
    for how, is_other_given, more in (
        ("both given", True, {}),
        ("the first given", False, {"lacks": ANOTHERS, "partial": [UPDATES]}),
    ):
        build = two_optimizers(make_first, are_both_given=is_other_given)
        yield optimizer(f"{name}, {how}", build, like=like and f"{like}, {how}", **more)


SETUPS = [
    optimizer("AdamW", with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False)), like="AdamW, foreach"),
    optimizer("AdamW, foreach", with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True))),
    optimizer("AdamW, fused", with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True))),
    optimizer("AdamW, parameter groups", parameter_groups),
    optimizer(
        "Adam, amsgrad",
        with_optimizer(lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True)),
        like="AdamW, foreach",
    ),
    optimizer("SGD, momentum", with_optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))),
    optimizer("Adafactor", with_optimizer(lambda p: torch.optim.Adafactor(p, lr=1e-2))),
    *of_two("Muon and AdamW", torch.optim.Muon),
    *of_two("SGD and AdamW", lambda p: torch.optim.SGD(p, lr=0.1), like="Muon and AdamW"),
    *of_two("two AdamW", lambda p: torch.optim.AdamW(p, lr=1e-3), like="Muon and AdamW"),
    optimizer("LBFGS, with its closure", with_closure, lacks={GRADIENTS: "the last gradient of LBFGS"}),
    optimizer("an optimizer in the backward pass for each parameter, all given", functools.partial(in_backward, True)),
    optimizer(
        "an optimizer in the backward pass for each parameter, none given",
        functools.partial(in_backward, False),
        lacks=NO_OPTIMIZER,
        like="no optimizer given to attach",
    ),
    optimizer("no optimizer given to attach", without_optimizer, lacks=NO_OPTIMIZER),
]
