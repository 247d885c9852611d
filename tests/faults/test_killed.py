"""Processes that end without a word."""

import random

import pytest

from tests.faults.counting import assert_all_arrived, stored_frames
from tsemon.transport import find_spools, sync
from tsemon_client import Client

each_number_of_kills = pytest.mark.parametrize("num_kills", [5, pytest.param(20, marks=pytest.mark.thorough)])


class TestAServiceThatIsKilledUnderLoad:
    @each_number_of_kills
    def test_has_every_frame_that_it_confirmed_once(self, serve, train, num_kills):
        """Ingestion and the move of settled frames into chunks are both cut off at any point."""
        rng = random.Random(0)
        service = serve(settles=True)
        trainers = [train(service.url, f"rank{number}", frames_per_s=150) for number in range(3)]
        with Client(service.url) as client:
            for _ in range(num_kills):
                for trainer in trainers:
                    trainer.await_sent(rng.randrange(2, 20))
                service.await_settling()
                num_confirmed = sum(trainer.told.num_sent for trainer in trainers)
                service.kill()
                trainers[0].await_made(5)
                service.start()
                assert client.find_run("gpt").num_frames >= num_confirmed
        assert_all_arrived(service, {trainer.writer: trainer.finish() for trainer in trainers})


class TestATrainerThatIsKilled:
    @each_number_of_kills
    def test_leaves_no_gap_and_no_double(self, service, train, tmp_path, num_kills):
        """One run that is killed and resumed; each attempt delivers what the one before left, `sync` what the last did."""
        rng = random.Random(0)
        root, num_made = tmp_path / "spool", {}
        for attempt in range(1, num_kills + 1):
            trainer = train(service.url, key=f"key-{attempt}", resume_step=0, frames_per_s=2000)
            if attempt % 5:
                trainer.await_made(rng.randrange(1, 60))
            else:  # whatever it does while it starts
                trainer.await_spool()
            trainer.kill()
            num_made[attempt] = trainer.told.num_made
        sync(root, service.url)
        assert find_spools(root) == []

        found = {attempt: stored_frames(service.database, "rank0", attempt) for attempt in num_made}
        for attempt, seqs in found.items():
            assert seqs == list(range(len(seqs)))
            assert len(seqs) - num_made[attempt] in (0, 1), "the one on its way to the disk may have made it"
        with Client(service.url) as client:
            run = client.find_run("gpt")
        assert len(run.attempts) == num_kills
        assert run.num_frames == sum(map(len, found.values())) > num_kills
        assert run.state == "failed"
