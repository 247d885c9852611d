"""Training the reference models: data, schedules, recipes, one loop, and checkpoints that a run goes on from exactly."""

from tsemon.lab.train.images import digits, image_batches
from tsemon.lab.train.loop import train_steps
from tsemon.lab.train.text import standard_library_text, text_batches, text_streams

__all__ = ["digits", "image_batches", "standard_library_text", "text_batches", "text_streams", "train_steps"]
