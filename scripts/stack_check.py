"""`make stack-check`: a training run fails and people are notified, on the real programs from end to end.

The demo's failing run trains against `tsemon serve`. A rule of the server fires, Prometheus reads it as
`tsemon_incident`, and TsemonIncident of clients/prometheus sends it to an Alertmanager with the routes of
clients/prometheus. The server also notifies this Alertmanager directly. The Alertmanager calls a webhook in this script.
Then the training ends, and every alert must resolve. At last the server stops, and Prometheus must notice.

Each program is a process of its own on a free loopback port, with its files in a temporary folder. The rules are the
shipped files. The configurations differ from the shipped ones in addresses, tokens and intervals (one scrape a second).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tsemon.lab.demo.service import end_with

SHIPPED = Path(__file__).parent.parent / "clients/prometheus"
PROGRAMS = {"prometheus": "prometheus", "alertmanager": "prometheus-alertmanager"}
"""What they are called in Debian's packages; elsewhere without the prefix."""

GRACE_S = 3
"""Seconds that an ended run stays in /metrics: three scrapes here."""
TOLD_EVERY_S = 2
"""Seconds after which the server sends a firing alert to the Alertmanager again."""
OUR_RULE = "token-similarity-escalation"
OPENED_AS = "token-similarity-onset"
"""Likeliest cause when the incident opens. The server's notification keeps it as the alert's name."""
LOUD = {
    "the server's notification": {"alertname": OPENED_AS},
    "Prometheus's alert": {"alertname": "TsemonIncident", "rule": OUR_RULE},
}
"""The alerts that people must receive, with the labels that identify each."""
ROUTED_BY = {"project": "demo", "run": "digits-post-norm", "family": "tse", "severity": "critical"}
"""Further labels of each."""


class Failed(Exception):
    """What was expected did not happen."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--patience",
        type=float,
        default=90.0,
        metavar="SECONDS",
        help="how long all may take to hear of the failure, and again of its end (90)",
    )
    patience_s = parser.parse_args().patience
    for received in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(received, lambda number, _: sys.exit(128 + number))
    missing = [name for name in PROGRAMS if program(name) is None]
    if missing:
        print(f"not checked: {' and '.join(missing)} not installed; scripts/system_parts.py does it where it can")
        return 1
    try:
        with ExitStack() as stack:
            check(stack, patience_s)
    except Failed as failure:
        print(f"FAILED: {failure}", flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing is left running")
        return 130
    return 0


def check(stack: ExitStack, patience_s: float) -> None:
    """All of it. What `stack` has been given ends with it."""
    report = Report()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tsemon-stack-")))
    people = stack.enter_context(listening())
    plant = Plant(folder, people.url)
    try:
        plant.start(stack)
        report.line("the service, Prometheus and Alertmanager answer")
        run_id, num_heard = train(plant, people, report, patience_s)
        await_all(after_the_end(plant, people, run_id, num_heard), report, patience_s)
        if people.of("firing", {"alertname": "TsemonDown"}, 0) is not None:
            raise Failed("people heard of TsemonDown, though the service was up")
        report.line(f"all of it was told, in {people.num_messages} messages, and all of it is over")
        plant.processes["service"].terminate()
        await_all({"Prometheus sees that the server is down": partial(is_down, plant)}, report, patience_s)
    except Failed:
        print(plant.last_words(), file=sys.stderr)
        raise


class Report:
    """Says what has happened, and when."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def line(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:6.1f} s  {text}", flush=True)


# ---------------------------------------------------------------------------------------------- the programs


def program(name: str) -> str | None:
    return shutil.which(PROGRAMS[name]) or shutil.which(name)


@dataclass
class Plant:
    """The service, Prometheus and Alertmanager, with their files in `folder`; whom to tell is at `webhook`."""

    folder: Path
    webhook: str
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    @property
    def database(self) -> str:
        return f"sqlite:///{self.folder}/runs.db"

    def start(self, stack: ExitStack) -> None:
        """Return once all three answer."""
        self.ports = dict(zip(("service", "prometheus", "alertmanager"), free_ports(), strict=False))
        os.environ["TSEMON_TOKEN"] = self._token("trainer", "ingest", "read").read_text().strip()
        scraper = self._token("prometheus", "metrics")
        self._write("alertmanager.yml", alertmanager_configuration(self.webhook))
        self._write("prometheus.yml", prometheus_configuration(self.ports, scraper))
        self._write("notify.yaml", notify_configuration(self.url("service"), self.url("alertmanager")))
        stack.callback(self._stop)
        for name in ("alertmanager", "prometheus"):
            self._launch(
                name,
                str(program(name)),
                f"--config.file={name}.yml",
                f"--storage.{'path' if name == 'alertmanager' else 'tsdb.path'}=data-{name}",
                f"--web.listen-address=127.0.0.1:{self.ports[name]}",
                *(["--cluster.listen-address="] if name == "alertmanager" else []),
            )
        self._launch(
            "service",
            *(sys.executable, "-m", "tsemon", "serve", "--tokens", "--port", str(self.ports["service"])),
            *("--database", self.database, "--notify", str(self.folder / "notify.yaml")),
            TSEMON_METRICS_GRACE_S=str(GRACE_S),
        )
        for name, path in (("alertmanager", "/-/ready"), ("service", "/readyz"), ("prometheus", "/-/ready")):
            self._await_answer(name, path)

    def _token(self, name: str, *scopes: str) -> Path:
        """Do what `tsemon token create` does."""
        from tsemon_server.access.commands import create

        path = self.folder / f"{name}.token"
        with redirect_stdout(io.StringIO()):
            create(name, [*scopes], out=path, database=self.database)
        return path

    def _write(self, name: str, content: Any) -> None:
        (self.folder / name).write_text(yaml.safe_dump(content, sort_keys=False))

    def _launch(self, name: str, *command: str, **environment: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            # Its own group: Ctrl-C is for the script, which ends them.
            self.processes[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(end_with, os.getpid()),
            )

    def _stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _await_answer(self, name: str, path: str) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.processes[name].poll() is None:
            with suppress(OSError), urllib.request.urlopen(self.url(name) + path, timeout=5):
                return
            time.sleep(0.05)
        raise Failed(f"{name} does not answer")

    def ask(self, name: str, path: str, **parameters: str) -> Any:
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        with urllib.request.urlopen(self.url(name) + path + query, timeout=10) as reply:
            return json.load(reply)

    def last_words(self) -> str:
        """The end of each log."""
        logs = {name: (self.folder / f"{name}.log").read_text(errors="replace") for name in self.processes}
        return "\n".join(f"{name}: {line}" for name, log in logs.items() for line in log.splitlines()[-5:])


def free_ports() -> Iterator[int]:
    """Below 32768: from there on the kernel may give them to outgoing connections before the servers are up."""
    for port in random.sample(range(32_000, 32_768), 100):
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            yield port
    raise OSError("100 ports between 32000 and 32767 are taken")


def prometheus_configuration(ports: dict[str, int], token: Path) -> dict[str, Any]:
    """The shipped one, in a hurry and at other addresses."""
    found: dict[str, Any] = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    found["rule_files"] = [str(SHIPPED / path) for path in found["rule_files"]]
    found["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    found["global"]["external_labels"]["tsemon_url"] = f"http://127.0.0.1:{ports['service']}"
    (alertmanager,) = found["alerting"]["alertmanagers"]
    alertmanager["static_configs"] = [{"targets": [f"127.0.0.1:{ports['alertmanager']}"]}]
    (job,) = found["scrape_configs"]
    job["authorization"]["credentials_file"] = str(token)
    job["static_configs"] = [{"targets": [f"127.0.0.1:{ports['service']}"]}]
    return found


def alertmanager_configuration(webhook: str) -> dict[str, Any]:
    """The shipped one, in a hurry, and people have an address."""
    found: dict[str, Any] = yaml.safe_load((SHIPPED / "alertmanager.yml").read_text())
    found["route"] |= {"group_wait": "0s", "group_interval": "1s"}
    (people,) = (receiver for receiver in found["receivers"] if receiver["name"] == "people")
    people["webhook_configs"] = [{"url": webhook, "send_resolved": True}]
    return found


def notify_configuration(service: str, alertmanager: str) -> dict[str, Any]:
    receiver = {"name": "alertmanager", "type": "alertmanager", "url": alertmanager, "allow_private": True}
    return {"base_url": service, "receivers": [receiver | {"told_every": f"{TOLD_EVERY_S}s"}]}


# ---------------------------------------------------------------------------------------------- people


class People(ThreadingHTTPServer):
    """The webhook that the Alertmanager tells."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Ear)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.heard: list[dict[str, Any]] = []
        self.num_messages = 0
        self._lock = threading.Lock()

    def hear(self, alerts: list[dict[str, Any]]) -> None:
        with self._lock:
            self.num_messages += 1
            self.heard += alerts

    def of(self, status: str, labels: dict[str, str], since: int) -> dict[str, Any] | None:
        """The first alert with these labels that was told to fire, or to be over, not among the first `since`."""
        alerts = self.heard[since:]
        return next((a for a in alerts if a["status"] == status and labels.items() <= a["labels"].items()), None)


class _Ear(BaseHTTPRequestHandler):
    server: People

    def do_POST(self) -> None:
        self.server.hear(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: the report tells."""


@contextmanager
def listening() -> Iterator[People]:
    with People() as people:
        threading.Thread(target=people.serve_forever, args=(0.05,), daemon=True).start()
        yield people
        people.shutdown()


# ---------------------------------------------------------------------------------------------- what must happen

Look = Callable[[], str | None]
"""What has happened, in words; None as long as it has not."""


def train(plant: Plant, people: People, report: Report, patience_s: float) -> tuple[str, int]:
    """The demo's failing run, until everybody has heard of it; its id, and how much people had heard by then."""
    import torch

    import tsemon
    from tsemon.lab.demo.twins import DIGITS
    from tsemon.lab.train.training import Training
    from tsemon_client import Client

    torch.set_num_threads(1)  # the others need a core, too
    # Its learning rate is constant after the warm-up, so more steps change none of those before.
    training = Training(replace(DIGITS.with_tau(None), steps=100_000))
    monitor = tsemon.attach(
        training.model,
        training.optimizer,
        run="digits-post-norm",
        project="demo",
        server=plant.url("service"),
        every=5,
        spool_dir=plant.folder / "spool",
        on_alert=partial(tell, report),
    )
    has_been_told = False
    try:
        with Client(plant.url("service")) as client:
            waiting, deadline, looked = before_the_end(plant, people, client), time.monotonic() + patience_s, 0.0
            for step, loss in enumerate(training.losses):
                monitor.step(loss=loss)
                if step == 0:
                    report.line(f"{training.recipe.name}: a post-norm transformer of {DIGITS.recipe.preset} trains")
                if time.monotonic() - looked > 0.2:
                    waiting, looked = told(waiting, report), time.monotonic()
                if not waiting:
                    break
                if looked > deadline:
                    raise Failed(f"not within {patience_s:.0f} s of training: {'; '.join(waiting)}")
            run_id = client.find_run("digits-post-norm", project="demo").run_id
        has_been_told = True
        report.line(f"the training ends, at step {training.step}")
        return run_id, len(people.heard)
    finally:
        monitor.close(state="finished" if has_been_told else "failed", timeout_s=10.0 if has_been_told else 1.0)


def tell(report: Report, alert: Any) -> None:
    """What comes back to the training with the reply to its frames."""
    if alert.rule == OUR_RULE and alert.state == "firing":
        report.line(f"the training itself hears of {alert.rule}")


def before_the_end(plant: Plant, people: People, client: Any) -> dict[str, Look]:
    """What must happen while the training goes on."""

    def service_says() -> str | None:
        for alert in client.alerts(state="firing", rule=OUR_RULE):
            return f"the service says that {OUR_RULE} fires since step {alert.firing_step}"
        return None

    return {
        f"the service says that {OUR_RULE} fires": service_says,
        **{f"people hear of {what}": partial(hears, people, "firing", labels) for what, labels in LOUD.items()},
        "the service tells the Alertmanager again": Again(plant),
    }


def after_the_end(plant: Plant, people: People, run_id: str, num_heard: int) -> dict[str, Look]:
    """What must happen after the training has ended."""

    def is_over(labels: dict[str, str]) -> Look:
        return partial(hears, people, "resolved", labels, num_heard)

    def nothing_is_active() -> str | None:
        active = [alert["labels"]["alertname"] for alert in plant.ask("alertmanager", "/api/v2/alerts")]
        return None if active else "the Alertmanager has no alert any more"

    def has_left() -> str | None:
        found = plant.ask("prometheus", "/api/v1/query", query=f'{{run_id="{run_id}", __name__=~"tsemon.+"}}')
        return None if found["data"]["result"] else "Prometheus sees no series of the run any more"

    return {
        **{f"people hear that {what} is over": is_over(labels) for what, labels in LOUD.items()},
        "the Alertmanager has no alert any more": nothing_is_active,
        "Prometheus sees no series of the run any more": has_left,
    }


def is_down(plant: Plant) -> str | None:
    """One alert is left: TsemonDown, which waits for its minute."""
    found = plant.ask("prometheus", "/api/v1/query", query="ALERTS")["data"]["result"]
    states = [(alert["metric"]["alertname"], alert["metric"]["alertstate"]) for alert in found]
    return "the server stops, and TsemonDown is pending" if states == [("TsemonDown", "pending")] else None


def hears(people: People, status: str, labels: dict[str, str], since: int = 0) -> str | None:
    """That people heard of it, with all that they need."""
    alert = people.of(status, labels, since)
    if alert is None:
        return None
    found = alert["labels"]
    name = found["alertname"] + (f" of {found['rule']}" if "rule" in found else "")
    if not ROUTED_BY.items() <= found.items():
        raise Failed(f"{name} has labels {found}; expected {ROUTED_BY}")
    if "tsemon_url" in found:
        raise Failed(f"{name} has the label tsemon_url, which is for links alone")
    link = alert["annotations"].get("url", alert["generatorURL"])
    if not link.partition("?")[0].endswith(f"/#/run/{found['run_id']}"):
        raise Failed(f"{name} links to {link}, which is not the page of the run")
    if found["alertname"] == "TsemonIncident" and not link.endswith(f"?incident={found['incident_id']}"):
        raise Failed(f"{name} links to {link}, which does not name the incident")
    if status == "resolved":
        return f"people hear that {name} is over"
    return f"people hear: [{found['severity']}] {name}: {alert['annotations']['summary'].partition(': ')[0]}"


class Again:
    """The service tells the Alertmanager again of what fires, so that its end is later each time."""

    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self._ends: list[datetime] = []

    def __call__(self) -> str | None:
        for alert in self._plant.ask("alertmanager", "/api/v2/alerts", filter=f'alertname="{OPENED_AS}"'):
            ends_at = datetime.fromisoformat(alert["endsAt"])
            if not self._ends or ends_at > self._ends[-1]:
                self._ends.append(ends_at)
        if len(self._ends) < 3:
            return None
        later = (self._ends[-1] - self._ends[0]).total_seconds()
        return f"the service has told the Alertmanager twice again: it fires for {later:.1f} s longer"


def told(waiting: dict[str, Look], report: Report) -> dict[str, Look]:
    """What has not happened yet; what has is reported."""
    left = {}
    for what, look in waiting.items():
        seen = look()
        if seen is None:
            left[what] = look
        else:
            report.line(seen)
    return left


def await_all(waiting: dict[str, Look], report: Report, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while waiting := told(waiting, report):
        if time.monotonic() > deadline:
            raise Failed(f"not within {patience_s:.0f} s of the end: {'; '.join(waiting)}")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
