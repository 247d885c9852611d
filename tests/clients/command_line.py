"""A service with runs, and commands as a user starts them: in a pipe and on a terminal."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, suppress
from typing import NamedTuple

import httpx
import pytest

from tests.service import ServiceProcess
from tsemon.__main__ import main
from tsemon.wire import API, Array, Frame, frames_to_body
from tsemon_server.store import Store

NAN = float("nan")
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e[bold]$(touch owned)"
"""A name that would set the title of a terminal, clear it, turn the text and style it, and run a command in a shell."""
DEPTH = 4
SEQUENCES = re.compile(r"\r?\x1b\[[0-9;?]*[A-Za-z]")
"""What we order a terminal to do ourselves: styles, and movements of the cursor."""


def frame(step, loss=1.0, seq=None, **layers_too):
    """Layer i of an input and four blocks has the similarity i / 10. The score is the loss, and not finite at step 60."""
    similarity = Array.of([layer / 10 for layer in range(DEPTH + 1)])
    entropy = Array.of([0.5] * DEPTH)
    heads = {"attention_entropy": Array.of([0.5] * DEPTH * 2, (DEPTH, 2))}
    layers = {"token_similarity": similarity, "attention_entropy": entropy}
    layers |= {name: Array.of(values) for name, values in layers_too.items()}
    return Frame(
        step if seq is None else seq,
        step,
        1000.0 + step,
        {"loss": loss, "score": NAN if step == 60 else loss},
        layers,
        heads,
    )


def register(url, run, project="demo", **fields):
    body = {"project": project, "run": run, "blocks": [f"h.{i}" for i in range(DEPTH)]} | fields
    return httpx.post(f"{url}{API}/runs", json=body).raise_for_status().json()["run_id"]


def send(url, run_id, frames, attempt=1):
    body = frames_to_body("w", attempt, [one.to_json() for one in frames])
    httpx.post(f"{url}{API}/runs/{run_id}/frames", content=body).raise_for_status()


def change(url, run_id, state):
    httpx.patch(f"{url}{API}/runs/{run_id}", json={"state": state}).raise_for_status()


def open_alert(database, run_id, rule="loss-spike", **values):
    """Let an alert fire, without a rule that finds a reason."""
    seen = {"family": "loss", "severity": "warning", "summary": f"loss is 20 ({rule})"}
    seen |= {"evidence": {"conditions": [{"value": 20.0}]}, "advice": {"text": "Lower the rate.", "source": "A paper."}}
    steps = {"state": "firing", "pending_step": 20, "firing_step": 40}
    store = Store(database)
    with store.write() as writer:
        writer.alerts.open(run_id, 1, rule, **seen | steps | values)
    store.close()


def resolve_alerts(database, run_id, num):
    """So many alerts that are over, newer than all others."""
    store = Store(database)
    with store.write() as writer:
        for index in range(num):
            over = {"state": "resolved", "pending_step": 20, "firing_step": 20, "resolved_step": 20, "evidence": {}}
            said = {"family": "loss", "severity": "info", "summary": "it was over at once", "advice": {}}
            writer.alerts.open(run_id, 1, f"passing-{index}", **over | said)
    store.close()


@contextmanager
def filled_service(folder):
    """`url`, `database`, and by name the ids of five runs, one of a hostile name, which no route would take."""
    with ServiceProcess(folder / "tsemon.db") as service:
        url = service.url
        ids = {"demo/gpt": register(url, "gpt", tags=["sweep"], config={"lr": 0.1, "model": {"depth": DEPTH}})}
        send(url, ids["demo/gpt"], [frame(step, 5.0 - step / 50) for step in range(0, 200, 10)])
        ids["vision/vit"] = register(url, "vit", "vision", tags=["sweep", "big"])
        send(url, ids["vision/vit"], [frame(0)])
        change(url, ids["vision/vit"], "finished")
        for project in ("a", "b"):
            ids[f"{project}/twin"] = register(url, "twin", project)
        store = Store(service.database)
        with store.write() as writer:
            options = {"blocks": [HOSTILE], "config": {HOSTILE: HOSTILE}, "tags": [HOSTILE], "resume_step": None}
            ids["hostile"] = writer.runs.register(HOSTILE, HOSTILE, attempt_key=None, **options).run_id
        store.close()
        open_alert(service.database, ids["demo/gpt"])
        open_alert(
            service.database,
            ids["demo/gpt"],
            "entropy-collapse",
            family="entropy",
            severity="critical",
            state="resolved",
            resolved_step=60,
        )
        open_alert(service.database, ids["hostile"], "dead-units", severity="info", state="pending", summary=HOSTILE)
        service.ids = ids
        yield service


def environment(service=None, **more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TSEMON_", "COLUMNS", "LINES"))}
    return kept | {"TSEMON_SERVER": "http://127.0.0.1:9" if service is None else service.url, "TERM": "xterm"} | more


class Done(NamedTuple):
    code: int
    out: str
    err: str


def in_this_process(service, monkeypatch, capsys):
    """Runs the command here, which is quicker: in a pipe, or as on a terminal that is so many columns wide."""

    def run(*arguments, columns=None):
        monkeypatch.setattr(sys, "argv", ["tsemon", *map(str, arguments)])
        with monkeypatch.context() as here:
            here.setenv("TSEMON_SERVER", service.url)
            if columns is not None:
                here.setenv("FORCE_COLOR", "1")
                here.setenv("COLUMNS", str(columns))
            with pytest.raises(SystemExit) as end:
                main()
        out, err = capsys.readouterr()
        return Done(end.value.code or 0, SEQUENCES.sub("", out), SEQUENCES.sub("", err))

    return run


def tsemon(service, *arguments, **more):
    """The command in a process of its own, with its output in pipes."""
    return subprocess.run(
        [sys.executable, "-m", "tsemon", *map(str, arguments)],
        env=environment(service, **more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, service, *arguments, columns=100, lines=40, **more):
        self.output = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tsemon", *map(str, arguments)],
            env=environment(service, **more),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)

    def read_until(self, text, timeout_s=120):
        """All that was shown so far, once the text was."""
        deadline = time.monotonic() + timeout_s
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            assert self._read(deadline - time.monotonic()), f"it ended: {self.shown}"
        return self.shown

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def wait(self):
        """Its exit code, when it has ended."""
        while self._read(120):
            pass
        os.close(self._master)
        return self.process.wait(timeout=120)

    @property
    def shown(self):
        """The output without styles and movements."""
        return SEQUENCES.sub("", self.output.decode(errors="replace")).replace("\r\n", "\n")

    def _read(self, timeout_s):
        if not select.select([self._master], [], [], max(timeout_s, 0))[0]:
            return False
        part = b""
        with suppress(OSError):  # its other end is closed
            part = os.read(self._master, 65536)
        self.output += part
        return bool(part)


def on_terminal(service, *arguments, **options):
    """(exit code, what was shown)"""
    terminal = Terminal(service, *arguments, **options)
    code = terminal.wait()
    return code, terminal.shown
