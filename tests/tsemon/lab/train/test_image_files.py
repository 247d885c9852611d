import pickle
import struct

import numpy as np
import pytest
import torch

from tsemon.errors import InvalidArgument, MissingData
from tsemon.lab.train.cifar10 import TRAIN, VALIDATION, read_cifar10
from tsemon.lab.train.image_files import read_images

NAMES = TRAIN + VALIDATION
PIXELS = np.zeros((4, 4, 4), np.uint8)


def cifar_arrays(seed):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (4, 3072), dtype=np.uint8), generator.integers(0, 10, 4)


def binary_batch(images, labels):
    """<1 x label><3072 x pixel> for each image, as https://www.cs.toronto.edu/~kriz/cifar.html has it."""
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True))


def python_2_batch(images, labels):
    """What cPickle of Python 2 wrote with protocol 2: strings are bytes, and NumPy's functions have their old places."""

    def string(raw):
        return b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)) + raw

    def number(value):
        return b"M" + struct.pack("<H", value)

    dtype = b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R" + b"(K\x03" + string(b"|") + b"NNN"
    dtype += 2 * b"J\xff\xff\xff\xff" + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b") + b"\x87R"
    shape = number(images.shape[0]) + number(images.shape[1]) + b"\x86"
    array += b"(K\x01" + shape + dtype + b"\x89" + string(images.tobytes()) + b"tb"
    label_list = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + label_list + b"u."


def write_cifar(folder, suffix, batch):
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate(NAMES):
        (folder / (name + suffix)).write_bytes(batch(*cifar_arrays(seed)))
    return folder


@pytest.mark.parametrize(
    ("below", "suffix", "batch"),
    [("", ".bin", binary_batch), ("cifar-10-batches-bin", ".bin", binary_batch), ("", "", python_2_batch)],
    ids=["binary", "binary, as unpacked", "Python"],
)
class TestCifar10:
    def test_is_five_batches_to_train_on_and_one_to_validate_with(self, tmp_path, below, suffix, batch):
        write_cifar(tmp_path / below, suffix, batch)
        images = read_images(tmp_path)
        expected, labels = zip(*(cifar_arrays(seed) for seed in range(6)), strict=True)
        assert np.array_equal(images.train_images.flatten(1), np.concatenate(expected[:5]))
        assert np.array_equal(images.val_images.flatten(1), expected[5])
        assert images.train_labels.tolist() == np.concatenate(labels[:5]).tolist()
        assert images.val_labels.tolist() == labels[5].tolist()
        assert images.sizes == {"image_size": 32, "channels": 3, "num_classes": 10}

    def test_is_told_when_a_file_is_cut_off(self, tmp_path, below, suffix, batch):
        folder = write_cifar(tmp_path / below, suffix, batch)
        file = folder / f"data_batch_3{suffix}"
        file.write_bytes(file.read_bytes()[:-7])
        with pytest.raises(InvalidArgument, match="data_batch_3"):
            read_cifar10(tmp_path)

    @pytest.mark.parametrize("name", ["data_batch_3", "test_batch"])
    def test_is_told_when_a_file_is_missing(self, tmp_path, below, suffix, batch, name):
        (write_cifar(tmp_path / below, suffix, batch) / (name + suffix)).unlink()
        with pytest.raises(MissingData, match=f"lacks {name}{suffix}; "):
            read_images(tmp_path)


class TestCifar10ForPython:
    def test_is_read_as_newer_pickles_too(self, tmp_path):
        def batch(images, labels):
            return pickle.dumps({b"data": images, b"labels": labels.tolist()}, protocol=2)

        write_cifar(tmp_path, "", batch)
        assert np.array_equal(read_cifar10(tmp_path).val_images.flatten(1), cifar_arrays(5)[0])

    def test_runs_nothing_that_a_file_asks_for(self, tmp_path):
        class Malice:
            def __reduce__(self):
                return (exec, (f"open({str(tmp_path / 'harm')!r}, 'w')",))

        write_cifar(tmp_path, "", lambda *_: pickle.dumps(Malice()))
        with pytest.raises(InvalidArgument, match=r"asks for builtins\.exec"):
            read_cifar10(tmp_path)
        assert not (tmp_path / "harm").exists()

    def test_has_labels_from_0_to_9(self, tmp_path):
        write_cifar(tmp_path, ".bin", lambda images, labels: binary_batch(images, labels + 7))
        with pytest.raises(InvalidArgument, match="labels from 0 to 9"):
            read_cifar10(tmp_path)


def test_missing_cifar_10_is_told_with_its_home(tmp_path):
    with pytest.raises(MissingData, match=r"data_batch_1\.bin.*cs\.toronto\.edu"):
        read_cifar10(tmp_path)


class TestFoldersOfImages:
    @pytest.fixture
    def write(self):
        image_module = pytest.importorskip("PIL.Image")

        def write(path, colour, size=(8, 8)):
            path.parent.mkdir(parents=True, exist_ok=True)
            image_module.new("RGB", size, colour).save(path)

        return write

    def test_name_the_classes(self, tmp_path, write):
        for number in range(10):
            write(tmp_path / "cat" / f"{number}.png", (255, 0, 0))
            write(tmp_path / "dog" / f"{number}.jpg", (0, 0, 255))
        images = read_images(tmp_path, image_size=4, validation_ratio=0.2)
        assert (images.train_images.shape, images.val_images.shape) == ((16, 3, 4, 4), (4, 3, 4, 4))
        assert images.num_classes == 2
        is_blue = images.train_images[:, 2, 0, 0] > 200
        assert torch.equal(is_blue.long(), images.train_labels)

    def test_may_bring_their_own_validation(self, tmp_path, write):
        for part, count in (("train", 3), ("val", 2)):
            for number in range(count):
                write(tmp_path / part / "cat" / f"{number}.png", (255, 0, 0))
        images = read_images(tmp_path, image_size=4)
        assert (len(images.train_images), len(images.val_images)) == (3, 2)

    def test_are_cut_to_the_middle_square(self, tmp_path, write):
        image_module = pytest.importorskip("PIL.Image")
        (tmp_path / "a").mkdir()
        wide = image_module.new("RGB", (12, 4), (255, 0, 0))
        wide.paste((0, 255, 0), (4, 0, 8, 4))
        wide.save(tmp_path / "a" / "wide.png")
        (image,) = read_images(tmp_path, image_size=4, validation_ratio=0).train_images
        assert torch.equal(image, torch.tensor([0, 255, 0], dtype=torch.uint8)[:, None, None].expand(3, 4, 4))

    def test_say_what_is_missing(self, tmp_path, write):
        with pytest.raises(MissingData, match="no subfolders"):
            read_images(tmp_path)
        (tmp_path / "cat").mkdir()
        with pytest.raises(MissingData, match="cat holds no images"):
            read_images(tmp_path)
        (tmp_path / "cat" / "a.png").write_text("no image")
        with pytest.raises(InvalidArgument, match=r"a\.png cannot be read"):
            read_images(tmp_path)
        with pytest.raises(MissingData, match="nowhere is not there"):
            read_images(tmp_path / "nowhere")


class TestArraysOfImages:
    @pytest.mark.parametrize("shape", [(10, 4, 4), (10, 4, 4, 1), (10, 1, 4, 4)])
    def test_have_channels_first_or_last_or_none(self, tmp_path, shape):
        pixels = np.arange(160, dtype=np.uint8).reshape(shape)
        np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(10) % 3)
        images = read_images(tmp_path / "a.npz", validation_ratio=0, seed=0)
        order = torch.argsort(images.train_images[:, 0, 0, 0])
        assert images.train_images[order].flatten().tolist() == list(range(160))
        assert images.sizes == {"image_size": 4, "channels": 1, "num_classes": 3}

    def test_may_bring_their_own_validation(self, tmp_path):
        train, test = np.zeros((5, 4, 4), np.uint8), np.ones((2, 4, 4), np.uint8)
        np.savez(tmp_path / "a.npz", x_train=train, y_train=np.arange(5), x_test=test, y_test=np.arange(2))
        images = read_images(tmp_path / "a.npz")
        assert (len(images.train_images), images.val_images.float().mean().item()) == (5, 1.0)

    @pytest.mark.parametrize(
        ("arrays", "told"),
        [
            ({"pixels": np.zeros(3)}, "neither images and labels nor x_train"),
            ({"images": np.full((2, 4, 4), 7.0), "labels": np.zeros(2)}, "floats from -1 to 1"),
            ({"images": np.array([object()]), "labels": np.zeros(1)}, "cannot be read as arrays"),
            (
                {"images": PIXELS, "labels": np.zeros(3, int)},
                r"as many labels as images.*\(4, 4, 4\) and labels \(3,\)",
            ),
            ({"images": PIXELS[:0], "labels": np.zeros(0, int)}, "at least one"),
            ({"images": PIXELS, "labels": np.array(["cat"] * 4)}, "expected arrays of numbers"),
            ({"images": PIXELS, "labels": np.array([0, 1, -1, 0])}, "has the label -1; expected labels from 0 up"),
            (
                {"images": PIXELS, "labels": np.zeros(4), "val_images": PIXELS, "val_labels": np.arange(4)},
                "has the label 3 to validate with; expected labels up to 0",
            ),
        ],
        ids=["names", "range", "objects", "fewer labels", "none", "words", "negative label", "unknown label"],
    )
    def test_say_what_is_wrong(self, tmp_path, arrays, told):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(InvalidArgument, match=rf"a\.npz.*{told}"):
            read_images(tmp_path / "a.npz")

    @pytest.mark.parametrize("num_bytes", [0, 100, 400])
    def test_say_when_they_are_cut_off(self, tmp_path, num_bytes):
        file = tmp_path / "a.npz"
        np.savez(file, images=PIXELS, labels=np.zeros(4))
        file.write_bytes(file.read_bytes()[:num_bytes])
        with pytest.raises(InvalidArgument, match=r"a\.npz cannot be read as arrays"):
            read_images(file)
