"""What docs/ says about the service, held against the service."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tsemon.errors import TsemonError
from tsemon.transport.packing import pack_frames
from tsemon.wire import PACKED
from tsemon_server.services.ingest.schemas import FrameBody

from .test_process import Process

DOCS = Path(__file__).parents[2] / "docs"


def is_like(found, shown):
    """Whether `found` is what the document shows, where "..." stands for anything."""
    if isinstance(shown, dict) and isinstance(found, dict):
        return found.keys() == shown.keys() and all(is_like(found[key], shown[key]) for key in shown)
    return shown == "..." or found == shown


@pytest.mark.skipif(shutil.which("curl") is None, reason="the session is written with curl")
class TestTheSessionInWireMd:
    def test_runs_as_it_is_written(self, tmp_path):
        blocks = re.findall(r"```(bash|json)\n(.*?)```", (DOCS / "wire.md").read_text(), re.DOTALL)
        assert [kind for kind, _ in blocks] == ["bash", "json"] * 7
        script = "set -eu\n" + "echo; echo ======\n".join(text for kind, text in blocks if kind == "bash")
        service = Process(f"sqlite:///{tmp_path}/tsemon.db")
        environment = os.environ | {"TSEMON": f"http://127.0.0.1:{service.port}"}
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
        service.stop()
        assert done.stderr == ""
        found = [json.loads(text) for text in done.stdout.split("======")]
        shown = [json.loads(text) for kind, text in blocks if kind == "json"]
        for one, other in zip(found, shown, strict=True):
            assert is_like(one, other), f"{one}\nis not\n{other}"


class TestRestApiMd:
    text = (DOCS / "rest-api.md").read_text()

    def test_has_a_heading_for_each_route(self, api):
        for path, methods in api.http.get("/openapi.json").json()["paths"].items():
            for method in methods:
                heading = f"### {method.upper()} {path.removeprefix('/api/v1')}\n"
                assert heading in self.text

    def test_names_each_parameter(self, api):
        for path, methods in api.http.get("/openapi.json").json()["paths"].items():
            for route in methods.values():
                for parameter in route.get("parameters", []):
                    assert re.search(rf"[`{{]{parameter['name']}[`}}]", self.text), (path, parameter["name"])

    @pytest.mark.parametrize("code", ["invalid_rules", "invalid_document", "name_in_use"])
    def test_has_a_row_for_an_error(self, code):
        assert re.search(rf"^\| 4\d\d \| .*`{code}`.* \| ", self.text, re.MULTILINE)

    @pytest.mark.parametrize("error", TsemonError.__subclasses__(), ids=lambda error: error.code)
    def test_names_each_code_that_the_service_answers(self, error):
        assert (f"`{error.code}`" in self.text) == (error.status != 500)

    @pytest.mark.parametrize(("path", "kind"), [("/runs", "of this name"), ("/alerts", "with this id")])
    def test_goes_with_openapi_on_what_the_filter_by_run_takes(self, api, path, kind):
        parameters = api.http.get("/openapi.json").json()["paths"][f"/api/v1{path}"]["get"]["parameters"]
        (run,) = (parameter for parameter in parameters if parameter["name"] == "run")
        assert kind in run["description"]
        section = self.text.split(f"### GET {path}\n")[1].split("###")[0]
        assert ("`run` (a name" if path == "/runs" else "`run` (a run's id") in section


class TestWireMd:
    def test_shows_one_frame_as_json_and_packed(self, api):
        section = (DOCS / "wire.md").read_text().split("## A packed body\n")[1].split("\n## ")[0]
        (plain, header) = (line.strip() for line in section.splitlines() if line.startswith("    {"))
        (digits,) = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
        packed = bytes.fromhex(digits)
        assert packed == pack_frames("w", 1, [json.dumps(frame) for frame in json.loads(plain)["frames"]])
        assert (packed[:4], packed[8 : 8 + int.from_bytes(packed[4:8], "little")]) == (b"TSF1", header.encode())
        runs = [api.register(name, num_blocks=2) for name in ("plain", "packed")]
        for run_id, body, kind in zip(runs, (plain, packed), ("application/json", PACKED), strict=True):
            assert api.post_raw(run_id, body, **{"Content-Type": kind}).json()["accepted"] == 1
        texts = [api.http.get(f"/api/v1/runs/{run_id}/export").text for run_id in runs]
        assert texts[0].replace(runs[0], runs[1]).replace("plain", "packed") == texts[1]

    def test_names_each_key_of_a_frame(self):
        text = (DOCS / "wire.md").read_text()
        assert [key for key in FrameBody.model_fields if f"| `{key}` |" not in text] == []
