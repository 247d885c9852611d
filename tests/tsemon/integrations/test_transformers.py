import copy
import gc
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests import processes, zoo
from tests.frames import scalars_in
from tests.tsemon.integrations.recording import count_steps, ids, recorded
from tsemon.actions import LowerLearningRate
from tsemon.errors import InvalidArgument, NoBlocksFound
from tsemon.integrations.transformers import TsemonCallback

# 5 batches of 2, accumulated by 2: the third and last step of an epoch has one batch only.
SAMPLES = [{"input_ids": tokens, "labels": tokens} for tokens in ids(10)]
# From 2 to 11 tokens count in the loss, so the mean over batches is not the mean over tokens.
UNEVEN = [
    {"input_ids": tokens, "labels": tokens.where(torch.arange(12) > number, -100)}
    for number, tokens in enumerate(ids(10))
]


@pytest.fixture
def train(tmp_path):
    """Train a small GPT-2 from the same seed; the Trainer, with what was trained in it."""

    def train(
        callback=None,
        *,
        also=(),
        model=None,
        resume=None,
        kind=Trainer,
        samples=SAMPLES,
        compute_loss_func=None,
        **arguments,
    ):
        torch.manual_seed(0)
        model = model or zoo.gpt2()[0]
        defaults = {
            "output_dir": str(tmp_path / "trainer"),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        trainer = kind(
            model=model,
            args=TrainingArguments(**defaults | arguments),
            train_dataset=samples,
            compute_loss_func=compute_loss_func,
            eval_dataset=SAMPLES[:4],
            callbacks=[*([callback] if callback else []), *also],
        )
        trainer.create_optimizer()
        trainer.steps = count_steps(trainer.optimizer)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return train


def callback(folder, **options):
    return TsemonCallback(**{"run": "r", "every": 1, "spool_dir": folder} | options)


def logged_losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Raising(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise RuntimeError("out of luck")


class Breaking(TrainerCallback):
    def __init__(self, at_step):
        self.at_step = at_step

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == self.at_step:
            with torch.no_grad():
                model.transformer.h[0].mlp.c_fc.weight[0, 0] = torch.nan


class MeanOfBatches(torch.nn.Module):
    """Takes no number of items from the Trainer, and returns a tuple."""

    def __init__(self):
        super().__init__()
        self.transformer = zoo.gpt2()[0]

    def forward(self, input_ids, labels=None):
        return self.transformer(input_ids=input_ids, labels=labels, return_dict=False)


class Wrapper(torch.nn.Module):
    """As DistributedDataParallel: it returns copies."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        outputs = self.module(**inputs)
        return type(outputs)({name: value.clone() for name, value in outputs.items() if torch.is_tensor(value)})


class TestTheTrainersCallback:
    def test_is_attached_by_one_line_and_finishes_the_run(self, train, tmp_path):
        watching = callback(tmp_path / "run")
        train(watching)
        run = recorded(tmp_path / "run")
        assert run.state == "finished"
        assert watching.monitor.status.not_measured.keys().isdisjoint(
            {"token_similarity", "attention_entropy", "update_norm"}
        )
        assert watching.monitor.status.num_faults == 0
        assert all({"token_similarity", "grad_norm", "update_norm"} <= {*frame["layers"]} for frame in run.frames)

    def test_steps_once_for_each_step_of_the_optimizer(self, train, tmp_path):
        trainer = train(callback(tmp_path / "run"))
        assert len(trainer.steps) == 6
        assert recorded(tmp_path / "run").steps == [0, 1, 2, 3, 4, 5]

    def test_leaves_the_parameters_bit_equal(self, train, tmp_path):
        plain, watched = train(), train(callback(tmp_path / "run"))
        assert logged_losses(watched) == logged_losses(plain)
        pairs = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)

    def test_logs_what_evaluations_return(self, train, tmp_path):
        options = {"eval_strategy": "steps", "eval_steps": 2}
        train(callback(tmp_path), **options)
        assert list(scalars_in(tmp_path, "eval_loss")) == [2, 4, 6]

    def test_does_not_measure_evaluations(self, train, tmp_path):
        def measured(name, **arguments):
            model = zoo.gpt2(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)[0]  # a loader draws from the random state
            train(callback(tmp_path / name), model=model, **arguments)
            return recorded(tmp_path / name).measured

        torch.manual_seed(0)
        plain = measured("plain")
        torch.manual_seed(0)
        assert measured("evaluated", eval_strategy="steps", eval_steps=1, eval_on_start=True) == plain

    def test_leaves_resume_and_every_other_option_to_the_user(self, train, tmp_path):
        train(callback(tmp_path / "run", every=4, resume=100, measures=["token_similarity"]))
        run = recorded(tmp_path / "run")
        assert run.steps == [100, 104, 105]
        assert {*run.frames[0]["layers"]} == {"token_similarity"}

    def test_samples_the_last_step(self, train, tmp_path):
        train(callback(tmp_path / "run", every=400))
        last = recorded(tmp_path / "run").frames[-1]
        assert last["step"] == 5
        assert {"token_similarity", "effective_rank"} <= {*last["layers"]}

    def test_is_let_go_when_its_trainer_is(self, train, tmp_path):
        watching = callback(tmp_path / "run")
        kept = weakref.ref(watching)
        train(watching)
        del watching
        gc.collect()
        assert kept() is None

    def test_stops_the_trainer_where_the_monitor_asks_for_it(self, train, tmp_path):
        class Asking(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 2:
                    watching.monitor.stop()

        watching = callback(tmp_path / "run")
        trainer = train(watching, also=[Asking()])
        assert len(trainer.steps) == 3
        assert recorded(tmp_path / "run").state == "finished"

    def test_knows_the_gradient_norm_of_each_step(self, train, tmp_path, norms):
        trainer = train(callback(tmp_path, every=None))
        logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        assert norms == pytest.approx(logged, rel=1e-6)

    def test_knows_the_scheduler_for_a_lower_learning_rate(self, train, tmp_path):
        class Lowering(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 2:
                    LowerLearningRate(factor=0.1).act(None, watching.monitor)

        def rates(folder, *also):
            nonlocal watching
            watching = callback(tmp_path / folder)
            train(watching, also=also, learning_rate=0.1, logging_strategy="no")
            return [frame["scalars"]["learning_rate"] for frame in recorded(tmp_path / folder).frames]

        watching = None
        plain, lowered = rates("plain"), rates("lowered", Lowering())
        assert lowered == pytest.approx([rate * (1 if step < 2 else 0.1) for step, rate in enumerate(plain)])


class TestTheLossInItsFrames:
    @pytest.mark.parametrize("num_batches", [1, 2, 4])
    @pytest.mark.parametrize("make", [zoo.gpt2, lambda: (MeanOfBatches(), None)], ids=["sums", "means"])
    def test_is_that_of_the_step_as_the_trainer_logs_it_afterwards(self, make, num_batches, train, tmp_path):
        arguments = {"gradient_accumulation_steps": num_batches}
        trainer = train(callback(tmp_path / "run"), model=make()[0], samples=UNEVEN, **arguments)
        assert recorded(tmp_path / "run").losses == pytest.approx(logged_losses(trainer), rel=1e-6)  # float32
        assert trainer.state.global_step == {1: 10, 2: 6, 4: 4}[num_batches]

    def test_does_not_depend_on_logs(self, train, tmp_path):
        train(callback(tmp_path / "logged"))
        train(callback(tmp_path / "silent"), logging_strategy="no")
        assert recorded(tmp_path / "silent").losses == recorded(tmp_path / "logged").losses

    def test_is_the_mean_over_all_steps_since_the_frame_before(self, train, tmp_path):
        trainer = train(callback(tmp_path / "run", every=3))
        mean = recorded(tmp_path / "run").frames[1]["scalars"]["loss_mean"]
        assert mean == pytest.approx(sum(logged_losses(trainer)[1:4]) / 3, rel=1e-6)

    def test_is_not_disturbed_by_evaluations(self, train, tmp_path):
        options = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
        trainer = train(callback(tmp_path / "run"), **options)
        assert recorded(tmp_path / "run").losses == pytest.approx(logged_losses(trainer), rel=1e-6)

    def test_is_that_of_a_model_inside_a_wrapper(self, train, tmp_path):
        class Wrapping(Trainer):
            def _wrap_model(self, model, *args, **kwargs):
                return Wrapper(super()._wrap_model(model, *args, **kwargs))

        trainer = train(callback(tmp_path / "run"), kind=Wrapping)
        assert recorded(tmp_path / "run").losses == pytest.approx(logged_losses(trainer), rel=1e-6)

    def test_is_scaled_as_by_the_trainer_if_several_processes_share_the_number_of_tokens(
        self, train, tmp_path, monkeypatch
    ):
        class OneOfTwo(Trainer):
            def compute_loss(self, *args, **kwargs):
                with monkeypatch.context() as patch:
                    patch.setattr(type(self.accelerator), "num_processes", 2)
                    return super().compute_loss(*args, **kwargs)

        monkeypatch.setattr(TrainingArguments, "world_size", 2)
        trainer = train(callback(tmp_path / "run"), kind=OneOfTwo, samples=UNEVEN)
        assert recorded(tmp_path / "run").losses == pytest.approx(logged_losses(trainer), rel=1e-6)

    def test_is_not_finite_from_the_step_on_at_which_a_weight_is(self, train, tmp_path):
        train(callback(tmp_path / "run"), also=[Breaking(at_step=3)], logging_steps=10)
        counts = [frame["scalars"]["loss_nonfinite"] for frame in recorded(tmp_path / "run").frames]
        assert counts == [0, 0, 0, 1, 1, 1]

    def test_counts_those_that_are_not_finite_between_two_samples(self, train, tmp_path):
        train(callback(tmp_path / "run", every=5), also=[Breaking(at_step=2)], logging_steps=10)
        counts = [frame["scalars"]["loss_nonfinite"] for frame in recorded(tmp_path / "run").frames]
        assert counts == [0, 4]  # those of steps 2 to 5

    def test_leaves_no_hook_when_the_training_is_over(self, train, tmp_path):
        class Looking(TrainerCallback):
            def on_train_end(self, args, state, control, model, **kwargs):
                seen.append(len(model._forward_hooks))

        seen = []
        trainer = train(callback(tmp_path / "run"), also=[Looking()])
        assert (seen, dict(trainer.model._forward_hooks)) == ([0], {})
        torch.save(trainer.model, tmp_path / "model.pt")
        assert b"tsemon" not in (tmp_path / "model.pt").read_bytes()

    def test_costs_the_training_nothing_if_reading_it_fails(self, train, tmp_path, monkeypatch):
        def fail(*_):
            raise RuntimeError("out of luck")

        monkeypatch.setattr("tsemon.probes.output_loss._loss_in", fail)
        watching = callback(tmp_path / "run")
        trainer = train(watching)
        assert len(trainer.steps) == 6
        assert any("RuntimeError: out of luck" in fault for fault in watching.monitor.status.faults)


class OwnLoss(Trainer):
    """Passes labels to the model, and optimizes another loss than the one that the model returns."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), inputs["labels"].flatten())
        return (loss, outputs) if return_outputs else loss


class WithPenalty(Trainer):
    """Adds a term to the loss that the model returns."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = outputs.loss + 1e-3 * outputs.logits.square().sum()
        return (loss, outputs) if return_outputs else loss


class TwoPasses(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return (model(**inputs).loss + model(**inputs).loss) / 2


def of_logits(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


OTHER_LOSSES = {
    "label smoothing": ({"label_smoothing_factor": 0.1}, "no output of the model had a loss"),
    "compute_loss_func": ({"compute_loss_func": of_logits}, "no output of the model had a loss"),
    "compute_loss": ({"kind": OwnLoss}, "the training does not use the loss in the output of the model"),
    "two passes": ({"kind": TwoPasses}, "the model returned 4 losses for the 2 batches of a step"),
}
SMOOTHED = OTHER_LOSSES["label smoothing"][0]


class TestALossThatIsAPartOfTheOneThatIsOptimized:
    def test_is_in_the_frames_and_a_warning_has_the_means_of_both(self, train, tmp_path):
        watching = callback(tmp_path / "run")
        trainer = train(watching, kind=WithPenalty, logging_steps=2)
        (warning,) = watching.monitor.status.faults
        returned = sum(recorded(tmp_path / "run").losses[:2]) / 2
        assert (
            f"the model's is {returned:.4g}, and the mean of the Trainer's is {logged_losses(trainer)[0]:.4g}. "
            in warning
        )

    def test_is_not_claimed_where_the_trainer_replaces_nan_or_evaluates(self, train, tmp_path):
        watching = callback(tmp_path / "run")
        train(watching, also=[Breaking(at_step=3)], logging_steps=2, eval_strategy="steps", eval_steps=2)
        assert watching.monitor.status.faults == ()


class TestALossThatIsNotInTheOutputOfTheModel:
    @pytest.mark.parametrize(("options", "why"), OTHER_LOSSES.values(), ids=OTHER_LOSSES)
    def test_is_replaced_by_the_one_that_was_logged_before_the_step(self, options, why, train, tmp_path):
        watching = callback(tmp_path / "run")
        trainer = train(watching, **options)
        assert recorded(tmp_path / "run").losses == [None, *logged_losses(trainer)[:-1]]
        (warning,) = watching.monitor.status.faults
        assert warning.startswith(f"the loss of each step is not known, because {why}. ")
        assert "every 1 steps" in warning
        assert "set logging_steps=1 and logging_nan_inf_filter=False" in warning

    def test_is_not_warned_of_if_every_loss_is_logged_as_it_is(self, train, tmp_path):
        watching = callback(tmp_path / "run")
        train(watching, logging_nan_inf_filter=False, **SMOOTHED)
        assert watching.monitor.status.faults == ()

    def test_comes_once_for_each_log(self, train, tmp_path):
        trainer = train(callback(tmp_path / "run"), logging_steps=2, **SMOOTHED)
        first, second, _ = logged_losses(trainer)
        assert recorded(tmp_path / "run").losses == [None, None, first, None, second, None]

    def test_waits_for_the_next_frame(self, train, tmp_path):
        trainer = train(callback(tmp_path / "run", every=4), logging_steps=3, **SMOOTHED)
        first, _ = logged_losses(trainer)
        run = recorded(tmp_path / "run")
        # close() sends the gradient norms of the last step, which has no loss.
        assert (run.steps, run.losses) == ([0, 4, 5], [None, first, None])

    def test_has_the_mean_of_all_that_were_logged_since_the_frame_before(self, train, tmp_path):
        trainer = train(callback(tmp_path / "run", every=3), **SMOOTHED)
        mean = recorded(tmp_path / "run").frames[1]["scalars"]["loss_mean"]
        assert mean == pytest.approx(sum(logged_losses(trainer)[:3]) / 3)

    def test_counts_once_in_the_mean_though_steps_without_a_log_follow(self, train, tmp_path):
        trainer = train(callback(tmp_path / "run", every=4), logging_steps=2, **SMOOTHED)
        mean = recorded(tmp_path / "run").frames[1]["scalars"]["loss_mean"]
        assert mean == pytest.approx(sum(logged_losses(trainer)[:2]) / 2)


class TestATrainingThatGoesOnFromACheckpoint:
    def test_goes_on_counting_there(self, train, tmp_path):
        trainer = train(callback(tmp_path / "first"), save_strategy="steps", save_steps=4)
        checkpoint = f"{trainer.args.output_dir}/checkpoint-4"
        trainer = train(callback(tmp_path / "second"), resume=checkpoint)
        first, second = recorded(tmp_path / "first"), recorded(tmp_path / "second")
        assert (first.steps, first.resume_step) == ([0, 1, 2, 3, 4, 5], None)
        assert (second.steps, second.resume_step) == ([4, 5], 4)

    @pytest.mark.parametrize("run", ["r", "another"])
    def test_compares_its_losses_with_those_before_it(self, run, train, tmp_path):
        trainer = train(callback(tmp_path / "first"), save_strategy="steps", save_steps=4)
        train(callback(tmp_path / "second", run=run), resume=f"{trainer.args.output_dir}/checkpoint-4")
        first = recorded(tmp_path / "second").frames[0]["scalars"]
        assert (first["loss_recent"] != first["loss"]) == (run == "r")

    @pytest.mark.parametrize(
        "saved", [None, "", '{"project": "default", "run": "r", "step": 4, "losses": 3}', "[" * 10**5]
    )
    def test_goes_on_if_what_was_saved_is_broken(self, saved, train, tmp_path, caplog):
        trainer = train(callback(tmp_path / "first"), save_strategy="steps", save_steps=4)
        checkpoint = Path(trainer.args.output_dir, "checkpoint-4")
        (checkpoint / "tsemon_state.json").unlink()
        if saved is not None:
            (checkpoint / "tsemon_state.json").write_text(saved)
        train(callback(tmp_path / "second"), resume=str(checkpoint))
        assert recorded(tmp_path / "second").steps == [4, 5]
        assert "losses before the checkpoint are unknown" in caplog.text

    def test_may_be_watched_from_there_only(self, train, tmp_path):
        trainer = train(save_strategy="steps", save_steps=4)
        train(callback(tmp_path / "run"), resume=f"{trainer.args.output_dir}/checkpoint-4")
        assert recorded(tmp_path / "run").steps == [4, 5]


class TestATrainingThatRaises:
    def test_failed_when_its_trainer_is_forgotten(self, train, tmp_path):
        with pytest.raises(RuntimeError, match="out of luck"):
            train(callback(tmp_path / "run"), also=[Raising()])
        gc.collect()
        run = recorded(tmp_path / "run")
        assert (run.state, run.steps) == ("failed", [0, 1])

    def test_failed_when_the_same_callback_begins_another(self, train, tmp_path):
        watching = callback(tmp_path / "first")
        with pytest.raises(RuntimeError, match="out of luck"):
            train(watching, also=[Raising()])
        watching.options["spool_dir"] = tmp_path / "second"
        train(watching)
        assert recorded(tmp_path / "first").state == "failed"
        assert recorded(tmp_path / "second").state == "finished"

    def test_failed_when_the_interpreter_exits_though_the_error_was_caught(self, tmp_path):
        code = (
            "from transformers import Trainer, TrainingArguments\n"
            "from tests.tsemon.integrations.test_transformers import SAMPLES, Raising, callback, zoo\n"
            f"args = TrainingArguments({str(tmp_path / 'trainer')!r}, report_to='none', use_cpu=True, disable_tqdm=True,\n"
            "    per_device_train_batch_size=2)\n"
            f"callbacks = [callback({str(tmp_path / 'run')!r}), Raising()]\n"
            "trainer = Trainer(zoo.gpt2()[0], args, train_dataset=SAMPLES, callbacks=callbacks)\n"
            "try:\n"
            "    trainer.train()\n"
            "except RuntimeError:\n"
            "    pass\n"
        )
        (program := tmp_path / "program.py").write_text(code)
        done = processes.run(processes.start_python, program)
        assert done.returncode == 0, done.stderr
        assert recorded(tmp_path / "run").state == "failed"


class TestWhatAttachRefuses:
    def test_raises_from_train_before_its_first_step(self, train, tmp_path):
        watching = callback(tmp_path, blocks=["transformer.layers.0"])
        with pytest.raises(InvalidArgument, match=r"no module named 'transformer\.layers\.0'"):
            train(watching)
        assert watching.monitor is None

    def test_raises_for_a_model_without_blocks(self, train, tmp_path):
        with pytest.raises(NoBlocksFound, match=r"attach\(\.\.\., blocks="):
            train(callback(tmp_path), model=torch.nn.Linear(2, 2))


class TestACopyOfTheCallback:
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
    def test_has_the_options_and_no_monitor(self, copied, train, tmp_path):
        watching = callback(tmp_path / "run")
        train(watching)
        copy = copied(watching)
        assert (copy.options, copy.monitor) == (watching.options, None)
