"""Measure a quantity of your own: the kurtosis of the hidden state, which grows with outlier features.

python examples/own_quantity.py

Charts, rules, REST and /metrics treat it like a metric of the catalogue.
"""

import torch

import tsemon
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig
from tsemon.train import standard_library_text, text_batches


def kurtosis(x, valid):
    """One number per sequence, of x (batch, tokens, width), which is zero where `valid` (batch, tokens) is false."""
    num_entries = valid.sum(dim=1) * x.shape[-1]
    mean = x.sum(dim=(1, 2)) / num_entries
    centred = torch.where(valid[..., None], x - mean[:, None, None], 0.0)
    return num_entries * centred.pow(4).sum(dim=(1, 2)) / centred.square().sum(dim=(1, 2)).square()


KURTOSIS = tsemon.Quantity(
    name="hidden_kurtosis",
    of="output",
    axis="activation",
    function=kurtosis,  # the mean over sequences, and over processes, is the default merge
    title="kurtosis of the hidden state",
    equation="mean of (x - m)^4 / (mean of (x - m)^2)^2, 3 for a normal distribution",
    low=1.0,
    log_scale=True,
)


def main():
    torch.manual_seed(0)
    model = CausalLanguageModel(CausalLanguageModelConfig(vocab=256, context=64, depth=4, width=64, heads=4, ffn=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = text_batches(standard_library_text(100_000), context=64, batch_size=8, seed=0)
    with tsemon.attach(
        model, optimizer, run="own-quantity", project="examples", every=3, measures=[KURTOSIS]
    ) as monitor:
        for _ in range(30):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    print(monitor)


if __name__ == "__main__":
    main()
