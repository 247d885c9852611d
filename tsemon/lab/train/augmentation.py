"""Changed copies of training images, all drawn from the generator that is given: a resumed run goes on with the same.

Axes: `B` batch, `C` channels, `S` image side, `P` padded side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument
from tsemon.lab.train.images import Augment

PADDING_RATIO = 1 / 8
"""Of the side: 4 pixels for CIFAR-10, as is usual."""


def augmentation(name: str) -> Augment | None:
    """By its name: none, or crop-flip."""
    known = {"none": None, "crop-flip": crop_and_flip}
    if name not in known:
        raise InvalidArgument(f"augmentation is one of {', '.join(known)}, got {name!r}")
    return known[name]


def crop_and_flip(images_BCSS: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to an eighth of its side, over zeros, and every second one or so mirrored."""
    num_images, _, side, _ = images_BCSS.shape
    pad = int(side * PADDING_RATIO)
    padded_BCPP = torch.nn.functional.pad(images_BCSS, (pad, pad, pad, pad))
    top, left = torch.randint(2 * pad + 1, (2, num_images, 1), generator=generator)
    is_mirrored = torch.randint(2, (num_images, 1), generator=generator).bool()
    along = torch.arange(side)
    rows, columns = top + along, left + torch.where(is_mirrored, along.flip(0), along)
    image = torch.arange(num_images)[:, None, None]
    return padded_BCPP[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
