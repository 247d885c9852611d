"""`tsemon rules` from the command line."""

import json

import httpx
import pytest
from typer.testing import CliRunner

from tests.server.test_rulebook import RULE, YAML
from tests.serving import served_from
from tsemon.errors import UnknownRule
from tsemon.tools.cli import app
from tsemon.wire import API
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load


def run(*arguments):
    return CliRunner().invoke(app, ["rules", *map(str, arguments)])


class TestRulesCheck:
    @pytest.fixture
    def file(self, tmp_path):
        return tmp_path / "mine.yaml"

    def test_names_the_rules_of_a_file(self, file):
        file.write_text(YAML)
        done = run("check", file)
        assert (done.exit_code, done.stdout.splitlines()[0]) == (0, f"{file}: 1 rule: high-loss")

    def test_shows_the_line_that_says_the_same_as_a_tree(self, file):
        file.write_text(YAML)
        assert run("check", file).stdout.splitlines()[1:] == [
            f"{file}: note: rule high-loss can have 'when' in one line: loss > 10"
        ]
        file.write_text("rules: [{name: high-loss, when: loss > 10}]")
        assert run("check", file).stdout == f"{file}: 1 rule: high-loss\n"

    def test_tells_the_line_and_the_column_of_what_is_wrong_in_a_condition(self, file):
        file.write_text("rules:\n  - name: high-loss\n    when: lss > 10 for 3 samples\n")
        done = run("check", file)
        assert done.exit_code == 1
        first, *below = done.stderr.splitlines()
        assert first.startswith(f"tsemon: {file} line 3: rules[0].when: column 1: no metric is named 'lss'")
        assert below == ["    lss > 10 for 3 samples", "    ^"]

    def test_refuses_rules_that_cost_too_much(self, file):
        file.write_text("rules: [{name: dear, when: 'any(z_score(grad_norm, 900) > 1)'}]")
        done = run("check", file)
        assert done.exit_code == 1
        assert "this rule needs an estimated 6.44 ms of CPU time for each frame, and may need 0.5 ms" in done.stderr

    def test_notes_layers_that_tsemon_does_not_measure_wherever_the_rule_reads_them(self, file):
        only_while = "    only_while: {value: [{layers: grad_nrm}, {layers: max}], above: 0}\n"
        file.write_text(YAML + only_while)
        note = f"{file}: note: rule high-loss reads layers 'grad_nrm', which tsemon does not measure; "
        assert note + "did you mean 'grad_norm'?" in run("check", file).stdout.splitlines()

    def test_tells_the_line_of_what_is_wrong_and_goes_on_with_the_next_file(self, file, tmp_path):
        file.write_text(YAML.replace("severity: critical", "severity: worst"))
        other = tmp_path / "other.json"
        other.write_text(json.dumps({"rules": [RULE]}))
        done = run("check", file, tmp_path / "absent.yaml", other)
        assert done.exit_code == 1
        assert f"tsemon: {file} line 5: rules[0].severity" in done.stderr
        assert "absent.yaml: the rule file cannot be read" in done.stderr
        assert done.stdout.splitlines()[0] == f"{other}: 1 rule: high-loss"
        found = json.loads(run("check", file, other, "--json").stdout)
        assert [one["rules"] for one in found] == [[], ["high-loss"]]
        assert "rules[0].severity" in found[0]["error"]


class TestRulesShow:
    def test_lists_the_built_in_rules(self):
        head, *lines = run("show").stdout.splitlines()
        assert head.split()[:3] == ["rule", "severity", "family"]
        assert [line.split()[:3] for line in lines] == [[rule.name, rule.severity, rule.family] for rule in PACK]
        assert [rule["name"] for rule in json.loads(run("show", "--json").stdout)] == [rule.name for rule in PACK]

    @pytest.mark.parametrize("rule", PACK, ids=lambda rule: rule.name)
    def test_shows_a_rule_as_a_file_that_says_the_same(self, rule):
        assert load(run("show", rule.name).stdout) == (rule,)
        for alias in rule.aliases:
            assert rule in load(run("show", alias).stdout)

    def test_lists_those_that_are_active_in_a_project(self, tmp_path, monkeypatch):
        mine = {"name": "mine", "when": "loss > 10"}
        with served_from(tmp_path / "tsemon.db") as service:
            monkeypatch.setenv("TSEMON_SERVER", service.url)
            for path in ("/rules/mine?project=p", "/rules/loss-spike?project=p"):
                rule = mine if "mine" in path else mine | {"name": "loss-spike"}
                httpx.put(service.url + API + path, content=json.dumps(rule)).raise_for_status()
            httpx.delete(f"{service.url}{API}/rules/loss-stall?project=p").raise_for_status()
            lines = [line.split()[:2] for line in run("show", "--project", "p").stdout.splitlines()[1:]]
            assert {name for name, whose in lines if whose == "project"} == {"mine", "loss-spike"}
            assert {name for name, _ in lines} == {rule.name for rule in PACK} - {"loss-stall"} | {"mine"}
            assert json.loads(run("show", "mine", "--project", "p", "--json").stdout) == [mine]
            assert isinstance(run("show", "mine", "--server", service.url).exception, UnknownRule)
            assert "loss-stall" in run("show", "--server", service.url).stdout

    def test_names_the_nearest_of_a_name_that_is_none(self):
        done = run("show", PACK[0].name[:-1])
        assert isinstance(done.exception, UnknownRule)
        assert PACK[0].name in str(done.exception)
