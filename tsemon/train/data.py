"""Two small data sets that need no download, and endless batches of them.

Every order is drawn from a generator of its own: a seed gives the same batches whatever else the process draws.
Axes: `N` samples, `B` batch, `T` tokens; images are (N, 1, 16, 16).
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument, MissingPackage


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Handwritten digits: images (N, 1, 16, 16) float32 in [-1, 1], labels (N,) from 0 to 9."""

    train_images: Tensor
    train_labels: Tensor
    val_images: Tensor
    val_labels: Tensor


def digits(seed: int = 0) -> Digits:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, enlarged bilinearly to 16 x 16: 1,437 to train on, 360 to validate.

    `seed` draws which go where. Raises MissingPackage without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingPackage(
            "the digits come with scikit-learn, which is not installed; pip install 'tsemon[demo]'"
        ) from error
    pixels, classes = load_digits(return_X_y=True)
    small = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1  # pixels are 0 to 16
    images = torch.nn.functional.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)
    labels = torch.tensor(classes, dtype=torch.int64)
    order = torch.randperm(len(images), generator=_generator(seed))
    train, val = order[:1437], order[1437:]
    return Digits(
        train_images=images[train], train_labels=labels[train], val_images=images[val], val_labels=labels[val]
    )


def image_batches(images: Tensor, labels: Tensor, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (images, labels) of `batch_size`; each pass over the data is shuffled, and its remainder left out."""
    if not 1 <= batch_size <= len(images):
        raise InvalidArgument(f"batch_size must be from 1 to the {len(images)} images there are, got {batch_size}")
    generator = _generator(seed)
    while True:
        order = torch.randperm(len(images), generator=generator)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield images[chosen], labels[chosen]


def standard_library_text(size_bytes: int = 2_000_000) -> Tensor:
    """The first `size_bytes` bytes of the Python standard library's sources, in the order of their paths: (N,) uint8.

    The text is that of the running Python, so figures compare only within one Python version.
    Raises MissingPackage where the interpreter has no standard library as source files.
    """
    if size_bytes < 1:
        raise InvalidArgument(f"size_bytes must be at least 1, got {size_bytes}")
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _sources(root):
        text += path.read_bytes()
        if len(text) >= size_bytes:
            break
    if not text:
        raise MissingPackage(f"no Python sources under {root}; use a Python that has its standard library as files")
    return torch.frombuffer(text[:size_bytes], dtype=torch.uint8)


def _sources(folder: Path) -> Iterator[Path]:
    """All .py files in the order of their paths, without walking through installed packages."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in ("site-packages", "dist-packages"):
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def text_batches(text: Tensor, context: int, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), both (B, T) int64: random windows, and the same windows one byte later."""
    if batch_size < 1 or not 1 <= context < len(text):
        raise InvalidArgument(
            f"batch_size must be at least 1 and context from 1 to {len(text) - 1} for this text, "
            f"got batch_size {batch_size} and context {context}"
        )
    generator = _generator(seed)
    window = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch_size, 1), generator=generator)
        tokens = text[starts + window].long()
        yield tokens[:, :-1], tokens[:, 1:]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
