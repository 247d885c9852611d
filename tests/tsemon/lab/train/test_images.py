import itertools
import sys

import pytest
import torch

from tsemon.errors import InvalidArgument, MissingPackage, ShapeError
from tsemon.lab.train.augmentation import augmentation, crop_and_flip
from tsemon.lab.train.images import Images, digits, image_batches, images_in_order, split_images

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
        assert data.sizes == {"image_size": 16, "channels": 1, "num_classes": 10}

    def test_are_scaled_to_one(self):
        pytest.importorskip("sklearn")
        images = digits().train_images
        assert images.dtype == torch.float32
        assert (images.min(), images.max()) == (-1.0, 1.0)

    def test_say_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        with pytest.raises(MissingPackage, match=r"pip install 'tsemon\[train\]'"):
            digits()


class TestImages:
    def test_are_square_and_have_a_label_each(self):
        images, labels = torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.int64)
        with pytest.raises(ShapeError, match=r"got \(3, 1, 4, 5\) and \(3,\)"):
            Images(
                train_images=torch.zeros(3, 1, 4, 5),
                train_labels=labels,
                val_images=images,
                val_labels=labels,
                num_classes=1,
            )

    def test_leave_some_to_train_on(self):
        with pytest.raises(InvalidArgument, match="from 0 to 9 images"):
            split_images(torch.zeros(10, 1, 2, 2), COUNTED, num_val=10, num_classes=10, seed=0)


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

    def test_scale_bytes_to_one(self):
        pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
        images, _ = next(images_in_order(pixels, COUNTED[:2], 2))
        assert images.flatten().tolist() == [-1.0, 1.0]


class TestImagesInOrder:
    def test_shows_every_image_once(self):
        batches = list(images_in_order(COUNTED, COUNTED, 4))
        assert [labels.tolist() for _, labels in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class TestCropAndFlip:
    def test_moves_and_mirrors_and_does_nothing_else(self):
        """Each result is one of the 3 x 3 places, mirrored or not, of the image over zeros: eight pixels, one of padding."""
        image = torch.arange(1, 65, dtype=torch.float32).view(1, 1, 8, 8)
        padded = torch.nn.functional.pad(image, (1, 1, 1, 1))[0, 0]
        places = [padded[y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
        allowed = {tuple(place.flatten().tolist()) for place in [*places, *(place.flip(1) for place in places)]}
        changed = crop_and_flip(image.expand(500, 1, 8, 8), torch.Generator().manual_seed(0))
        # 500 draws miss one of 18 with a probability of 18 (17/18)^500 = 7e-12.
        assert {tuple(one.flatten().tolist()) for one in changed} == allowed

    def test_keeps_colours_together(self):
        images = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(0)).expand(4, 3, 16, 16)
        changed = crop_and_flip(images, torch.Generator().manual_seed(1))
        assert torch.equal(changed[:, 0], changed[:, 1])
        assert torch.equal(changed[:, 0], changed[:, 2])

    def test_is_chosen_by_its_name(self):
        assert augmentation("crop-flip") is crop_and_flip
        assert augmentation("none") is None
        with pytest.raises(InvalidArgument, match="none, crop-flip, got 'mixup'"):
            augmentation("mixup")
