"""Gradient norms of the steps between two samples."""

import math

import pytest
import torch
from torch import nn

import tsemon
from tests import zoo
from tests.frames import frames_in
from tsemon.probes.grad_norms import GradNormProbe

NAMES = GradNormProbe.METRICS
NORMS = [9.0, 1.0, 4.0, math.inf, 3.0, 2.0, 6.0]  # samples are steps 0 and 4; close() sends the last two


def of_norms(frames):
    return [{name: frame["scalars"].get(name, "-") for name in NAMES} for frame in frames]


def of(mean, largest, num_nonfinite, recent):
    numbers = zip(NAMES, (mean, largest, num_nonfinite, recent), strict=True)
    return {name: pytest.approx(number, rel=1e-6) for name, number in numbers}


EXPECTED = [of(9.0, 9.0, 0.0, 9.0), of(8 / 3, 4.0, 1.0, 17 / 4), of(4.0, 6.0, 0.0, 15 / 4)]


class TestNormsOfAllSteps:
    @pytest.mark.parametrize("as_given", [float, torch.tensor], ids=["numbers", "tensors"])
    def test_are_those_that_step_is_given(self, tmp_path, as_given):
        model, _ = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=4, spool_dir=tmp_path) as monitor:
            for norm in NORMS:
                monitor.step(loss=1.0, grad_norm=as_given(norm))
        assert of_norms(frames_in(tmp_path)) == EXPECTED

    @pytest.mark.parametrize("every", [None, 4])
    def test_are_those_that_torch_clips(self, tmp_path, every):
        model, forward = zoo.torch_encoder()
        norms = []
        with tsemon.attach(model, run="r", every=every, spool_dir=tmp_path) as monitor:
            for _ in range(7):
                model.zero_grad()
                loss = forward().square().mean()
                loss.backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item())
                monitor.step(loss=loss)
        frames = frames_in(tmp_path)
        steps = [frame["step"] for frame in frames]
        means = [
            sum(norms[before + 1 : step + 1]) / (step - before)
            for before, step in zip([-1, *steps], steps, strict=False)
        ]
        assert [frame["grad_norm_mean"] for frame in of_norms(frames)] == pytest.approx(means, rel=1e-5)
        assert of_norms(frames)[-1]["grad_norm_recent"] == pytest.approx(sum(norms[2:]) / 5, rel=1e-5)

    def test_need_no_loss(self, tmp_path):
        model, _ = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=4, spool_dir=tmp_path) as monitor:
            for norm in NORMS:
                monitor.step(grad_norm=norm)
        frames = frames_in(tmp_path)
        assert of_norms(frames) == EXPECTED
        assert "loss" not in frames[-1]["scalars"]

    @pytest.mark.parametrize("norm", [10**400, "tall", torch.ones(2), torch.ones((), dtype=torch.cfloat)])
    @pytest.mark.parametrize("every", [None, 4])
    def test_survive_what_is_not_one_number(self, tmp_path, every, norm):
        model, _ = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=every, spool_dir=tmp_path) as monitor:
            for step in range(9):
                monitor.step(loss=1.0, grad_norm=norm if step == 2 else 3.0)
            assert monitor.num_steps == 9
        assert of_norms(frames_in(tmp_path))[-1]["grad_norm_recent"] == 3.0

    def test_come_at_close_without_a_loss_of_before_the_sample(self, tmp_path):
        model, _ = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=4, spool_dir=tmp_path) as monitor:
            for step in range(7):
                monitor.step(loss=1.0 if step < 5 else None, grad_norm=3.0)
        (*_, last) = frames_in(tmp_path)
        assert (last["step"], last["scalars"]["grad_norm_mean"]) == (6, 3.0)
        assert not {name for name in last["scalars"] if name.startswith("loss")}

    def test_are_missing_with_a_reason_where_nobody_knows_them(self, tmp_path):
        model, _ = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=1, spool_dir=tmp_path) as monitor:
            monitor.step(loss=1.0)
            assert {monitor.status.not_measured[name] for name in NAMES} == {
                "no step had a gradient norm: clip it as a whole with torch.nn.utils.clip_grad_norm_, or pass "
                "monitor.step(grad_norm=...)"
            }

    @pytest.mark.parametrize("closes", [False, True])
    def test_are_not_missing_any_more_once_they_are_known(self, tmp_path, closes):
        model, _ = zoo.torch_encoder()
        monitor = tsemon.attach(model, run="r", every=100, spool_dir=tmp_path)
        monitor.step()
        assert {"loss_mean", "grad_norm_mean"} <= monitor.status.not_measured.keys()
        monitor.step(loss=1.0, grad_norm=1.0)
        if closes:
            monitor.close()
        assert not {"loss_mean", "grad_norm_mean"} & monitor.status.not_measured.keys()
        monitor.close()
