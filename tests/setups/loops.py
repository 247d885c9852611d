"""Loops around one and the same model."""

import itertools

import torch

from tests.setups.harness import GPT, Setup, Training, adamw, batches, next_token_loss, plain_loop


def manual(**options):
    """The same numbers by a softmax in plain sight."""
    return GPT(is_fused=False, **options)


def accumulating(*nums_passes):
    """Over so many passes in a step, and in the step after it, and around again."""

    def build(make_model=GPT):
        model = make_model()
        optimizer, data, nums = adamw(model.parameters()), batches(), itertools.cycle(nums_passes)

        def step():
            losses, num_passes = [], next(nums)
            for _ in range(num_passes):
                losses.append(next_token_loss(model, next(data)) / num_passes)
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).sum().detach()

        return Training(model=model, optimizer=optimizer, step=step)

    return build


def with_all_rows(make_model=GPT):
    """Far more than the 64 that are weighed by default."""
    return plain_loop(make_model, data=batches(16), options={"attention_rows": "all"})


def clipping(make_model=GPT):
    model = make_model()
    optimizer, data = adamw(model.parameters()), batches()

    def step():
        optimizer.zero_grad()
        loss = next_token_loss(model, next(data))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return Training(model=model, optimizer=optimizer, step=step)


def evaluating(make_model=GPT):
    """An evaluation before and after every step."""
    model = make_model()
    optimizer, data, held_out = adamw(model.parameters()), batches(), next(batches(2))

    def evaluate():
        model.eval()
        with torch.no_grad():
            next_token_loss(model, held_out)
        model.train()

    def step():
        loss = next_token_loss(model, next(data))
        evaluate()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        evaluate()
        return loss.detach()

    return Training(model=model, optimizer=optimizer, step=step)


def scheduled(make_model=GPT):
    model = make_model()
    optimizer, data = adamw(model.parameters()), batches()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)

    def step():
        loss = next_token_loss(model, next(data))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model=model, optimizer=optimizer, step=step)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.randint(3, 100, (12,))  # from the worker's own random state


def loading(make_model=GPT):
    """Each epoch of two steps forks its workers anew."""

    def epochs():
        while True:
            yield from torch.utils.data.DataLoader(Tokens(), batch_size=4, shuffle=True, num_workers=2)

    return plain_loop(make_model, data=epochs())


def in_eval_mode(make_model=GPT):
    """To be rid of dropout, as in some fine-tuning."""
    training = plain_loop(make_model)
    training.model.eval()
    return training


def checkpointed(use_reentrant):
    def build(make_model=GPT):
        return plain_loop(lambda: make_model(checkpointing={"use_reentrant": use_reentrant}))

    return build


def loop(name, build, **more):
    return Setup(kind="Loops", name=name, build=build, attention_twin=lambda: build(manual), **more)


SETUPS = [
    loop("plain loop", plain_loop),
    loop("gradient accumulation", accumulating(3), like="gradient accumulation, the last of an epoch shorter"),
    loop("gradient accumulation, the last of an epoch shorter", accumulating(3, 3, 1)),
    loop("gradient clipping", clipping, clips=True),
    loop("learning rate schedule", scheduled, like="plain loop"),
    loop("evaluation between steps", evaluating),
    loop("DataLoader with two workers", loading),
    loop("training in eval mode", in_eval_mode),
    loop('attach(attention_rows="all")', with_all_rows, like="plain loop"),
    loop("gradient checkpointing, reentrant", checkpointed(True)),
    loop("gradient checkpointing, not reentrant", checkpointed(False)),
]
