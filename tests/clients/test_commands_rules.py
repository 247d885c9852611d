"""`tsemon rules put`, `disable` and `restore`, and the methods behind them, against a real service."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.command_line import environment, frame, in_this_process, register, send
from tests.serving import served_from
from tsemon.errors import InvalidRules, UnknownRule
from tsemon_client import Client

PAGE = (Path(__file__).parents[2] / "docs/rules.md").read_text()
FILE = "rules:\n  - name: high\n    when: loss > {}\n  - name: low\n    when: loss < 1\n"


@pytest.fixture
def service(tmp_path):
    with served_from(tmp_path / "tsemon.db") as service:
        register(service.url, "vit-80", "vision")
        yield service


@pytest.fixture
def run(service, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    return in_this_process(service, monkeypatch, capsys)


def put(run, bound, *options):
    Path("mine.yaml").write_text(FILE.format(bound))
    return run("rules", "put", "mine.yaml", *options)


class TestPut:
    def test_says_of_each_rule_which_version_it_has_now_and_for_whom(self, run):
        assert put(run, 5) == (0, "high: now version 1, for all projects\nlow: now version 1, for all projects\n", "")
        assert put(run, 6)[1] == "high: now version 2, for all projects\nlow: unchanged version 1, for all projects\n"
        assert put(run, 7, "--project", "vision") == (
            0,
            "high: now version 3, for project vision\nlow: unchanged the server's version 1, for project vision\n",
            "",
        )
        shown = run("rules", "show", "--project", "vision")[1]
        assert re.search(r"^high +project ", shown, re.MULTILINE)
        assert re.search(r"^low +server ", shown, re.MULTILINE)

    def test_notes_a_project_without_runs(self, run):
        code, _, told = put(run, 5, "--project", "visoin")
        assert (code, told) == (0, "note: project visoin has no runs yet; did you mean vision?\n")

    def test_says_in_one_line_that_there_is_no_file(self, run):
        said = "tsemon: none.yaml: the rule file cannot be read: No such file or directory\n"
        assert run("rules", "put", "none.yaml") == (1, "", said)

    def test_refuses_a_file_with_a_mistake_by_its_name_and_line(self, run):
        code, shown, told = put(run, "los")
        assert (code, shown) == (1, "")
        assert told.startswith("tsemon: mine.yaml line 3: rules[0].when: column 8: no metric is named 'los'")


class TestARunThatLacksAMetric:
    @pytest.fixture
    def rules(self, service):
        send(service.url, register(service.url, "mine"), [frame(step, reward=[1.0] * 4) for step in range(0, 100, 10)])
        lines = {
            "reads-layers": "any(grad_norm < 0.1)",
            "misspelled": 'scalar("scor") < 0.1 for 1 sample after 50 steps',
            "of-another-kind": 'scalar("reward") < 0.1 or loss > 1e9',
            "beyond-the-last-layer": "layer(attention_entropy, 99) > 1",
            "known": "loss > 1e9",
            "long-window": "mean(loss, samples=12) > 1 for 1 sample",
            "long-hold": "loss > 1e9 for 12 samples",
        }
        Path("mine.yaml").write_text(json.dumps({"rules": [{"name": n, "when": line} for n, line in lines.items()]}))
        return "mine.yaml"

    @pytest.mark.parametrize("where", ["server", "database"])
    def test_is_told_so_by_replay(self, run, service, rules, where, tmp_path):
        url = {"server": service.url, "database": f"sqlite:///{tmp_path}/tsemon.db"}[where]
        code, shown, _ = run("replay", f"--{where}", url, "--run", "mine", "--rules", rules)
        assert code == 0
        assert shown.splitlines() == [
            "mine: rule reads-layers was never evaluated: the run has no metric with layers 'grad_norm'",
            "mine: rule misspelled was never evaluated: the run has no scalar 'scor'; did you mean scalar(\"score\")?",
            "mine: rule of-another-kind was never evaluated: the run has no scalar 'reward'; "
            'did you mean layers("reward")?',
            "mine: rule beyond-the-last-layer was never evaluated: its condition was unknown in all 10 frames: a layer is "
            "missing, or it needs 3 more samples with attention_entropy whose values are all defined and 10 more steps",
            "mine: rule long-window was never evaluated: its condition was unknown in all 10 frames: a layer is missing, or "
            "it needs 2 more samples with loss",
            "rules that could not fire on some of these runs: long-hold needs 2 more samples",
            "runs: 1, with incidents: 0; frames: 10; incidents: 0; alerts: 0",
        ]

    def test_is_told_so_in_json(self, run, service, rules):
        (found,) = json.loads(run("replay", "--server", service.url, "--run", "mine", "--rules", rules, "--json")[1])
        lacks = {one["rule"]: one["lacks"] for one in found["not_judged"]}
        assert lacks["misspelled"] == [{"kind": "scalar", "name": "scor", "nearest": 'scalar("score")'}]
        assert lacks["beyond-the-last-layer"] == []
        assert "known" not in lacks
        waits = {one["rule"]: one["waits_for"] for one in found["not_judged"]}
        assert waits["long-window"] == "2 more samples with loss"
        assert [*map(bool, waits.values())] == [not each for each in lacks.values()]  # each has one reason
        assert found["waiting"] == [{"rule": "long-hold", "waits_for": "2 more samples"}]

    def test_is_told_so_before_by_check(self, run, rules):
        shown = run("rules", "check", rules, "--run", "mine")[1]
        assert "note: rule misspelled: the run has no scalar 'scor'; did you mean scalar(\"score\")?" in shown
        assert "rule known" not in shown

    def test_is_told_of_built_in_rules_in_one_line(self, run, service, rules):
        shown = run("replay", "--server", service.url, "--run", "mine")[1]
        assert re.search(r"^rules that were never evaluated on some of these runs: \d+; ", shown, re.MULTILINE)


class TestDisableAndRestore:
    def test_say_what_the_rule_is_now(self, run):
        assert run("rules", "disable", "loss-spike")[1] == "loss-spike: now version 2 (disabled), for all projects\n"
        assert (
            run("rules", "disable", "loss-spike")[1] == "loss-spike: unchanged version 2 (disabled), for all projects\n"
        )
        assert run("rules", "restore", "loss-spike")[1] == "loss-spike: now version 3, for all projects\n"

    def test_are_of_a_project(self, run):
        of_vision = ("loss-spike", "--project", "vision")
        assert run("rules", "disable", *of_vision)[1] == "loss-spike: now version 2 (disabled), for project vision\n"
        said = "loss-spike: now the server's version 1, for project vision\n"
        assert run("rules", "restore", *of_vision)[1] == said

    def test_name_the_nearest_rule(self, run):
        for command in ("disable", "restore"):
            code, _, told = run("rules", command, "loss-spik")
            assert (code, told) == (2, "tsemon: no rule is named 'loss-spik'; did you mean 'loss-spike'?\n")
        put(run, 5)
        assert "'high' is not a built-in rule" in run("rules", "restore", "high")[2]


class TestTheClient:
    def test_changes_rules(self, service):
        with Client(service.url) as client:
            assert {one.name: one.version for one in client.put_rules(FILE.format(5))}["high"] == 1
            assert client.put_rules(FILE.format(6), project="vision")[0].family
            assert [(one.project, one.version) for one in client.rule("high", "vision")] == [("vision", 2), (None, 1)]
            assert not client.disable_rule("high")[0].enabled
            assert client.restore_rule("high", project="vision")[0].project is None
            with pytest.raises(InvalidRules, match="no metric is named"):
                client.put_rules(FILE.format("los"))
            with pytest.raises(UnknownRule, match="did you mean 'high'"):
                client.disable_rule("hihg")


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page shows curl, too")
class TestTheCommandsInRulesMd:
    def test_run_in_their_order_as_they_are_printed(self, service, tmp_path):
        [file] = re.findall(r"<!-- rules:start -->\n```yaml\n(.*?)```\n<!-- rules:end -->", PAGE, re.DOTALL)
        (tmp_path / "mine.yaml").write_text(file)
        blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
        assert len(blocks) >= 3
        script = f'set -eu\ntsemon() {{ "{sys.executable}" -m tsemon "$@"; }}\n' + "".join(blocks)
        given = environment(service) | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        done = subprocess.run(
            ["bash", "-c", script.replace("http://127.0.0.1:8731", service.url)],
            cwd=tmp_path,
            env=given,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "entropy-of-a-layer-is-low: now version 1, for all projects" in done.stdout
        assert '"error"' not in done.stdout
