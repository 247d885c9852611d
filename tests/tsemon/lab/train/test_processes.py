"""A group of one process, in this one: what it does differs from several in nothing but the sums."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.tsemon.lab.train.test_training import TINY, changed
from tsemon.errors import InvalidArgument
from tsemon.lab.train.loop import train_steps
from tsemon.lab.train.processes import Processes, processes
from tsemon.lab.train.training import Training


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class TestProcesses:
    def test_are_this_one_alone_without_torchrun(self, monkeypatch):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        with processes("cpu") as alone:
            assert (alone.rank, alone.world, alone.group) == (0, 1, None)
            assert alone.gather("a") == ["a"]
            assert alone.sum(torch.ones(2)).tolist() == [1.0, 1.0]

    def test_join_what_torchrun_announces_and_leave_it(self, monkeypatch, tmp_path):
        announced = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
        for name, value in announced.items():
            monkeypatch.setenv(name, str(value))
        with processes("cpu") as joined:
            assert joined.group is dist.group.WORLD
            with joined.first_alone():
                assert joined.gather("a") == ["a"]
        assert not dist.is_initialized()

    @pytest.mark.parametrize("name", ["foo", "meta", "cuda:x", "cuda:99"])
    def test_are_on_a_device_that_computes(self, name, monkeypatch):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        with pytest.raises(InvalidArgument, match=f"got '{name}': .*; choose another --device"):
            processes(name).__enter__()


class TestTheLoopUnderDdp:
    @pytest.mark.parametrize("accumulation", [1, 3])
    def test_lets_gradients_meet_once_a_step(self, group, accumulation):
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        meetings = []

        def count(_, bucket):
            meetings.append(bucket.index())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, count)
        batches = [(torch.eye(3), torch.arange(3))] * 2 * accumulation
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(list(train_steps(model, optimizer, batches, accumulation=accumulation))) == 2
        assert meetings == [0, 0]


class TestATrainingOfAGroup:
    def test_goes_on_exactly(self, group):
        recipe, joined = changed(TINY, accumulation=2), Processes(group=group)
        whole = list(Training(recipe, processes=joined).losses)
        interrupted = Training(recipe, processes=joined)
        list(itertools.islice(interrupted.losses, 3))
        resumed = Training(recipe, processes=joined)
        resumed.load_state_dict(interrupted.state_dict())
        assert list(resumed.losses) == whole[3:]

    def test_equals_one_without_a_group(self, group):
        expected = list(Training(TINY).losses)
        torch.testing.assert_close(list(Training(TINY, processes=Processes(group=group)).losses), expected)
