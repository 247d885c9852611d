"""The transformers that come with torch."""

import itertools

import torch
from torch import nn

from tests.setups.harness import Setup, Training, adamw
from tests.setups.matrix import ATTENTION, FEED_FORWARD, GRADIENTS, HIDDEN_STATES, OUTPUTS, UPDATES


def regression(make_model, call, shape=(4, 12, 32)):
    """Learns to answer noise with noise."""

    def build():
        model = make_model()
        optimizer = adamw([p for p in model.parameters() if p.requires_grad])
        generator = torch.Generator().manual_seed(7)
        data = (torch.randn(2, *shape, generator=generator) for _ in itertools.count())

        def step():
            inputs, targets = next(data)
            loss = (call(model, inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training(model=model, optimizer=optimizer, step=step)

    return build


def encoder(**options):
    layer = nn.TransformerEncoderLayer(32, 4, 64, **options)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def decoder():
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), 3)


def causal(model, x_BTD):
    mask = nn.Transformer.generate_square_subsequent_mask(x_BTD.shape[1])
    return model(x_BTD, x_BTD.flip(1), tgt_mask=mask, tgt_is_causal=True)


def both():
    return nn.Transformer(32, 4, 2, 2, 64, batch_first=True)


class OnFrozenEncoder(nn.Module):
    """A head on an encoder that does not train any more."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder(batch_first=True).requires_grad_(False)
        self.head = nn.Linear(32, 32)
        self.encoder.eval()

    def forward(self, x_BTD):
        return self.head(self.encoder(x_BTD))


def module(name, build, **more):
    more.setdefault("lacks", NO_LOGITS)
    return Setup(kind="Models of torch.nn", name=name, build=build, **more)


def apply(model, x):
    return model(x)


NO_LOGITS = {OUTPUTS: "holds no tensor named logits"}

SETUPS = [
    module("TransformerEncoder", regression(encoder, apply, shape=(12, 4, 32))),
    module("TransformerEncoder, batch_first", regression(lambda: encoder(batch_first=True), apply)),
    module(
        "TransformerEncoder, norm_first",
        regression(lambda: encoder(batch_first=True, norm_first=True), apply),
        like="TransformerEncoder, batch_first",
    ),
    module("TransformerDecoder, causal", regression(decoder, causal)),
    module("Transformer, encoder and decoder", regression(both, lambda model, x: model(x, x.flip(1))), num_blocks=4),
    module(
        "a head on a frozen TransformerEncoder in eval mode",
        regression(OnFrozenEncoder, apply),
        lacks=NO_LOGITS
        | dict.fromkeys((HIDDEN_STATES, ATTENTION, FEED_FORWARD), "frozen in eval mode")
        | dict.fromkeys((GRADIENTS, UPDATES), "blocks are frozen"),
    ),
]
