"""CIFAR-10 in the two forms in which its authors give it away: binary, and Python 2 pickles.

Axes: `N` images; each is (3, 32, 32) uint8.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument, MissingData, MissingPackage
from tsemon.train.images import Images

HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
PIXELS = 3 * 32 * 32
RECORD_BYTES = 1 + PIXELS
"""Binary: the label, then red, green and blue, row by row."""
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
VALIDATION = ("test_batch",)
FOLDERS = ("", "cifar-10-batches-bin", "cifar-10-batches-py")
"""The files lie in the folder, or in one below it, as the archives have them."""


def is_cifar10(path: Path) -> bool:
    return _find(path) is not None


def read_cifar10(path: Path) -> Images:
    """Five training batches, and the test batch to validate with. Raises MissingData where they are not."""
    found = _find(path)
    if found is None:
        raise MissingData(
            f"expected CIFAR-10's data_batch_1.bin to data_batch_5.bin and test_batch.bin, or the same without .bin, "
            f"in {path}; to be had at {HOME}"
        )
    folder, suffix = found
    read = _read_binary if suffix else _read_pickle
    parts = [[read(folder / (name + suffix)) for name in names] for names in (TRAIN, VALIDATION)]
    (train_images, train_labels), (val_images, val_labels) = (map(torch.cat, zip(*part, strict=True)) for part in parts)
    return Images(
        train_images=train_images,
        train_labels=train_labels,
        val_images=val_images,
        val_labels=val_labels,
        num_classes=10,
    )


def _find(path: Path) -> tuple[Path, str] | None:
    for folder in (path / name for name in FOLDERS):
        for suffix in (".bin", ""):
            if all((folder / (name + suffix)).is_file() for name in TRAIN + VALIDATION):
                return folder, suffix
    return None


def _read_binary(path: Path) -> tuple[Tensor, Tensor]:
    size = path.stat().st_size
    if size == 0 or size % RECORD_BYTES:
        raise InvalidArgument(
            f"{path} has {size} bytes, not a multiple of {RECORD_BYTES}: it is damaged, or no CIFAR-10 file"
        )
    records = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(-1, RECORD_BYTES)
    return _checked(path, records[:, 1:].contiguous(), records[:, 0].long())


def _read_pickle(path: Path) -> tuple[Tensor, Tensor]:
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        images, labels = torch.from_numpy(batch[b"data"]), torch.tensor(batch[b"labels"], dtype=torch.int64)
    except MissingPackage:
        raise
    except Exception as error:  # whatever bytes there are, the unpickler may trip over them in any way
        raise InvalidArgument(f"{path} is no CIFAR-10 file for Python: {error}") from error
    return _checked(path, images, labels)


def _checked(path: Path, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    is_right = images.dtype == torch.uint8 and images.shape == (len(labels), PIXELS) and bool((labels < 10).all())
    if not is_right:
        raise InvalidArgument(
            f"{path}: expected rows of {PIXELS} bytes with labels from 0 to 9, got {tuple(images.shape)}"
        )
    return images.view(-1, 3, 32, 32), labels


class _ArraysOnly(pickle.Unpickler):
    """Makes numbers, strings, containers and NumPy arrays, and refuses all else: a pickle may name any function."""

    ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise InvalidArgument(f"it asks for {module}.{name}, which the images have no use for")
        if name == "_reconstruct":
            return _numpy()._core.multiarray._reconstruct  # the place it has in NumPy 2
        return super().find_class(module, name)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise MissingPackage("CIFAR-10's Python files need NumPy; pip install 'tsemon[train]'") from error
    return numpy
