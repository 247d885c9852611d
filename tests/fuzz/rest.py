"""A real service with something of everything in its database, and schemathesis let loose on it."""

import json
import subprocess
import sys
from pathlib import Path

import httpx

from tests.service import ServiceProcess
from tsemon.wire import Array, Frame, frames_to_body

RULES = """\
rules:
  - name: fuzzed-loss
    family: loss
    severity: warning
    title: The loss is high
    when: {value: [{scalar: loss}], above: 10}
    for: {samples: 1, steps: 0}
    advice: Lower the learning rate.
    source: this test
    origin: this test
  - name: fuzzed-tokens
    family: tse
    severity: critical
    title: Tokens are alike
    when: {value: [{layers: token_similarity}, {layers: max}], above: 0.9}
    advice: Take a share of the mean away.
    source: this test
    origin: this test
"""
NOBODY = "receivers: [{name: pager, type: webhook, url: 'http://127.0.0.1:9/very-secret', allow_private: true}]"

HOOKS = f"""
import schemathesis
from schemathesis.transport.serialization import Binary

@schemathesis.hook
def map_body(context, body):
    is_rule_file = context.operation.path.startswith("/api/v1/rules") and isinstance(body, Binary)
    return Binary({RULES.encode()!r}) if is_rule_file and len(body.data) % 2 else body

@schemathesis.hook
def map_query(context, query):
    if context.operation.path != "/api/v1/events" or not isinstance(query, dict):
        return query
    seconds = query.get("seconds", 0)
    is_fit = str(seconds).isdecimal() and int(seconds) <= 3600
    return query | {{"seconds": 0}} if is_fit else query
"""
"""Half of all bodies that should be rule files are one. Who asks for events wants them for no time."""

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
    "ignored_auth",
)
"""All but those that expect a service to take whatever fits its schema: here an id must be there, and a YAML be rules."""


def fuzz(folder: Path, database: str, seconds: int, seed: int) -> tuple[int, str]:
    """schemathesis's exit status and what it says: 0 where it has found nothing."""
    (folder / "notify.yaml").write_text(NOBODY)
    (folder / "hooks.py").write_text(HOOKS)
    make = [sys.executable, "-m", "tsemon", "token", "create", "fuzz", "--scope", "admin", "--database", database]
    token = subprocess.run(make, capture_output=True, text=True, check=True).stdout.strip()
    service = ServiceProcess(database, "--notify", str(folder / "notify.yaml"), "--tokens")
    headers = {"Authorization": f"Bearer {token}"}
    with service, httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, timeout=60) as http:
        (folder / "schemathesis.toml").write_text(_configuration(_filled(http), token))
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json"]
        command += ["--max-time", str(seconds), "--seed", str(seed), "--no-color"]
        command += ["--request-timeout", "60", "--suppress-health-check", "all"]  # a slow machine is no finding
        done = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300 + 3 * seconds
        )
        assert http.get("/runs").status_code == 200  # it is there still
    return done.returncode, done.stdout


def _filled(http):
    """Values that mean something to the service, once it has runs, frames, rules, alerts and silences."""
    _done(http.put("/rules", content=RULES))
    run_ids = [_filled_run(http, f"gpt-{number}") for number in range(8)]
    alerts = [alert["alert_id"] for alert in _done(http.get("/alerts")).json()["alerts"]]
    assert alerts
    for verb, alert_id in zip(("ack", "resolve"), alerts, strict=False):
        _done(http.post(f"/alerts/{alert_id}/{verb}", json={"by": "somebody"}))
    _done(http.patch(f"/runs/{run_ids[0]}", json={"state": "finished"}))
    silence = {"project": "default", "until": "2999-01-31T12:00:00Z", "created_by": "somebody"}
    silences = [_done(http.post("/silences", json=silence)).json()["silence_id"] for _ in range(4)]
    return {
        "runs": run_ids,
        "doomed": [_filled_run(http, f"doomed-{number}") for number in range(20)],
        "alerts": alerts,
        "silences": silences,
        "rules": ["fuzzed-loss", "fuzzed-tokens", "loss-spike"],
        "metrics": ["loss", "token_similarity", "attention_entropy", "grad_norm", "mine"],
        "projects": ["default"],
        "small": [0, 1, 2],
        "run_cursors": [_done(http.get("/runs", params={"limit": 1})).json()["next_cursor"]],
        "alert_cursors": [_done(http.get("/alerts", params={"limit": 1})).json()["next_cursor"]],
    }


def _filled_run(http, run):
    body = {"run": run, "blocks": ["h.0", "h.1"], "config": {"lr": 0.001}, "tags": ["a"]}
    run_id = _done(http.post("/runs", json=body)).json()["run_id"]
    frames = [_frame(step) for step in range(0, 200, 10)]
    _done(http.post(f"/runs/{run_id}/frames", content=frames_to_body("w", 1, frames)))
    return run_id


def _frame(step):
    similarity = {"token_similarity": Array.of([0.1, 0.5, 0.95])}
    entropy = {"attention_entropy": Array.of([0.1, 0.2, 0.3, float("nan")], (2, 2))}
    return Frame(step, step, 1e9 + step, {"loss": 20.0, "mine": float("inf")}, similarity, entropy).to_json()


def _done(reply):
    assert reply.is_success, reply.text
    return reply


def _configuration(values, token):
    """Half of all ids and names are of something that is there."""
    known = {
        "path.run_id": "runs", "query.run": "runs", "path.alert_id": "alerts", "path.silence_id": "silences",
        "path.name": "rules", "query.rule": "rules", "query.metric": "metrics", "query.project": "projects",
        "query.layer": "small", "query.head": "small", "query.attempt": "small", "body.attempt": "small",
    }  # fmt: skip
    of_routes = {
        "GET /api/v1/runs": ("query.cursor", "run_cursors"),
        "GET /api/v1/alerts": ("query.cursor", "alert_cursors"),
        "DELETE /api/v1/runs/{run_id}": ("path.run_id", "doomed"),  # or there would soon be none of the others
    }
    parts = ['hooks = "hooks.py"', f'[auth.openapi.token]\nbearer = "{token}"']
    parts += [f"[dictionaries.{name}]\nvalues = {json.dumps(listed)}" for name, listed in values.items()]
    parts += ["[checks]\nenabled = false", *(f"{check}.enabled = true" for check in CHECKS)]
    parts += ['negative_data_rejection.expected-statuses = ["4xx"]']  # 413 is none of those that it knows
    parts.append("[parameters]")
    parts += [_bound(where, name) for where, name in known.items()]
    # What one request has deleted is of no use to those that follow.
    parts += [f"[phases.{phase}.extra-data-sources]\nresponses = false" for phase in ("coverage", "fuzzing")]
    for route, (where, name) in of_routes.items():
        parts.append(f'[[operations]]\ninclude-name = "{route}"\n[operations.parameters]\n{_bound(where, name)}')
    # A rule that is deleted is disabled, and its versions are shown; and one may be called `test`.
    for path, check in (("{name}", "use_after_free"), ("test", "allow_header_conformance")):
        parts.append(f'[[operations]]\ninclude-path = "/api/v1/rules/{path}"\nchecks.{check}.enabled = false')
    return "\n".join(parts)


def _bound(where, name):
    return f'"{where}" = {{dictionary = "{name}", probability = 0.6}}'
