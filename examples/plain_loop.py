"""Watch a plain PyTorch loop.   python examples/plain_loop.py

Frames go to the service at TSEMON_SERVER; without one they wait in ./.tsemon until `tsemon sync` sends them.
"""

import torch

import tsemon
from tsemon.lab.train import standard_library_text, text_batches
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig

torch.manual_seed(0)
model = CausalLanguageModel(CausalLanguageModelConfig(vocab=256, context=64, depth=6, width=64, heads=4, ffn=256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = text_batches(standard_library_text(100_000), context=64, batch_size=8, seed=0)

with tsemon.attach(model, optimizer, run="plain-loop", project="examples") as monitor:
    for _ in range(30):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)

print(monitor)
