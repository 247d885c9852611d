"""Narrow numbers: autocast, loss scaling, parameters in half precision."""

import torch

from tests.setups.harness import Setup, Training, adamw, batches, next_token_loss, plain_loop
from tests.setups.loops import GPT, manual


def autocast(dtype):
    def loss_of(model, ids_BT):
        with torch.autocast("cpu", dtype):
            return next_token_loss(model, ids_BT)

    return lambda make_model=GPT: plain_loop(make_model, loss_of=loss_of)


def scaled(first_scale, **options):
    def build(make_model=GPT):
        model = make_model()
        optimizer, data = adamw(model.parameters(), **options), batches()
        scaler = torch.amp.GradScaler("cpu", init_scale=first_scale, backoff_factor=2.0**-90)

        def step():
            with torch.autocast("cpu", torch.float16):
                loss = next_token_loss(model, next(data))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        return Training(model=model, optimizer=optimizer, step=step)

    return build


def unscaled_by_hand(make_model=GPT):
    model = make_model()
    optimizer, data = adamw(model.parameters()), batches()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step():
        with torch.autocast("cpu", torch.float16):
            loss = next_token_loss(model, next(data))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model=model, optimizer=optimizer, step=step)


def in_dtype(dtype):
    return lambda make_model=GPT: plain_loop(lambda: make_model().to(dtype), lambda p: torch.optim.AdamW(p, lr=1e-2))


def narrow(name, build, **more):
    return Setup(kind="Precision", name=name, build=build, **more)


SETUPS = [
    narrow("autocast to bfloat16", autocast(torch.bfloat16)),
    narrow("autocast to float16, GradScaler", scaled(1024.0), like="GradScaler that skips a step"),
    narrow(
        "autocast to float16, GradScaler, fused AdamW",
        scaled(1024.0, fused=True),
        like="GradScaler that skips a step, fused AdamW",
    ),
    narrow("GradScaler that skips a step", scaled(2.0**100)),
    narrow("GradScaler that skips a step, fused AdamW", scaled(2.0**100, fused=True)),
    narrow("GradScaler, unscaled and clipped by hand", unscaled_by_hand, clips=True),
    narrow("parameters in bfloat16", in_dtype(torch.bfloat16)),
    narrow(
        "parameters in float64",
        in_dtype(torch.float64),
        attention_twin=lambda: in_dtype(torch.float64)(manual),
        like="parameters in bfloat16",
    ),
]
