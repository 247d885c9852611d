import copy
import pickle

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader

from tests import zoo
from tests.frames import scalars_in
from tests.tsemon.integrations.recording import count_steps, ids, recorded
from tsemon.errors import NoBlocksFound
from tsemon.integrations.lightning import TsemonCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, checkpoints and small data sets

# 5 batches of 2, accumulated by 2: the third and last step of an epoch has one batch only.
SAMPLES = ids(10)


class Training:
    def __init__(self, **kwargs):
        super().__init__()
        self.gpt = zoo.gpt2(**kwargs)[0].train()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.gpt(batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.gpt(batch, labels=batch)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        self.steps = count_steps(optimizer)
        return optimizer


class GPT(Training, pl.LightningModule):
    pass


class OldGPT(Training, pytorch_lightning.LightningModule):
    pass


class ManualGPT(GPT):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class RaisingGPT(GPT):
    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 2:
            raise RuntimeError("out of luck")


@pytest.fixture
def fit(tmp_path):
    """Fit a small GPT-2 from the same seed; the module, with what it saw."""

    def fit(callback=None, *, also=(), module=GPT, lightning=pl, validate=False, resume=None, **arguments):
        torch.manual_seed(0)
        module = module()
        defaults = {
            "accelerator": "cpu",
            "max_epochs": 2,
            "accumulate_grad_batches": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path / "trainer",
        }
        trainer = lightning.Trainer(callbacks=[*([callback] if callback else []), *also], **defaults | arguments)
        loader = DataLoader(SAMPLES, batch_size=2)
        trainer.fit(module, loader, DataLoader(SAMPLES[:4], batch_size=2) if validate else None, ckpt_path=resume)
        return module

    return fit


def callback(folder, **options):
    return TsemonCallback(**{"run": "r", "every": 1, "spool_dir": folder} | options)


class TestLightningsCallback:
    def test_is_attached_by_one_line_and_finishes_the_run(self, fit, tmp_path):
        watching = callback(tmp_path / "run")
        fit(watching)
        run = recorded(tmp_path / "run")
        assert run.state == "finished"
        assert watching.monitor.status.not_measured.keys().isdisjoint(
            {"token_similarity", "attention_entropy", "update_norm"}
        )
        assert watching.monitor.status.num_faults == 0
        assert all({"token_similarity", "grad_norm", "update_norm"} <= {*frame["layers"]} for frame in run.frames)

    def test_steps_once_for_each_step_of_the_optimizer(self, fit, tmp_path):
        module = fit(callback(tmp_path / "run"))
        assert len(module.steps) == 6
        assert recorded(tmp_path / "run").steps == [0, 1, 2, 3, 4, 5]

    def test_gives_the_loss_of_the_last_batch_of_a_step(self, fit, tmp_path):
        module = fit(callback(tmp_path / "run"))
        in_float32 = pytest.approx([module.losses[i] for i in (1, 3, 4, 6, 8, 9)], rel=1e-6)
        assert recorded(tmp_path / "run").losses == in_float32

    def test_gives_the_losses_of_steps_between_two_samples_undivided_too(self, fit, tmp_path):
        module = fit(callback(tmp_path / "run", every=5))
        mean = recorded(tmp_path / "run").frames[1]["scalars"]["loss_mean"]
        assert mean == pytest.approx(sum(module.losses[i] for i in (3, 4, 6, 8, 9)) / 5, rel=1e-6)

    def test_counts_losses_that_are_not_finite_between_two_samples(self, fit, tmp_path):
        class Breaking(pl.Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                if trainer.global_step == 2:
                    with torch.no_grad():
                        pl_module.gpt.transformer.h[0].mlp.c_fc.weight[0, 0] = torch.nan

        fit(callback(tmp_path / "run", every=5), also=[Breaking()])
        counts = [frame["scalars"]["loss_nonfinite"] for frame in recorded(tmp_path / "run").frames]
        assert counts == [0, 4]  # those of steps 2 to 5

    def test_leaves_the_parameters_bit_equal(self, fit, tmp_path):
        plain, watched = fit(), fit(callback(tmp_path / "run"))
        assert watched.losses == plain.losses
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))

    def test_stops_the_trainer_where_the_monitor_asks_for_it(self, fit, tmp_path):
        class Asking(pl.Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                if trainer.global_step == 2:
                    watching.monitor.stop()

        watching = callback(tmp_path / "run")
        module = fit(watching, also=[Asking()])
        assert len(module.steps) == 3

    def test_logs_what_validations_log(self, fit, tmp_path):
        class Validated(GPT):
            def validation_step(self, batch, batch_idx):
                self.log("val_loss", torch.tensor(1.0 + self.trainer.global_step))

            def on_train_batch_end(self, *args):
                self.log("train_extra", 3.0)

        fit(callback(tmp_path), module=Validated, validate=True)
        assert scalars_in(tmp_path, "val_loss") == {3: 4.0, 6: 7.0}
        assert scalars_in(tmp_path, "train_extra") == {}

    def test_does_not_measure_sanity_checks_and_validations(self, fit, tmp_path):
        def measured(name, **arguments):
            without_dropout = {
                "resid_pdrop": 0,
                "embd_pdrop": 0,
                "attn_pdrop": 0,
            }  # a loader draws from the random state
            fit(callback(tmp_path / name), module=lambda: GPT(**without_dropout), **arguments)
            return recorded(tmp_path / name).measured

        plain = measured("plain")
        assert measured("validated", validate=True, val_check_interval=1, num_sanity_val_steps=2) == plain

    def test_leaves_resume_and_every_other_option_to_the_user(self, fit, tmp_path):
        fit(callback(tmp_path / "run", every=4, resume=100, measures=["token_similarity"]))
        run = recorded(tmp_path / "run")
        assert run.steps == [100, 104, 105]
        assert {*run.frames[0]["layers"]} == {"token_similarity"}

    def test_samples_the_last_step(self, fit, tmp_path):
        fit(callback(tmp_path / "run", every=400))
        last = recorded(tmp_path / "run").frames[-1]
        assert last["step"] == 5
        assert {"token_similarity", "effective_rank"} <= {*last["layers"]}

    def test_serves_the_trainer_of_pytorch_lightning(self, fit, tmp_path):
        module = fit(callback(tmp_path / "run"), module=OldGPT, lightning=pytorch_lightning)
        run = recorded(tmp_path / "run")
        assert (run.state, len(run.steps)) == ("finished", len(module.steps))


class ClippedGPT(GPT):
    def on_before_optimizer_step(self, optimizer):
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.norms = [*getattr(self, "norms", []), norm.item()]


class TestAClippedGradient:
    def test_has_a_norm_that_is_known_at_each_step(self, fit, tmp_path, norms):
        module = fit(callback(tmp_path, every=None), module=ClippedGPT, gradient_clip_val=0.1)
        assert len(module.norms) == 6
        assert norms == pytest.approx(module.norms, rel=1e-6)


class TestManualOptimization:
    def test_is_counted_and_its_loss_is_taken_as_it_is(self, fit, tmp_path):
        module = fit(callback(tmp_path / "run"), module=ManualGPT, accumulate_grad_batches=1)
        run = recorded(tmp_path / "run")
        assert len(run.steps) == len(module.steps) == 10
        assert run.losses == pytest.approx(module.losses, rel=1e-6)  # float32


class TestATrainingThatGoesOnFromACheckpoint:
    @pytest.mark.parametrize("is_watched_before", [True, False])
    def test_goes_on_counting_there(self, is_watched_before, fit, tmp_path):
        saving = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, filename="{step}")
        fit(callback(tmp_path / "first") if is_watched_before else None, also=[saving], enable_checkpointing=True)
        fit(callback(tmp_path / "second"), resume=tmp_path / "step=4.ckpt")
        assert recorded(tmp_path / "second").steps == [4, 5]

    def test_may_be_saved_after_its_end(self, fit, tmp_path):
        watching = callback(tmp_path / "first")
        fit(watching)
        again = callback(tmp_path / "second", resume=6)
        again.load_state_dict(watching.state_dict())
        fit(again)
        first = recorded(tmp_path / "second").frames[0]["scalars"]
        assert first["loss_recent"] != first["loss"]

    def test_may_have_two_callbacks(self, fit, tmp_path):
        saving = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, filename="{step}")
        for name, resume in (("first", None), ("second", tmp_path / "step=4.ckpt")):
            other = callback(tmp_path / f"{name}-other", run="other")
            fit(callback(tmp_path / name), also=[other, saving], enable_checkpointing=True, resume=resume)
        for name in ("second", "second-other"):
            first = recorded(tmp_path / name).frames[0]["scalars"]
            assert first["loss_recent"] != first["loss"]

    def test_is_remembered_from_one_fit_to_the_next_of_its_trainer(self, fit, tmp_path):
        watching = callback(tmp_path / "first")
        trainer = (module := fit(watching)).trainer
        trainer.fit_loop.max_epochs, watching.options["spool_dir"] = 4, tmp_path / "second"
        trainer.fit(module, trainer.train_dataloader)
        run = recorded(tmp_path / "second")
        assert (run.resume_step, run.steps) == (6, [6, 7, 8, 9, 10, 11])
        first = run.frames[0]["scalars"]
        assert first["loss_recent"] != first["loss"]

    def test_is_forgotten_in_a_fit_from_the_start(self, fit, tmp_path):
        saving = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, filename="{step}")
        fit(callback(tmp_path / "first"), also=[saving], enable_checkpointing=True)
        watching = callback(tmp_path / "second")
        fit(watching, resume=tmp_path / "step=4.ckpt")
        watching.options["spool_dir"] = tmp_path / "third"
        fit(watching)
        run = recorded(tmp_path / "third")
        first = run.frames[0]["scalars"]
        assert (run.resume_step, first["loss_recent"]) == (None, first["loss"])

    def test_goes_on_if_what_was_saved_is_broken(self, fit, tmp_path, caplog):
        watching = callback(tmp_path / "run", resume=4)
        watching.load_state_dict({"monitor": {"project": "default", "run": "r", "step": 4, "losses": {"first": 3}}})
        fit(watching)
        assert recorded(tmp_path / "run").steps[0] == 4
        assert "losses before the checkpoint are unknown" in caplog.text

    @pytest.mark.parametrize("run", ["r", "another"])
    def test_compares_its_losses_with_those_before_it(self, run, fit, tmp_path):
        saving = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, filename="{step}")
        fit(callback(tmp_path / "first"), also=[saving], enable_checkpointing=True)
        fit(callback(tmp_path / "second", run=run), resume=tmp_path / "step=4.ckpt")
        first = recorded(tmp_path / "second").frames[0]["scalars"]
        assert (first["loss_recent"] != first["loss"]) == (run == "r")


class TestATrainingThatRaises:
    def test_failed(self, fit, tmp_path):
        with pytest.raises(RuntimeError, match="out of luck"):
            fit(callback(tmp_path / "run"), module=RaisingGPT)
        run = recorded(tmp_path / "run")
        assert (run.state, run.steps) == ("failed", [0, 1])


class TestWhatAttachRefuses:
    def test_raises_from_fit_before_its_first_step(self, fit, tmp_path):
        class Linear(GPT):
            def __init__(self):
                super().__init__()
                self.gpt = torch.nn.Linear(2, 2)

        watching = callback(tmp_path)
        with pytest.raises(NoBlocksFound, match=r"in Linear.*attach\(\.\.\., blocks="):
            fit(watching, module=Linear)
        assert watching.monitor is None


class TestACopyOfTheCallback:
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
    def test_has_the_options_and_no_monitor(self, copied, fit, tmp_path):
        watching = callback(tmp_path / "run")
        fit(watching)
        copy = copied(watching)
        assert (copy.options, copy.monitor) == (watching.options, None)
