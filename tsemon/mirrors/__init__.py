"""The tools that frames go to as well, so that nobody has to leave theirs: `attach(..., also=[TensorBoard("runs/gpt")])`."""

from __future__ import annotations

from tsemon.mirrors.mirrored import Mirror, Mirrored, as_mirrors
from tsemon.mirrors.tensorboard import TensorBoard
from tsemon.mirrors.wandb import WandB

__all__ = ["Mirror", "Mirrored", "TensorBoard", "WandB", "as_mirrors"]
