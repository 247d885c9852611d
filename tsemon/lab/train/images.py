"""Images in memory, batches of them, and a small set that needs no download.

Axes: `N` images of a set, `B` batch, `C` channels, `S` image side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument, ShapeError, needing
from tsemon.lab.train.batches import Batch, Batches, generator

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Images (B, C, S, S) to images of the same shape and kind."""


@dataclass(frozen=True)
class Images:
    """Images (N, C, S, S), uint8 or float32 in [-1, 1], and labels (N,) int64 from 0 to num_classes - 1."""

    train_images: Tensor
    train_labels: Tensor
    val_images: Tensor
    val_labels: Tensor
    num_classes: int

    def __post_init__(self) -> None:
        for images, labels in ((self.train_images, self.train_labels), (self.val_images, self.val_labels)):
            if images.ndim != 4 or images.shape[2] != images.shape[3] or labels.shape != images.shape[:1]:
                shapes = f"{tuple(images.shape)} and {tuple(labels.shape)}"
                raise ShapeError(f"expected square images (N, C, S, S) and labels (N,), got {shapes}")

    @property
    def sizes(self) -> dict[str, int]:
        """What a model has to know of them."""
        _, channels, side, _ = self.train_images.shape
        return {"image_size": side, "channels": channels, "num_classes": self.num_classes}


def digits(seed: int = 0) -> Images:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, enlarged bilinearly to 16 x 16: 1,437 to train on, 360 to validate.

    `seed` draws which go where. Raises MissingPackage without scikit-learn.
    """
    with needing("the digits come with scikit-learn, which is not installed; pip install 'tsemon[train]'"):
        from sklearn.datasets import load_digits
    pixels, classes = load_digits(return_X_y=True)
    small = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1  # pixels are 0 to 16
    images = torch.nn.functional.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)
    return split_images(images, torch.tensor(classes, dtype=torch.int64), num_val=360, num_classes=10, seed=seed)


def split_images(images: Tensor, labels: Tensor, *, num_val: int, num_classes: int, seed: int) -> Images:
    """Draws `num_val` of the images to validate with; the others are to train on."""
    if not 0 <= num_val < len(images):
        raise InvalidArgument(f"expected from 0 to {len(images) - 1} images to validate with, got {num_val}")
    order = torch.randperm(len(images), generator=generator(seed))
    train, val = order[: len(order) - num_val], order[len(order) - num_val :]
    return Images(images[train], labels[train], images[val], labels[val], num_classes=num_classes)


def image_batches(
    images: Tensor, labels: Tensor, batch_size: int, seed: int, augment: Augment | None = None
) -> Batches:
    """Endless (images, labels) of `batch_size`; each pass over the data is shuffled, and its remainder left out."""
    return _Shuffled(images, labels, batch_size, seed, augment)


def images_in_order(images: Tensor, labels: Tensor, batch_size: int) -> Iterator[Batch]:
    """One pass for an evaluation, with a last batch that may be smaller."""
    parts = (torch.split(part, batch_size) for part in (images, labels))
    for some_images, some_labels in zip(*parts, strict=True):
        yield scaled(some_images), some_labels


def scaled(images: Tensor) -> Tensor:
    """Bytes to float32 in [-1, 1]; other images are so already."""
    return images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images


class _Shuffled(Batches):
    def __init__(self, images: Tensor, labels: Tensor, batch_size: int, seed: int, augment: Augment | None) -> None:
        if not 1 <= batch_size <= len(images):
            raise InvalidArgument(f"batch_size must be from 1 to the {len(images)} images there are, got {batch_size}")
        self._images, self._labels, self._batch_size, self._augment = images, labels, batch_size, augment
        self._orders, self._changes = generator(seed), generator(seed + 1)
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._before_pass = self._orders.get_state()
        self._order = torch.randperm(len(self._images), generator=self._orders)
        self._start = 0

    def __next__(self) -> Batch:
        if self._start + self._batch_size > len(self._order):
            self._begin_pass()
        chosen = self._order[self._start : self._start + self._batch_size]
        self._start += self._batch_size
        images = self._images[chosen]
        if self._augment is not None:
            images = self._augment(images, self._changes)
        return scaled(images), self._labels[chosen]

    def state_dict(self) -> dict[str, Any]:
        return {"before_pass": self._before_pass, "start": self._start, "changes": self._changes.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._orders.set_state(state["before_pass"])
        self._begin_pass()
        self._start = state["start"]
        self._changes.set_state(state["changes"])
