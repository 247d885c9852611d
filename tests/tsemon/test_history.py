import random
import time

import pytest
import torch

import tsemon
from tests import zoo
from tests.frames import frames_in, rows_in, scalars_in
from tsemon import history


@pytest.fixture
def attach(tmp_path):
    def attach(**options):
        model, _ = zoo.torch_encoder()
        return tsemon.attach(model, **{"run": "r", "spool_dir": tmp_path, "every": 50} | options)

    return attach


class TestScalarsOfEveryStep:
    @pytest.mark.parametrize("options", [{"every": 7}, {"every": None}], ids=["every", "default"])
    def test_are_kept_each_once_at_its_step(self, attach, tmp_path, options):
        chance, given = random.Random(1), {}
        with attach(**options) as monitor:
            for step in range(900):
                scalars = {name: chance.random() for name in ("a", "val/b", "c") if chance.random() < 0.3}
                loss = [None, 1.0 + chance.random()][chance.random() < 0.9]
                as_tensors = {name: torch.tensor(x, dtype=torch.float64) for name, x in scalars.items()}
                monitor.step(loss=loss, **chance.choice([scalars, as_tensors]))
                for name, value in {**scalars, **({} if loss is None else {"loss": loss})}.items():
                    given.setdefault(name, {})[step] = value
        assert {name: scalars_in(tmp_path, name) for name in given} == {
            name: pytest.approx(values) for name, values in given.items()
        }
        found = [(step, name) for step, scalars in rows_in(tmp_path) for name in scalars]
        found += [(f["step"], name) for f in frames_in(tmp_path) for name in given if name in f["scalars"]]
        assert len(found) == len({*found})

    def test_are_of_one_precision_and_keep_what_is_not_finite(self, attach, tmp_path):
        with attach() as monitor:
            monitor.step(loss=1.0)
            for value in (torch.tensor(0.1, dtype=torch.float64), torch.tensor([3]), True, float("nan"), float("inf")):
                monitor.step(mine=value)
        assert scalars_in(tmp_path, "mine") == {1: 0.1, 2: 3.0, 3: 1.0, 4: None, 5: "Infinity"}

    def test_may_be_sent_soon_though_there_are_few(self, attach, tmp_path, monkeypatch):
        monkeypatch.setattr(history, "SEND_AFTER_S", 0.05)
        monitor = attach()
        for _ in range(20):
            monitor.step(loss=1.0)
            time.sleep(0.01)
        until = time.monotonic() + 30
        while not rows_in(tmp_path) and time.monotonic() < until:
            time.sleep(0.01)
        assert rows_in(tmp_path)
        monitor.close()

    def test_leave_out_what_is_no_number_and_say_so_once(self, attach, tmp_path, caplog):
        with attach() as monitor:
            for _ in range(20):
                monitor.step(loss=1.0, mine="much", yours=torch.zeros(2), ours=3.0)
            assert monitor.status.num_faults <= 4  # a sample says it, too
        assert len(scalars_in(tmp_path, "ours")) == 20
        assert scalars_in(tmp_path, "mine") == scalars_in(tmp_path, "yours") == {}
        assert "'mine' given to monitor.step() was left out" in caplog.text

    def test_leave_out_names_of_metrics_that_tsemon_measures(self, attach, tmp_path):
        with attach() as monitor:
            for _ in range(20):
                monitor.step(loss=1.0, token_similarity=0.5, learning_rate=0.1)
        assert all({*scalars} <= {"loss", "learning_rate"} for _, scalars in rows_in(tmp_path))

    def test_leave_out_more_names_than_a_run_may_have(self, attach, tmp_path, monkeypatch):
        monkeypatch.setattr(history, "MAX_NAMES", 20)
        with attach() as monitor:
            for step in range(40):
                monitor.step(**{f"n{step}": 1.0})
        assert len({name for _, scalars in rows_in(tmp_path) for name in scalars}) == 20

    def test_hold_no_graph(self, attach):
        class Watched(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.mark = Mark()
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                return grad

        class Mark:
            def __del__(self):
                gone.append(1)

        gone, monitor = [], attach()
        for _ in range(10):
            monitor.step(mine=Watched.apply(torch.ones((), requires_grad=True)))
        assert len(gone) >= 9
        monitor.close()


class TestLog:
    def test_keeps_scalars_between_steps_and_of_earlier_ones(self, attach, tmp_path):
        with attach() as monitor:
            monitor.log({"acc": 0.1})
            for _ in range(60):
                monitor.step(loss=1.0)
            monitor.log({"acc": torch.tensor(0.5), "val/loss": 2.0})
            monitor.log({"acc": 0.25}, step=30)
        assert scalars_in(tmp_path, "acc") == {0: 0.1, 30: 0.25, 60: 0.5}
        assert scalars_in(tmp_path, "val/loss") == {60: 2.0}

    @pytest.mark.parametrize("step", [-1, 4, 2.0, True, "3", 2**60])
    def test_keeps_nothing_of_a_step_that_was_not(self, attach, tmp_path, step):
        with attach() as monitor:
            for _ in range(3):
                monitor.step(loss=1.0)
            monitor.log({"acc": 0.5}, step=step)
            assert "expected an integer from 0 to 3" in str(monitor.status.faults)
        assert scalars_in(tmp_path, "acc") == {}

    @pytest.mark.parametrize("scalars", [3.0, None, [("a", 1.0)], "a"])
    def test_keeps_nothing_but_numbers_by_name(self, attach, scalars):
        with attach() as monitor:
            monitor.log(scalars)
            assert "expects scalars by name" in str(monitor.status.faults)

    @pytest.mark.parametrize("name", ["", "a b", "\x00", "x" * 200, 3, "ä"])
    def test_leaves_out_what_has_no_name_of_a_metric(self, attach, tmp_path, name):
        with attach() as monitor:
            monitor.log({name: 1.0, "good": 2.0})
            assert monitor.status.num_faults == 1
        assert [scalars for _, scalars in rows_in(tmp_path)] == [{"good": 2.0}]

    def test_warns_after_the_end(self, attach):
        monitor = attach()
        monitor.close()
        monitor.log({"acc": 0.5})
        assert "after monitor.close()" in str(monitor.status.faults)
