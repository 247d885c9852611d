"""What the benchmarks train: one language model on one batch, step after step.

Axes: `B` batch, `T` tokens.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig, Llama

SIZES = {
    "tiny": {"vocab": 512, "context": 64, "depth": 2, "width": 64, "heads": 4, "ffn": 128},
    "small": {"vocab": 2048, "context": 256, "depth": 6, "width": 256, "heads": 8, "ffn": 1024},
    "many-blocks": {"vocab": 512, "context": 64, "depth": 120, "width": 64, "heads": 4, "ffn": 128},
    # GPT-2 small, its vocabulary rounded up to a multiple of 128. The output layer here is its own, so there are 163 M.
    "gpt2-124m": {"vocab": 50304, "context": 1024, "depth": 12, "width": 768, "heads": 12, "ffn": 3072},
    # The largest model of Value Residual Learning (arXiv 2410.17897, Table 4).
    "resformer-468m": {"vocab": 50277, "context": 2048},
}
"""Shapes of `tsemon.models.CausalLanguageModel`, but for the last, which is a preset of `Llama`."""


def build(size: str) -> torch.nn.Module:
    if size == "resformer-468m":
        return Llama.from_preset(size)
    return CausalLanguageModel(CausalLanguageModelConfig(**SIZES[size]))


class Workload:
    """A model, its optimizer, and a training step. `bfloat16` is autocast: parameters stay in float32."""

    def __init__(self, size: str, batch: int, device: str, dtype: str, compiled: bool) -> None:
        torch.manual_seed(0)
        self.size, self.batch, self.dtype, self.compiled = size, batch, dtype, compiled
        self.device = torch.device(device)
        self.model = build(size).to(self.device)
        self.called: Any = torch.compile(self.model) if compiled else self.model
        """What the step calls: the model, or what torch.compile made of it."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.use(batch, SIZES[size]["context"])

    def use(self, batch: int, context: int) -> None:
        """Train on a batch of this shape from now on."""
        self.tokens_BT = torch.randint(SIZES[self.size]["vocab"], (batch, context + 1), device=self.device)

    def gradients(self, model: Any = None) -> Tensor:
        """Forward and backward, through `model` in place of what the step calls."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            logits = (model or self.called)(self.tokens_BT[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens_BT[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.gradients()
        self.optimizer.step()
        return loss

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def parameters(self) -> str:
        return f"{sum(p.numel() for p in self.model.parameters()) / 1e6:.1f} M parameters, batch {self.batch}"

    @property
    def where(self) -> str:
        cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)"
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else cpu
        return f"{device}, torch {torch.__version__}, {self.dtype}{', compiled' if self.compiled else ''}"

    def __str__(self) -> str:
        return f"{self.where}\n{self.size}: {SIZES[self.size]}, {self.parameters}"
