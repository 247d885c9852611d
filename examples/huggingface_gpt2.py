"""Watch a Hugging Face model: its blocks and attentions are found without being told.

    python examples/huggingface_gpt2.py

The weights are random, so nothing is downloaded.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tsemon

torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def tell(alert: tsemon.Alert) -> None:
    print(f"{alert.state} at step {alert.firing_step}: {alert.summary}")


with tsemon.attach(model, optimizer, run="gpt2", project="examples", every=5, on_alert=tell) as monitor:
    for _ in range(20):
        tokens = torch.randint(256, (4, 64))
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss=loss, step_tokens=tokens.numel())

print(monitor)
