import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from tests import zoo
from tests.tsemon.integrations.recording import count_steps, ids, recorded
from tsemon.errors import NoBlocksFound
from tsemon.integrations.accelerate import attach

# 5 batches of 2, accumulated by 2: the third and last step of an epoch has one batch only.
SAMPLES = ids(10)


def train(folder=None, *, evaluate=False, batch_size=2, break_at=None, max_norm=None, norms=(), **options):
    """Two epochs of a small GPT-2 from the same seed: the model, the loss of each batch, the steps, the monitor."""
    torch.manual_seed(0)
    model = zoo.gpt2()[0].train()
    optimizer = torch.optim.AdamW(model.parameters())
    steps, losses, monitor = count_steps(optimizer), [], None
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(SAMPLES, batch_size=batch_size))
    if folder is not None:
        monitor = attach(accelerator, model, optimizer, **{"run": "r", "every": 1, "spool_dir": folder} | options)
    for _ in range(2):
        for batch in loader:
            if len(steps) == break_at:
                with torch.no_grad():
                    model.transformer.h[0].mlp.c_fc.weight[0, 0] = torch.nan
            with accelerator.accumulate(model):
                loss = model(batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and max_norm is not None:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if monitor is not None:
                monitor.step(loss=loss)
            if evaluate:
                with torch.no_grad():
                    model.eval()(SAMPLES[:4])
                    model.train()
    if monitor is not None:
        monitor.close()
    return model, losses, steps, monitor


class TestAttach:
    def test_measures_what_accelerate_prepared(self, tmp_path):
        *_, monitor = train(tmp_path)
        run = recorded(tmp_path)
        assert run.state == "finished"
        assert monitor.monitor.status.not_measured.keys().isdisjoint(
            {"token_similarity", "attention_entropy", "update_norm"}
        )
        assert monitor.monitor.status.num_faults == 0
        assert all({"token_similarity", "grad_norm", "update_norm"} <= {*frame["layers"]} for frame in run.frames)

    def test_counts_the_steps_of_the_optimizer_and_gives_their_loss(self, tmp_path):
        _, losses, steps, _ = train(tmp_path)
        run = recorded(tmp_path)
        assert run.steps == [0, 1, 2, 3, 4, 5]
        assert len(steps) == 6
        assert run.losses == pytest.approx([losses[i] for i in (1, 3, 4, 6, 8, 9)], rel=1e-6)  # float32

    def test_counts_losses_that_are_not_finite_between_two_samples(self, tmp_path):
        train(tmp_path, every=5, break_at=2)
        assert [frame["scalars"]["loss_nonfinite"] for frame in recorded(tmp_path).frames] == [0, 4]  # steps 2 to 5

    def test_knows_the_norm_of_each_gradient_that_is_clipped(self, tmp_path, norms):
        clipped = []
        train(tmp_path, every=None, max_norm=0.1, norms=clipped)
        assert len(clipped) == 6
        assert norms == pytest.approx(clipped, rel=1e-6)

    def test_leaves_the_parameters_bit_equal(self, tmp_path):
        (plain, losses, *_), (watched, losses_watched, *_) = train(), train(tmp_path)
        assert losses_watched == losses
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))

    def test_passes_on_that_the_loop_should_stop(self, tmp_path):
        *_, monitor = train(tmp_path)
        assert not monitor.should_stop
        monitor.monitor.stop()
        assert monitor.should_stop

    def test_does_not_measure_evaluations(self, tmp_path):
        train(tmp_path / "plain")
        train(tmp_path / "evaluated", evaluate=True)
        assert recorded(tmp_path / "evaluated").measured == recorded(tmp_path / "plain").measured

    def test_goes_on_counting_at_resume(self, tmp_path):
        train(tmp_path, resume=40, every=4)
        assert recorded(tmp_path).steps == [40, 44, 45]

    def test_goes_on_counting_where_accelerate_saved_its_state(self, tmp_path):
        def prepared(folder):
            accelerator, model = Accelerator(cpu=True), zoo.gpt2()[0].train()
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            monitor = attach(accelerator, model, optimizer, run="r", every=1, spool_dir=tmp_path / folder)
            accelerator.register_for_checkpointing(monitor)
            return accelerator, monitor

        accelerator, monitor = prepared("first")
        for _ in range(3):
            monitor.step()
        accelerator.save_state(tmp_path / "state")
        monitor.close()
        accelerator, monitor = prepared("second")
        accelerator.load_state(tmp_path / "state")
        monitor.step()
        monitor.close()
        second = recorded(tmp_path / "second")
        assert (second.steps, second.resume_step) == ([3], 3)

    def test_raises_where_no_blocks_are_found(self):
        with pytest.raises(NoBlocksFound, match=r"in Linear.*attach\(\.\.\., blocks="):
            attach(Accelerator(cpu=True), torch.nn.Linear(2, 2), run="r")

    def test_counts_every_step_of_a_loop_that_does_not_accumulate(self, tmp_path):
        model, forward = zoo.gpt2()
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        with attach(accelerator, model, optimizer, run="r", every=1, spool_dir=tmp_path) as monitor:
            for _ in range(3):
                accelerator.backward(forward().square().mean())
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(accuracy=0.5)
        run = recorded(tmp_path)
        assert (run.state, run.steps) == ("finished", [0, 1, 2])
        assert run.frames[0]["scalars"]["accuracy"] == 0.5


class TestATrainingThatRaises:
    def test_failed(self, tmp_path):
        model, _ = zoo.gpt2()
        with pytest.raises(KeyboardInterrupt), attach(Accelerator(cpu=True), model, run="r", spool_dir=tmp_path):
            raise KeyboardInterrupt
        assert recorded(tmp_path).state == "failed"
