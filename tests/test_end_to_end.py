"""From a training loop to the page's data, through a real service process on a real database."""

import contextlib
import fcntl
import functools
import io
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections import deque

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console

import tsemon
from tests import commands, zoo
from tests.ports import free_port, is_free
from tests.processes import start_tsemon
from tests.service import ServiceProcess, await_service
from tsemon.lab.demo import summarize
from tsemon.lab.demo.board import Board, Row
from tsemon.lab.demo.twins import DIGITS
from tsemon.lab.reproduce.oversmoothing_training import sublayer_passes
from tsemon.measures import cosine_similarity, effective_rank, hfc_lfc
from tsemon.models import VisionTransformer, VisionTransformerConfig
from tsemon.schedule import ZOOM_GAP
from tsemon.transport import Outbox, outbox, sync
from tsemon_client import Client
from tsemon_server.access.tokens import new_token
from tsemon_server.store import Store

TSE = "token-similarity-escalation"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """For all tests that leave it alone: each has a run of its own."""
    with ServiceProcess(tmp_path_factory.mktemp("service") / "tsemon.db") as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    with Client(service.url) as client:
        yield client


ALIKE = {
    "hfc_lfc_ratio": (hfc_lfc, torch.div),
    "cosine_change": (cosine_similarity, torch.sub),
    "rank_ratio": (effective_rank, torch.div),
}
"""By the end of a metric's name: the measure, and how two values are compared."""

OVER_SAMPLES = {
    "hfc_lfc_ratio": lambda ratio_B: ratio_B.log().mean().exp(),
    "cosine_change": torch.mean,
    "rank_ratio": lambda ratio_B: ratio_B[0],
}

RULES_OF_LOSS = """
rules:
  - name: loss-doubled
    when: loss > 2 * lowest(loss) for 3 samples, 8 steps
    clear: loss < 1.5 * lowest(loss)
  - name: loss-tripled
    when: loss_recent > 3 * lowest(loss_recent) for 2 samples, 4 steps
  - name: loss-stays-doubled
    when: loss > 2 * lowest(loss) for 5 samples, 300 steps
"""


class Collapsing(torch.nn.Module):
    """A post-norm stack whose tokens grow alike over depth by a factor that the test sets from step to step."""

    def __init__(self, depth=8):
        super().__init__()
        self.blocks = torch.nn.ModuleList(CollapsingBlock() for _ in range(depth))

    def forward(self, x_BTD):
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD


class CollapsingBlock(torch.nn.Module):
    keep = 1.0

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.Sequential(torch.nn.Linear(8, 8))

    def forward(self, x_BTD):
        mean_BTD = x_BTD.mean(dim=1, keepdim=True)
        return mean_BTD + CollapsingBlock.keep * (x_BTD - mean_BTD) + 0 * self.attention(x_BTD)


class TestARunThatIsWatched:
    def test_lists_the_rules_that_cannot_fire_yet(self, service, tmp_path, monkeypatch):
        monkeypatch.setattr(outbox, "_ASK_AGAIN_S", 0.1)
        model, forward = zoo.gpt2()
        with tsemon.attach(
            model, run="waits", project="tests", server=service.url, every=2, spool_dir=tmp_path
        ) as monitor:

            def train(num_steps):
                for _ in range(num_steps):
                    monitor.step(loss=forward().square().mean())
                deadline = time.monotonic() + 30
                while (rules := monitor.status.waiting_rules) is None or rules.step != monitor.num_steps - 1:
                    assert time.monotonic() < deadline, "no answer"
                    time.sleep(0.05)
                return rules

            first, second = train(3), train(16)
            told = str(monitor)
        assert first.waits["batch-of-one-sample"].startswith(
            "3 more samples with batch_similarity and distinct_inputs "
        )
        assert "batch-of-one-sample" not in second.waits
        assert second.waits["batch-repeats"] == "6 more samples with global_diversity and 10 more steps"
        assert second.lacks["updates-too-small"] == ["step_size"]
        assert "as of step 18, batch-repeats cannot fire before 6 more samples" in told

    def test_arrives_whole_and_can_be_asked_for(self, service, client, tmp_path):
        torch.manual_seed(0)
        model, forward = zoo.gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        with tsemon.attach(
            model,
            optimizer,
            run="gpt",
            project="tests",
            server=service.url,
            every=2,
            tags=["a", "b/c"],
            config={"lr": 1e-3},
            spool_dir=tmp_path / "spool",
        ) as monitor:
            for _ in range(9):
                optimizer.zero_grad()
                loss = forward().square().mean()
                loss.backward()
                optimizer.step()
                monitor.step(loss=loss)
                losses.append(loss.item())

        run = client.find_run("gpt", project="tests")
        assert (run.state, run.last_step, run.num_frames, run.num_blocks) == ("finished", 8, 5, 3)
        assert run.tags == ["a", "b/c"]
        assert run.config == {"lr": 1e-3}
        series = client.series(run.run_id, "loss")
        assert series.step == list(range(9))
        assert series.mean == pytest.approx(losses, rel=1e-6)
        heatmap = client.heatmap(run.run_id, "token_similarity")
        last = client.series(run.run_id, "token_similarity", layer=-1)
        assert [column[-1] for column in heatmap.values] == pytest.approx(last.mean)
        assert client.series(run.run_id, "attention_entropy", layer=1, head=3).step == [0, 2, 4, 6, 8]
        assert monitor.status.delivery.num_pending == 0

    def test_says_where_it_is_between_its_samples(self, service, client, tmp_path, monkeypatch):
        monkeypatch.setattr("tsemon.attaching.Outbox", functools.partial(Outbox, heartbeat_s=0.05))
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="slow", server=service.url, every=1000, spool_dir=tmp_path / "spool") as monitor:

            def train_to(step):
                while monitor.state_dict()["step"] < step:
                    forward()
                    monitor.step()
                deadline = time.monotonic() + 60
                while not (runs := [run for run in client.runs(run="slow") if run.process_step == step]):
                    time.sleep(0.01)
                    assert time.monotonic() < deadline, monitor.status
                return runs[0].stepped_at

            assert train_to(3) < train_to(7)
            assert client.find_run("slow").last_step == 0

    def test_zooms_in_when_a_person_asks_and_the_sub_step_is_read_from_there(
        self, service, client, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("tsemon.attaching.Outbox", functools.partial(Outbox, heartbeat_s=0.05))
        torch.manual_seed(0)
        model, forward = zoo.gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
        model.transformer.h[1].attn.c_proj.weight.data.mul_(400)
        steps, budget = [], 1e-9  # after step 90, no sample for a long time
        with tsemon.attach(model, run="calm", server=service.url, budget=budget, spool_dir=tmp_path) as monitor:

            def train_until(condition):
                deadline = time.monotonic() + 120
                while not condition():
                    if monitor.is_sampling:
                        steps.append(monitor.num_steps)
                    forward()
                    monitor.step(loss=2.0)
                    assert time.monotonic() < deadline, monitor.status

            train_until(lambda: monitor.num_steps == 200)
            asking = ["sub-step", "calm", "--zoom", "--timeout", "100", "--server", service.url]
            with start_tsemon(*asking, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
                train_until(lambda: command.poll() is not None)
                out, err = command.communicate()
            assert command.returncode == 0, err
            assert monitor.status.zooms.num == 1
            assert monitor.status.zooms.reason == "a person asked"
        sampled = [step for step in steps if step > 90]
        assert [step - sampled[0] for step in sampled[:4]] == [0, 4, 9, 13]
        listed = re.search(r"^Samples of the zoom: steps (.+)$", out, re.MULTILINE)[1]
        zoom = sampled[: len(listed.split(", "))]
        assert len(zoom) >= 4  # more where the run is faster than the command asks
        assert listed == ", ".join(map("{:,}".format, zoom))
        read_at = client.sub_step(client.find_run("calm").run_id, zoom[-1])
        assert (read_at.block, read_at.sub_step) == (1, "attention")
        assert read_at.step in zoom
        assert f"Newest values up to step {read_at.step:,}: In block 1, the weights of attention" in out
        assert "waiting for close samples of default/calm: 0 of 4" in err

        code, out, err = commands.tsemon(*asking)
        assert (code, "Samples" in out) == (0, False)
        assert "cannot zoom in: it is finished; this is from its stored samples" in err
        assert out.startswith("Newest values up to step ")

    def test_hears_of_its_alert_and_of_its_end(self, service, client, tmp_path):
        torch.manual_seed(0)
        model, told = Collapsing(), []
        x_BTD = torch.randn(16, 6, 8)
        with tsemon.attach(
            model,
            run="collapse",
            project="demo",
            server=service.url,
            every=5,
            on_alert=lambda alert: told.append(alert.state) if alert.rule == TSE else None,
            spool_dir=tmp_path / "spool",
        ) as monitor:

            def train_until(condition, keep):
                CollapsingBlock.keep = keep
                deadline = time.monotonic() + 60
                while not condition():
                    model(x_BTD)
                    monitor.step(loss=1.0)
                    assert time.monotonic() < deadline, monitor.status

            train_until(lambda: TSE in [alert.rule for alert in monitor.alerts], keep=0.3)
            train_until(lambda: told == ["firing", "resolved"], keep=1.0)
            assert TSE not in [alert.rule for alert in monitor.alerts]

        run_id = client.find_run("collapse", project="demo").run_id
        (alert,) = (alert for alert in client.alerts(run_id=run_id) if alert.rule == TSE)
        assert (alert.state, alert.resolved_reason) == ("resolved", "clear")
        assert alert.pending_step < alert.firing_step < alert.resolved_step
        assert alert.evidence["layers"]["token_diversity"]["last"]["layer"] == 8

        output = io.StringIO()
        console = Console(file=output)
        board = Board(client, [Row("collapse")], num_steps=100, console=console)
        summarize(console, board, {"collapse": deque([1.0])}, DIGITS)
        board.advance(10)
        (incident,) = client.incidents(run_id=run_id)
        printed = " ".join(output.getvalue().split())
        assert f"collapse: {incident.rule} in blocks" in printed
        assert f"What to try: {incident.advice['text']}" in printed
        assert TSE in printed

    def test_has_the_same_alerts_live_and_replayed_though_zooms_made_its_samples_uneven(
        self, service, client, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("tsemon.schedule.MIN_ZOOMS", 20)  # an alert that is pending early leaves room for the jump
        client.put_rules(RULES_OF_LOSS, project="zooms")
        torch.manual_seed(0)
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with tsemon.attach(
            model, optimizer, run="uneven", project="zooms", server=service.url, spool_dir=tmp_path / "spool"
        ) as monitor:
            monitor._cadence._budget = 1e-3  # samples 5 steps apart stand out, however fast the machine is
            for step in range(700):
                optimizer.zero_grad()
                loss = forward().square().mean() * (4 if 300 <= step < 500 else 1)
                loss.backward()
                optimizer.step()
                monitor.step(loss=loss)
                if 300 <= step < 350:
                    time.sleep(0.01)  # replies arrive between samples
                if step == 600:
                    monitor.burst(steps=20, every=5)
        assert monitor.status.zooms is not None
        run = client.find_run("uneven", project="zooms")
        steps = client.series(run.run_id, "token_similarity", layer=-1).step
        gaps = {later - sooner for sooner, later in itertools.pairwise(steps)}
        assert min(gaps) == ZOOM_GAP < max(gaps)

        def shown(alert, resolved_step):
            return alert.rule, alert.pending_step, alert.firing_step, resolved_step, alert.summary

        # What fires to the end is resolved by the end of the process, which no replay sees.
        live = [
            shown(alert, alert.resolved_step if alert.resolved_reason == "clear" else None)
            for alert in sorted(client.alerts(run_id=run.run_id), key=lambda alert: alert.firing_step or 0)
            if alert.firing_step is not None
        ]
        replayed = [shown(alert, alert.resolved_step) for alert in client.test_rules(run.run_id).alerts]
        assert sorted(live, key=str) == sorted(replayed, key=str)
        assert [step for _, _, step, *_ in live] == [step for _, _, step, *_ in replayed]
        resolved = {rule for rule, *_, step, _ in live if step is not None}
        assert {"loss-tripled", "loss-spike"} <= resolved

    def test_names_the_sequence_that_carries_a_jump_of_the_loss(self, service, client, tmp_path):
        """Sequence 17 of 32 has random labels, and is in each batch from step 140 on, and once before."""
        torch.manual_seed(0)
        model, _ = zoo.gpt2(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        texts = (torch.arange(32)[:, None] + torch.arange(16)) % 40 + 3
        labels = texts.clone()
        labels[17] = torch.randint(50, 100, (16,))
        others = torch.tensor([index for index in range(32) if index != 17])
        with tsemon.attach(
            model, optimizer, run="poisoned", server=service.url, every=1, spool_dir=tmp_path / "spool"
        ) as monitor:
            for step in range(150):
                rows = others[torch.randperm(31)[:4]]
                rows[0] = 17 if step == 40 or step >= 140 else rows[0]
                loss = model(texts[rows], labels=labels[rows]).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss=loss)
        run = client.find_run("poisoned")
        found = [client.incident(one.incident_id) for one in client.incidents(run_id=run.run_id)]
        (incident,) = [one for one in found if one.family == "loss"]
        first = incident.sequences[0]
        assert first.id == tsemon.measures.sequence_ids([texts[17:18], labels[17:18]]).item()
        assert (first.step, first.seen_step, first.stands_out) == (140, 40, True)
        shown = commands.tsemon("incidents", incident.incident_id, "--server", service.url).stdout
        assert f"sequence {first.id} had a loss of" in " ".join(shown.split())

    def test_loses_no_frame_when_the_service_is_killed(self, tmp_path):
        model, forward = zoo.torch_encoder()
        optimizer = torch.optim.AdamW(model.parameters())
        with ServiceProcess(tmp_path / "tsemon.db") as service, Client(service.url) as client:
            monitor = tsemon.attach(
                model, optimizer, run="survivor", server=service.url, every=1, spool_dir=tmp_path / "spool"
            )

            def train(num_steps):
                for _ in range(num_steps):
                    optimizer.zero_grad()
                    loss = forward().square().mean()
                    loss.backward()
                    optimizer.step()
                    monitor.step(loss=loss)

            train(20)
            service.kill()
            train(20)
            assert monitor.status.num_faults == 0
            service.start()
            train(20)
            monitor.close(timeout_s=60)

            run_id = client.find_run("survivor").run_id
            assert client.series(run_id, "loss").step == list(range(60))
            assert client.run(run_id).num_frames == 60
            assert client.run(run_id).state == "finished"

    def test_is_delivered_by_sync_when_there_was_no_service(self, service, client, tmp_path):
        spool = tmp_path / "spool"
        model, forward = zoo.torch_encoder()
        with tsemon.attach(model, run="offline", every=1, spool_dir=spool) as monitor:
            for _ in range(4):
                forward()
                monitor.step(loss=0.5)
        command = [sys.executable, "-m", "tsemon", "sync", str(spool), "--server", service.url]
        subprocess.run(command, check=True, capture_output=True)
        assert client.series(client.find_run("offline").run_id, "loss").step == [0, 1, 2, 3]

    def test_starts_a_new_attempt_when_it_is_resumed(self, service, client, tmp_path):
        model, forward = zoo.torch_encoder()
        for resume, loss in ((None, 1.0), (2, 2.0)):
            with tsemon.attach(
                model, run="resumed", server=service.url, every=1, resume=resume, spool_dir=tmp_path / "spool"
            ) as monitor:
                for _ in range(4):
                    forward()
                    monitor.step(loss=loss)
        run_id = client.find_run("resumed").run_id
        joined = client.series(run_id, "loss")
        assert list(zip(joined.step, joined.mean, strict=True)) == [
            (0, 1),
            (1, 1),
            (2, 2),
            (3, 2),
            (4, 2),
            (5, 2),
        ]
        assert client.series(run_id, "loss", attempt=1).mean == [1.0] * 4

    def test_shows_what_the_model_computed(self, service, client, tmp_path):
        torch.manual_seed(0)
        sizes = {"image_size": 16, "patch": 4, "channels": 1, "num_classes": 10, "depth": 6, "width": 32}
        model = VisionTransformer(VisionTransformerConfig(**sizes, heads=4, ffn=64))
        images = torch.randn(8, 1, 16, 16)
        with tsemon.attach(model, run="vit", server=service.url, every=1, spool_dir=tmp_path / "spool") as monitor:
            seen = []
            handles = [
                block.register_forward_hook(lambda _, args, output: seen.append(output)) for block in model.blocks
            ]
            model(images)
            monitor.step()
        for handle in handles:
            handle.remove()
        expected = []
        for output in seen:
            x_BTD = output.detach().double().numpy()
            expected.append(np.mean([len(x) * np.sum(x.mean(0) ** 2) / np.sum(x**2) for x in x_BTD]))
        got = client.heatmap(client.find_run("vit").run_id, "token_similarity").values[0][1:]
        assert got == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("kind", ["original", "sharpening", "smoothing"])
    def test_has_what_sub_steps_do_to_the_measures_of_oversmoothing(self, service, client, tmp_path, kind):
        """Tables 1 to 3 of the paper count sub-layers that raise a measure; the signs of H's eigenvalues are the theory."""
        torch.manual_seed(0)
        sizes = {"image_size": 16, "channels": 1, "num_classes": 10, "depth": 4, "width": 48, "ffn": 96}
        rules = {} if kind == "original" else {"reparameterisation": kind}
        model, images = VisionTransformer.from_preset("vit-ti", **sizes, **rules), torch.randn(8, 1, 16, 16)
        passes = sublayer_passes(model, images)
        names = {"attention": ["residual"], "LayerNorm": ["norm1", "norm2"], "MLP": ["feedforward"]}
        measures = [
            "default",
            *(f"{step}_{what}" for steps in names.values() for step in steps for what in ALIKE),
            "value_output_negative_share",
        ]
        with tsemon.attach(model, run=kind, server=service.url, spool_dir=tmp_path, measures=measures) as monitor:
            model(images).sum().backward()
            monitor.step()
        run_id = client.find_run(kind).run_id
        for sublayer, steps in names.items():
            for what, (measure, compare) in ALIKE.items():
                want = [OVER_SAMPLES[what](compare(measure(y), measure(x))).item() for x, y in passes[sublayer]]
                got = [client.heatmap(run_id, f"{step}_{what}").values[0] for step in steps]
                by_block = [value for of_block in zip(*got, strict=True) for value in of_block]
                assert by_block == pytest.approx(want, rel=4e-4, abs=1e-6), (sublayer, what)
        if kind != "original":
            share = client.heatmap(run_id, "value_output_negative_share").values[0]
            assert min(share) > 0.3 if kind == "sharpening" else max(share) == 0, (
                "the other eigenvalues are clipped to 0"
            )
        assert client.series(run_id, "token_similarity", layer=1).step == [0], "the others are still measured"


SHORT = """
import dataclasses
from tsemon.__main__ import main
from tsemon.lab.demo import twins

recipe = twins.DIGITS.recipe
recipe = dataclasses.replace(recipe, sizes={"depth": 32}, batch_size=8, learning_rate=1e-3, warmup=20, steps=50)
twins.DIGITS = dataclasses.replace(twins.DIGITS, recipe=recipe)
main()
"""
"""`tsemon` with a smaller demo: at twice the learning rate, its alert fires at step 30."""


@contextlib.contextmanager
def demo_process(folder, *arguments, program=("-m", "tsemon"), **streams):
    """`tsemon demo` in a folder of its own. Whatever works in that folder must be gone at the end."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL} | streams
    command = [sys.executable, *program, "demo", "--port", str(free_port()), *arguments]
    try:
        with subprocess.Popen(command, cwd=folder, text=True, start_new_session=True, **streams) as demo:
            try:
                yield demo
            except BaseException:
                demo.kill()
                raise
    finally:
        left = [p for p in psutil.process_iter() if p.is_running() and _is_of(p, folder)]
        for process in left:
            process.kill()
    assert left == [], "a process was left behind"


def read_until(file, is_it, lines=()):
    """The lines up to the first that `is_it`."""
    lines = list(lines)
    while not lines or not is_it(lines[-1]):
        lines.append(file.readline())
        assert lines[-1], "".join(lines)
    return lines


def is_row(line):
    return line[:5].strip().isdigit()


class TestAServiceThatAsksForTokens:
    def test_gets_what_was_trained_without_one_once_there_is_one(self, tmp_path, monkeypatch):
        store = Store(f"sqlite:///{tmp_path / 't.db'}")
        texts = {}
        for scope in ("ingest", "read"):
            made = new_token()
            texts[scope] = made.text
            about = {"name": scope, "digest": made.digest, "project": "tests", "expires_at": None}
            store.tokens.add(made.token_id, scopes=(scope,), **about)
        store.close()

        def train(run):
            model, forward = zoo.torch_encoder()
            place = {"server": service.url, "project": "tests", "spool_dir": tmp_path / "spool"}
            with tsemon.attach(model, run=run, every=1, **place) as monitor:
                for _ in range(3):
                    forward()
                    monitor.step(loss=1.0)
            return monitor.status

        with ServiceProcess(tmp_path / "t.db", "--tokens") as service:
            assert train("without").delivery.num_pending == 3
            (synced,) = sync(tmp_path / "spool", service.url)
            assert (synced.num_remaining, synced.num_refused) == (3, 0)
            assert "unauthorized: expected a token" in str(synced.error)
            assert "TSEMON_TOKEN" in str(synced.error)
            monkeypatch.setenv("TSEMON_TOKEN", texts["read"])
            (synced,) = sync(tmp_path / "spool", service.url)
            assert (synced.num_remaining, synced.num_refused) == (3, 0)
            assert "expected a token with the scope 'ingest'" in str(synced.error)
            monkeypatch.setenv("TSEMON_TOKEN", texts["ingest"])
            (synced,) = sync(tmp_path / "spool", service.url)
            assert (synced.num_sent, synced.error) == (3, None)
            assert train("with").delivery.num_pending == 0
            with Client(service.url, token=texts["read"]) as client:
                assert {run.run: run.num_frames for run in client.runs()} == {"without": 3, "with": 3}


class TestTheDemo:
    @pytest.mark.parametrize(
        ("program", "steps", "kill_at"),
        [(("-c", SHORT), 50, 15), pytest.param(("-m", "tsemon"), 300, 140, marks=pytest.mark.thorough)],
        ids=["short", "whole"],
    )
    def test_survives_its_service_being_killed_and_ends_with_the_verdict(self, program, steps, kill_at, tmp_path):
        """The command as a user runs it without a terminal; its service dies in the middle and comes back."""
        with demo_process(tmp_path, program=program) as demo:
            lines = read_until(demo.stdout, lambda line: "The service runs at" in line)
            url = lines[0].split()[4].rstrip(":/")
            # Rows tell the newest sample that the service has, which need not be the newest there is.
            lines = read_until(demo.stdout, lambda line: is_row(line) and int(line[:5]) >= kill_at, lines)
            old = next(p for p in psutil.Process(demo.pid).children() if "serve" in p.cmdline())
            port, database = url.rpartition(":")[2], tmp_path / ".tsemon/demo.db"
            old.send_signal(signal.SIGKILL)
            while not is_free(int(port)):  # a zombie may have threads that still hold it
                time.sleep(0.01)
            lines = read_until(demo.stdout, lambda line: "does not answer" in line, lines)
            demo.send_signal(signal.SIGSTOP)  # or it may end while the service starts
            new = start_tsemon("serve", "--port", port, "--database", f"sqlite:///{database}")
            try:
                await_service(url, process=new)
                demo.send_signal(signal.SIGCONT)
                output = "".join(lines) + demo.communicate()[0]
                assert demo.returncode == 0, output
                with Client(url) as client:
                    runs = {run.run: run for run in client.runs(project="demo")}
                    assert {run.state for run in runs.values()} == {"finished"}
                    for run in runs.values():
                        assert client.series(run.run_id, "loss").step == [*range(steps)], run.run
                    failing, healthy = runs["digits-post-norm"], runs["digits-de-escalated"]
                    stood = {a.rule for a in client.alerts(run_id=failing.run_id) if a.resolved_reason == "run ended"}
                    assert TSE in stood
                    assert [a for a in client.alerts(run_id=healthy.run_id) if a.severity != "info"] == []
                    assert max(client.series(failing.run_id, "contained_faults").max) == 0
                assert "digits-de-escalated: no incident" in output
                summary = output[output.index("Summary") :].splitlines()
                assert any(TSE in line for line in summary)
                verdicts = [line for line in summary if line.startswith("digits-")]
                assert len(verdicts) == 2
                assert all(line.endswith("chance is 2.303") for line in verdicts), "no line is wrapped"
                assert "The page:" not in output, "that service is gone"
                kept = summary[-1].removeprefix("The runs are kept: ")
                shown = subprocess.run(f"{kept} --help", shell=True, cwd=tmp_path, capture_output=True, check=False)
                assert shown.returncode == 0, shown
                assert kept.endswith("serve --database sqlite:///.tsemon/demo.db")
            finally:
                new.terminate()
                new.wait()

    def test_takes_its_service_along_when_it_is_killed(self, tmp_path):
        with demo_process(tmp_path) as demo:
            while not (services := psutil.Process(demo.pid).children()):
                assert demo.poll() is None, demo.stdout.read()
                time.sleep(0.01)
            demo.kill()
            demo.wait()
            gone, _ = psutil.wait_procs(services, timeout=30)
            assert gone == services

    @pytest.mark.parametrize(
        ("database", "text"),
        [
            ("/proc/x/demo.db", "expected a file that can be written as --database, got /proc/x/demo.db: "),
            ("docs", "got docs: it is a folder"),
            ("notes.txt", "the service ended with status 1: the database"),
        ],
    )
    def test_says_at_once_that_its_database_cannot_be_used(self, database, text, tmp_path):
        (tmp_path / "docs").mkdir()
        (tmp_path / "notes.txt").write_text("no database\n" * 100)
        code, out, err = commands.tsemon("demo", "--port", "0", "--database", database, folder=tmp_path)
        assert (code, out) == (1, "")
        assert text in err
        assert err.count("\n") == 1
        assert not (tmp_path / "docs.log").exists()

    @pytest.mark.thorough
    def test_ends_quietly_at_ctrl_c_in_a_terminal(self, tmp_path):
        keyboard, terminal = pty.openpty()

        def take_terminal():
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job, such as a test run, ignores it

        streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal, "preexec_fn": take_terminal}
        with open(keyboard, "r+b", buffering=0) as screen, demo_process(tmp_path, **streams) as demo:
            os.close(terminal)
            output, has_pressed = b"", False
            with contextlib.suppress(OSError):  # EIO: the last process has let go of the terminal
                while seen := screen.read(65536):
                    output += seen
                    if b"training both" in output and not has_pressed:
                        has_pressed = screen.write(b"\x03")
            text = output.decode()
            assert demo.wait() == 130, text
            assert "Traceback" not in text
            assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"
        with ServiceProcess(tmp_path / ".tsemon/demo.db") as service, Client(service.url) as client:
            sync(tmp_path / ".tsemon", service.url)  # on a busy machine, what was not delivered in time
            assert {run.state for run in client.runs(project="demo")} == {"failed"}

    @pytest.mark.thorough
    def test_on_text_trains_and_can_be_stopped(self, tmp_path):
        with demo_process(tmp_path, "--text") as demo:
            lines = read_until(demo.stdout, lambda line: "text-de-escalated" in line and is_row(line))
            assert [line for line in lines if "text-post-norm" in line and is_row(line)], lines
            demo.terminate()
            output = "".join(lines) + demo.stdout.read()
            assert demo.wait() == 128 + signal.SIGTERM, output
            assert "Traceback" not in output


def _is_of(process, folder):
    try:
        return process.pid != os.getpid() and process.cwd() == str(folder)
    except psutil.Error:
        return False
