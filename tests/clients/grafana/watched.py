"""A service that was sent recorded runs, and a Prometheus that scraped it meanwhile: all real, all over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
import time
from pathlib import Path

import httpx
from typer.testing import CliRunner

from tests.ports import free_port
from tests.server.replay.runs import read_runs
from tests.service import ServiceProcess
from tsemon.tools.cli import app
from tsemon.wire import frames_to_body
from tsemon_server.store import Store

RUNS = ("tse_vit24-s0", "lm_pre4-s0", "ent_qk20-s0", "div_nan-s0")
"""Tokens escalate, sampled every tenth step; healthy, every fifth; attention collapses; the loss becomes NaN."""
RULES_OF_PROMETHEUS = Path(__file__).parents[3] / "clients/prometheus/rules"
ROUNDS = 5
NOTIFY = {
    "receivers": [{"name": "nobody", "type": "webhook", "url": "http://127.0.0.1:9", "allow_private": True}],
    "routes": [{"receivers": "nobody", "group_wait": "1s"}],
}
"""Nothing listens on that port: each message fails, which is counted."""
OVERHEAD_RATIO = 0.0125
"""What `attach` measures of itself, and recordings lack."""


class Prometheus:
    """The real one, on a free port, with a configuration of its own."""

    def __init__(self, folder, target, token_file):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        scrape = {
            "job_name": "tsemon",
            "authorization": {"credentials_file": str(token_file)},
            # Under two names, as two services on one database are scraped: each tells of every run.
            "static_configs": [
                {"targets": [f"{name}:{target.rpartition(':')[2]}" for name in ("127.0.0.1", "localhost")]}
            ],
        }
        configuration = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [scrape],
            "rule_files": [str(RULES_OF_PROMETHEUS / "*.yml")],
        }
        (folder / "prometheus.yml").write_text(json.dumps(configuration))  # JSON is YAML
        self._process = subprocess.Popen(
            [
                shutil.which("prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._http = httpx.Client(base_url=self.url, timeout=60)

    def has_scraped(self):
        try:
            return self._http.get("/-/ready").status_code == 200 and len(self.ask('up{job="tsemon"} == 1')) == 2
        except httpx.TransportError:
            return False

    def has_scraped_since(self, moment):
        return all(float(series["value"][1]) > moment for series in self.ask('timestamp(up{job="tsemon"})'))

    def ask(self, expr, start=None, end=None):
        """The series of an instant query, or of a range query with a point per second."""
        if start is None:
            reply = self._http.get("/api/v1/query", params={"query": expr, "time": end or time.time()})
        else:
            reply = self._http.get(
                "/api/v1/query_range", params={"query": expr, "start": start, "end": end, "step": "1"}
            )
        told = reply.json()
        assert told["status"] == "success", f"{expr}\n{told.get('error')}"
        return told["data"]["result"]

    def close(self):
        self._http.close()
        self._process.terminate()
        self._process.wait()


@dataclasses.dataclass
class Watched:
    """What tests ask."""

    service: str
    """The address of the service."""
    token: str
    """Of scope `read`, as Grafana has it."""
    prometheus: Prometheus | None
    run_ids: dict[str, str]
    start: float
    end: float
    incidents: list[dict] = dataclasses.field(init=False)
    """The incidents that are open at the end. Minutes later the runs are silent too."""

    def __post_init__(self):
        self.incidents = self.rest("/api/v1/incidents", {"state": "open", "limit": 1000})["incidents"]

    def rest(self, path, params=()):
        headers = {"Authorization": f"Bearer {self.token}"}
        reply = httpx.get(self.service + path, params=params, headers=headers, timeout=30)
        assert reply.status_code == 200, f"{reply.url}\n{reply.text}"
        return reply.json()


def watch(folder, with_prometheus):
    """Start both, send the runs a part a second, and yield what came of it."""
    (folder / "notify.json").write_text(json.dumps(NOTIFY))
    service = ServiceProcess(folder / "tsemon.db", "--tokens", "--notify", str(folder / "notify.json"))
    tokens = {scope: token(folder, service.database, scope) for scope in ("ingest", "read", "metrics")}
    with contextlib.closing(Store(service.database)) as store:
        store.note_settled(0.0)  # as by an earlier start: /metrics reads it only every 15 s
    headers = {"Authorization": f"Bearer {tokens['ingest'].read_text().strip()}"}
    with contextlib.ExitStack() as stack:
        prometheus = None
        if with_prometheus:  # first, because it takes 5 s to look for its targets
            prometheus = stack.enter_context(contextlib.closing(Prometheus(folder, service.url, tokens["metrics"])))
        stack.enter_context(service)
        api = stack.enter_context(httpx.Client(base_url=f"{service.url}/api/v1", headers=headers))
        if prometheus is not None:
            await_that(prometheus.has_scraped, "Prometheus scrapes the service")
        start = time.time()
        recorded = [run for name in RUNS for run in read_runs(name)]
        run_ids = {run.name: register(api, run) for run in recorded}
        for number in range(ROUNDS):
            for run in recorded:
                size = -(-len(run.frames) // ROUNDS)
                send(api, run_ids[run.name], run.frames[number * size : (number + 1) * size])
            if prometheus is not None:
                await_scrape(prometheus)
        if prometheus is not None:
            await_last_steps(prometheus, recorded)
        yield Watched(service.url, tokens["read"].read_text().strip(), prometheus, run_ids, start, time.time())


def token(folder, database, scope):
    """The file of a new token, made as an operator makes it."""
    path = folder / f"{scope}.token"
    create = ["token", "create", scope, "--scope", scope, "--database", database, "--out", str(path)]
    CliRunner().invoke(app, create, catch_exceptions=False)
    return path


def register(api, run):
    blocks = [f"h.{number}" for number in range(run.num_blocks)]
    body = {"project": "recorded", "run": run.name, "blocks": blocks, "frozen_blocks": run.frozen_blocks}
    return api.post("/runs", json=body).raise_for_status().json()["run_id"]


def send(api, run_id, frames):
    told = [
        dataclasses.replace(frame, scalars=frame.scalars | {"overhead_ratio": OVERHEAD_RATIO}).to_json()
        for frame in frames
    ]
    if told:
        api.post(f"/runs/{run_id}/frames", content=frames_to_body("w", 1, told)).raise_for_status()


def await_that(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.1)


def await_scrape(prometheus):
    now = time.time()
    await_that(lambda: prometheus.has_scraped_since(now), "Prometheus scrapes once more")


def await_last_steps(prometheus, recorded):
    """Until Prometheus has the newest frame of each run, and has seen a message fail, as its alert does."""
    last = sorted(run.frames[-1].step for run in recorded)
    steps = "min by (run_id) (tsemon_run_step)"
    await_that(
        lambda: sorted(int(series["value"][1]) for series in prometheus.ask(steps)) == last, "it has the last steps"
    )
    await_that(lambda: prometheus.ask('ALERTS{alertname="TsemonNotificationsFail"}'), "it sees a message fail")
    await_scrape(prometheus)
