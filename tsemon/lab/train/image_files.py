"""Images from folders, one below for each class, and from `.npz` arrays.

Axes: `N` images, `C` channels, `S` image side.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument, MissingData, needing
from tsemon.lab.train.cifar10 import is_cifar10, read_cifar10
from tsemon.lab.train.images import Images, split_images

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
VALIDATION_FOLDERS = ("validation", "val", "test")
ARRAYS = (("images", "labels"), ("x_train", "y_train"))
VALIDATION_ARRAYS = (("val_images", "val_labels"), ("x_test", "y_test"))


def read_images(path: Path, *, image_size: int = 32, validation_ratio: float = 0.1, seed: int = 0) -> Images:
    """CIFAR-10's folder, a folder with one subfolder for each class, or an `.npz`.

    Files are cut to their middle square and resized to `image_size`, in colour. Folders `train` and `val` (or `validation`,
    `test`) with the classes in them are taken as they are, as are `val_images` and `val_labels`, or `x_test` and `y_test`,
    of an .npz; otherwise `seed` draws a share of `validation_ratio` to validate with.
    """
    if path.suffix == ".npz" and path.is_file():
        return _from_arrays(path, validation_ratio, seed)
    if is_cifar10(path):
        return read_cifar10(path)
    if not path.is_dir():
        raise MissingData(
            f"{path} is not there; expected an .npz or a folder with one subfolder of images for each class"
        )
    return _from_folders(path, image_size, validation_ratio, seed)


def _from_folders(path: Path, image_size: int, validation_ratio: float, seed: int) -> Images:
    validation = next((path / name for name in VALIDATION_FOLDERS if (path / name).is_dir()), None)
    if validation is None or not (path / "train").is_dir():
        classes = _classes(path)
        return _split(*_read_classes(path, classes, image_size), validation_ratio, len(classes), seed)
    classes = _classes(path / "train")
    of_training, of_validation = (_read_classes(part, classes, image_size) for part in (path / "train", validation))
    return Images(*of_training, *of_validation, num_classes=len(classes))


def _split(images: Tensor, labels: Tensor, validation_ratio: float, num_classes: int, seed: int) -> Images:
    if not 0 <= validation_ratio < 1:
        raise InvalidArgument(f"validation_ratio is a share from 0 to less than 1, got {validation_ratio}")
    num_val = int(len(images) * validation_ratio)
    return split_images(images, labels, num_val=num_val, num_classes=num_classes, seed=seed)


def _classes(folder: Path) -> list[str]:
    """In the order of their names, which is that of their labels."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise MissingData(f"{folder} has no subfolders; expected one for each class, with its images in it")
    return classes


def _read_classes(folder: Path, classes: list[str], image_size: int) -> tuple[Tensor, Tensor]:
    images, labels = [], []
    for label, name in enumerate(classes):
        files = sorted(path for path in (folder / name).glob("*") if path.suffix.lower() in SUFFIXES)
        if not files:
            raise MissingData(f"{folder / name} holds no images: expected {', '.join(SUFFIXES)}")
        images += [_read_image(path, image_size) for path in files]
        labels += [label] * len(files)
    return torch.stack(images), torch.tensor(labels)


def _read_image(path: Path, side: int) -> Tensor:
    """(3, S, S) uint8."""
    with needing("image files need Pillow; pip install 'tsemon[train]'"):
        from PIL import Image, ImageOps
    try:
        with Image.open(path) as image:
            fitted = ImageOps.fit(image.convert("RGB"), (side, side))
    except (OSError, SyntaxError) as error:
        raise InvalidArgument(f"{path} cannot be read as an image: {error}") from error
    return torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8).view(side, side, 3).permute(2, 0, 1)


def _from_arrays(path: Path, validation_ratio: float, seed: int) -> Images:
    with needing("an .npz needs NumPy; pip install 'tsemon[train]'"):
        import numpy
    try:
        with path.open("rb") as file, numpy.load(file, allow_pickle=False) as arrays:
            pairs = [
                next(
                    ((arrays[images], arrays[labels]) for images, labels in names if {images, labels} <= {*arrays}),
                    None,
                )
                for names in (ARRAYS, VALIDATION_ARRAYS)
            ]
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidArgument(f"{path} cannot be read as arrays: {error}") from error
    if pairs[0] is None:
        raise InvalidArgument(f"{path} has neither images and labels nor x_train and y_train")
    train_images, train_labels = _as_images(path, *pairs[0])
    num_classes = int(train_labels.max()) + 1
    if pairs[1] is None:
        return _split(train_images, train_labels, validation_ratio, num_classes, seed)
    val_images, val_labels = _as_images(path, *pairs[1])
    if int(val_labels.max()) >= num_classes:
        raise InvalidArgument(
            f"{path} has the label {int(val_labels.max())} to validate with; expected labels up to {num_classes - 1}, "
            "the largest one to train on"
        )
    return Images(train_images, train_labels, val_images, val_labels, num_classes=num_classes)


def _as_images(path: Path, images: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """(N, S, S), (N, S, S, C) or (N, C, S, S), uint8 or floats from -1 to 1, as (N, C, S, S)."""
    try:
        pixels, classes = torch.from_numpy(images), torch.from_numpy(labels).long().flatten()
    except TypeError as error:
        raise InvalidArgument(f"{path} cannot be read as images and labels: expected arrays of numbers") from error
    if images.ndim not in (3, 4) or not 0 < len(images) == len(classes):
        raise InvalidArgument(
            f"{path}: expected as many labels as images, at least one, got images {images.shape} and labels {labels.shape}"
        )
    if (least := int(classes.min())) < 0:
        raise InvalidArgument(f"{path} has the label {least}; expected labels from 0 up")
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and pixels.shape[1] == pixels.shape[2] and pixels.shape[3] in (1, 3, 4):
        pixels = pixels.permute(0, 3, 1, 2)
    if pixels.dtype == torch.uint8:
        return pixels.contiguous(), classes
    if not pixels.is_floating_point() or not bool((pixels.abs() <= 1).all()):
        raise InvalidArgument(f"{path}: images are uint8 or floats from -1 to 1, got others, of {pixels.dtype}")
    return pixels.float().contiguous(), classes
