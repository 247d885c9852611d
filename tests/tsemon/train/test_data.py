import itertools
import sys

import pytest
import torch

from tsemon.errors import InvalidArgument, MissingPackage
from tsemon.train.data import digits, image_batches, standard_library_text, text_batches

COUNTED = torch.arange(10)


def take(count, batches):
    return list(itertools.islice(batches, count))


class TestTheDigits:
    def test_are_split_once_and_for_all(self):
        pytest.importorskip("sklearn")
        data = digits()
        assert data.train_images.shape == (1437, 1, 16, 16)
        assert data.val_images.shape == (360, 1, 16, 16)
        assert torch.equal(data.val_labels, digits().val_labels)
        assert not torch.equal(data.val_labels, digits(seed=1).val_labels)
        assert len(torch.cat([data.train_images, data.val_images]).flatten(1).unique(dim=0)) == 1797
        assert set(data.train_labels.tolist()) == set(data.val_labels.tolist()) == set(range(10))

    def test_are_scaled_to_one(self):
        pytest.importorskip("sklearn")
        images = digits().train_images
        assert images.dtype == torch.float32
        assert (images.min(), images.max()) == (-1.0, 1.0)

    def test_say_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        with pytest.raises(MissingPackage, match=r"pip install 'tsemon\[demo\]'"):
            digits()


class TestImageBatches:
    def test_show_every_image_once_a_pass_in_a_new_order(self):
        batches = take(4, image_batches(COUNTED, COUNTED, 5, seed=0))
        first, second = (torch.cat([images for images, _ in batches[i : i + 2]]) for i in (0, 2))
        assert sorted(first.tolist()) == sorted(second.tolist()) == COUNTED.tolist()
        assert first.tolist() != second.tolist()

    def test_leave_out_what_does_not_fill_a_batch(self):
        assert [len(images) for images, _ in take(4, image_batches(COUNTED, COUNTED, 4, seed=0))] == [4, 4, 4, 4]

    def test_keep_images_and_labels_together(self):
        assert all(torch.equal(images, labels) for images, labels in take(4, image_batches(COUNTED, COUNTED, 5, 0)))

    def test_refuse_a_batch_larger_than_the_data(self):
        with pytest.raises(InvalidArgument, match="10 images there are, got 11"):
            next(image_batches(COUNTED, COUNTED, 11, seed=0))


class TestTheStandardLibraryText:
    def test_is_python_source_and_the_same_each_time(self):
        text = standard_library_text(100_000)
        assert text.shape == (100_000,)
        assert text.dtype == torch.uint8
        assert b"\ndef " in bytes(text.tolist())
        assert torch.equal(text, standard_library_text(100_000))

    def test_starts_with_the_first_file_whatever_its_size(self):
        assert torch.equal(standard_library_text(1000), standard_library_text(5000)[:1000])

    def test_says_when_there_are_no_sources(self, monkeypatch, tmp_path):
        monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
        with pytest.raises(MissingPackage, match="no Python sources"):
            standard_library_text()

    def test_leaves_out_installed_packages(self, monkeypatch, tmp_path):
        for name in ("b.py", "a/c.py", "site-packages/a.py"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"# {name}\n")
        monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
        assert bytes(standard_library_text().tolist()) == b"# a/c.py\n# b.py\n"


class TestTextBatches:
    def test_ask_for_the_byte_that_follows(self):
        text = torch.arange(50, dtype=torch.uint8)
        for inputs, targets in take(5, text_batches(text, 8, 4, seed=0)):
            assert inputs.shape == targets.shape == (4, 8)
            assert torch.equal(inputs + 1, targets)

    def test_reach_the_last_byte(self):
        _, targets = next(text_batches(torch.arange(4, dtype=torch.uint8), 3, 1, seed=0))
        assert targets.tolist() == [[1, 2, 3]]

    def test_refuse_a_context_longer_than_the_text(self):
        with pytest.raises(InvalidArgument, match="from 1 to 9 for this text"):
            next(text_batches(COUNTED, 10, 1, seed=0))


@pytest.mark.parametrize(
    "batches",
    [lambda seed: image_batches(COUNTED, COUNTED, 5, seed), lambda seed: text_batches(COUNTED, 4, 3, seed)],
    ids=["images", "text"],
)
class TestTheOrderOfBatches:
    def test_comes_from_the_seed_alone(self, batches):
        with torch.random.fork_rng():
            first = take(6, batches(3))
            torch.rand(7)
            second = take(6, batches(3))
        other = take(6, batches(4))
        assert all(torch.equal(a, b) for a, b in zip(map(torch.cat, first), map(torch.cat, second), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(map(torch.cat, first), map(torch.cat, other), strict=True))

    def test_draws_nothing_from_the_global_generator(self, batches):
        before = torch.random.get_rng_state()
        take(6, batches(3))
        assert torch.equal(torch.random.get_rng_state(), before)
