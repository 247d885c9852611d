import itertools

import pytest
import torch

from tsemon.lab.train.augmentation import crop_and_flip
from tsemon.lab.train.batches import Shard
from tsemon.lab.train.images import image_batches
from tsemon.lab.train.text import mixed_batches, text_batches, text_streams

COUNTED = torch.arange(10)
IMAGES = torch.arange(10 * 64, dtype=torch.float32).view(10, 1, 8, 8)


def take(count, batches):
    return list(itertools.islice(batches, count))


def are_equal(some, others):
    return all(torch.equal(*pair) for a, b in zip(some, others, strict=True) for pair in zip(a, b, strict=True))


KINDS = pytest.mark.parametrize(
    "batches",
    [
        lambda seed: image_batches(COUNTED, COUNTED, 5, seed),
        lambda seed: image_batches(IMAGES, COUNTED, 4, seed, crop_and_flip),
        lambda seed: text_batches(COUNTED, 4, 3, seed),
        lambda seed: text_streams(COUNTED, 2, 2),
        lambda seed: Shard(text_batches(COUNTED, 4, 4, seed), 1, 2),
    ],
    ids=["images", "augmented images", "text", "streams", "shard"],
)


@KINDS
class TestBatches:
    @pytest.mark.parametrize("num_before", [0, 1, 2, 3, 5])
    def test_go_on_from_a_position(self, batches, num_before):
        whole = batches(3)
        take(num_before, whole)
        state = whole.state_dict()
        expected = take(5, whole)
        resumed = batches(3)
        resumed.load_state_dict(state)
        assert are_equal(take(5, resumed), expected)

    def test_draw_nothing_from_the_global_generator(self, batches):
        before = torch.random.get_rng_state()
        take(6, batches(3))
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_come_from_the_seed_alone(self, batches):
        with torch.random.fork_rng():
            first = take(6, batches(3))
            torch.rand(7)
            assert are_equal(take(6, batches(3)), first)


@pytest.mark.parametrize(
    "batches",
    [lambda seed: image_batches(COUNTED, COUNTED, 5, seed), lambda seed: text_batches(COUNTED, 4, 3, seed)],
    ids=["images", "text"],
)
class TestTheOrderOfBatches:
    def test_is_another_with_another_seed(self, batches):
        assert not are_equal(take(6, batches(3)), take(6, batches(4)))


class TestTheShardsOfABatch:
    def test_are_the_batch_together(self):
        text = torch.arange(100)
        whole = next(text_batches(text, 4, 6, seed=0))
        shards = [next(Shard(text_batches(text, 4, 6, seed=0), rank, 3)) for rank in range(3)]
        assert [len(inputs) for inputs, _ in shards] == [2, 2, 2]
        for part in (0, 1):
            assert sorted(torch.cat([shard[part] for shard in shards]).tolist()) == sorted(whole[part].tolist())


class TestAMixture:
    TEXTS = (torch.full((50,), 1, dtype=torch.uint8), torch.full((500,), 2, dtype=torch.uint8))

    def test_draws_from_each_text_in_its_proportion_whatever_its_size(self):
        batches = mixed_batches(self.TEXTS, [0.8, 0.2], context=4, batch_size=1000, seed=0)
        inputs, targets = next(batches)
        assert inputs.shape == targets.shape == (1000, 4)
        assert torch.equal(inputs, targets)
        assert (inputs[:, 0] == 1).double().mean() == pytest.approx(0.8, abs=0.04)  # three standard errors

    def test_has_windows_and_the_same_one_token_later(self):
        inputs, targets = next(mixed_batches([torch.arange(100)], [1.0], context=5, batch_size=50, seed=0))
        assert torch.equal(targets, inputs + 1)
        assert (inputs.min().item(), targets.max().item()) == (0, 99)

    def test_goes_on_where_it_was(self):
        batches = mixed_batches(self.TEXTS, [0.5, 0.5], context=4, batch_size=20, seed=0)
        next(batches)
        state, expected = batches.state_dict(), next(batches)
        resumed = mixed_batches(self.TEXTS, [0.5, 0.5], context=4, batch_size=20, seed=1)
        resumed.load_state_dict(state)
        assert all(map(torch.equal, next(resumed), expected))
