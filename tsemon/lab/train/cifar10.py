"""CIFAR-10 in the two forms in which its authors give it away: binary, and Python 2 pickles.

Axes: `N` images; each is (3, 32, 32) uint8.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument, MissingData, MissingPackage, needing
from tsemon.lab.train.images import Images

HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
PIXELS = 3 * 32 * 32
RECORD_BYTES = 1 + PIXELS
"""Binary: the label, then red, green and blue, row by row."""
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
VALIDATION = ("test_batch",)
FOLDERS = ("", "cifar-10-batches-bin", "cifar-10-batches-py")
"""The files lie in the folder, or in one below it, as the archives have them."""


def is_cifar10(path: Path) -> bool:
    """Whether any of its files are there; `read_cifar10` says which are not."""
    return len(_missing(*_place(path))) < len(TRAIN + VALIDATION)


def read_cifar10(path: Path) -> Images:
    """Five training batches, and the test batch to validate with. Raises MissingData where they are not."""
    folder, suffix = _place(path)
    if missing := _missing(folder, suffix):
        raise MissingData(
            f"expected CIFAR-10's data_batch_1.bin to data_batch_5.bin and test_batch.bin, or the same without .bin, "
            f"in {folder}, which lacks {', '.join(missing)}; to be had at {HOME}"
        )
    read = _read_binary if suffix else _read_pickle
    parts = [[read(folder / (name + suffix)) for name in names] for names in (TRAIN, VALIDATION)]
    (train_images, train_labels), (val_images, val_labels) = (map(torch.cat, zip(*part, strict=True)) for part in parts)
    return Images(train_images, train_labels, val_images, val_labels, num_classes=10)


def _place(path: Path) -> tuple[Path, str]:
    """The folder and the suffix of which the fewest files are missing."""
    places = [(path / name, suffix) for name in FOLDERS for suffix in (".bin", "")]
    return min(places, key=lambda place: len(_missing(*place)))


def _missing(folder: Path, suffix: str) -> list[str]:
    return [name + suffix for name in TRAIN + VALIDATION if not (folder / (name + suffix)).is_file()]


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
    is_known = bool(((labels >= 0) & (labels < 10)).all())
    is_right = images.dtype == torch.uint8 and images.shape == (len(labels), PIXELS) and is_known
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
    with needing("CIFAR-10's Python files need NumPy; pip install 'tsemon[train]'"):
        import numpy
    return numpy
