"""The files themselves, without anything that runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.alerting import Rule
from grafana_foundation_sdk.models.dashboard import Dashboard

from scripts.healthy_band import FILE
from tests.clients.grafana.dashboards import DASHBOARDS, FOLDER, RULES, panels, provisioned, queries

CLIENTS = FOLDER.parent

register_default_plugins()


def again(kind, told):
    """The JSON after a way through the SDK's model, which drops keys that it does not know."""
    return json.loads(json.dumps(kind.from_json(told), cls=JSONEncoder))


class TestTheGeneratedFiles:
    def test_are_what_the_code_says(self):
        done = subprocess.run([sys.executable, FOLDER / "generate.py", "--check"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_are_told_apart_from_what_the_code_says(self, tmp_path):
        shutil.copytree(CLIENTS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tsemon_client"))
        for changed, old, new in (
            ("grafana/dashboards/run.json", '"Loss"', '"Loss of heart"'),
            ("prometheus/rules/alerts.yml", "> 300", "> 299"),
        ):
            path = tmp_path / changed
            path.write_text(path.read_text().replace(old, new))
        generate = [sys.executable, tmp_path / "grafana/generate.py", "--check"]
        done = subprocess.run(generate, capture_output=True, text=True)
        assert done.returncode == 1
        for name in ("dashboards/run.json", "provisioning/alerting/rules.yaml"):
            assert f"{name} is not what the code says" in done.stdout


@pytest.mark.parametrize("name", DASHBOARDS)
class TestEachDashboard:
    def test_is_all_known_to_the_sdk(self, name):
        assert again(Dashboard, DASHBOARDS[name]) == DASHBOARDS[name]

    def test_has_a_uid_of_its_own_and_numbered_panels(self, name):
        assert sum(other["uid"] == DASHBOARDS[name]["uid"] for other in DASHBOARDS.values()) == 1
        ids = [panel["id"] for panel in DASHBOARDS[name]["panels"]]
        assert ids == [*range(1, len(ids) + 1)]

    def test_asks_data_sources_that_are_provisioned(self, name):
        there = {(source["type"], source["uid"]) for source in provisioned("datasources/tsemon.yaml")["datasources"]}
        asked = {(found["type"], found["uid"]) for found in found_in(DASHBOARDS[name], "datasource")}
        assert asked <= there

    def test_links_to_dashboards_and_variables_that_there_are(self, name):
        variables = {
            dashboard["uid"]: {variable["name"] for variable in dashboard["templating"].get("list", [])}
            for dashboard in DASHBOARDS.values()
        }
        for url in [
            link["url"] for links in found_in(DASHBOARDS[name], "value") if isinstance(links, list) for link in links
        ]:
            uid, variable = re.match(r"/d/([\w-]+)\?var-(\w+)=", url).groups()
            assert variable in variables[uid]

    def test_names_only_variables_that_it_has(self, name):
        has = {variable["name"] for variable in DASHBOARDS[name]["templating"].get("list", [])}
        named = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARDS[name])))
        assert named - has <= {"__rate_interval", "__data", "__all"}

    def test_shows_token_diversity_in_place_of_raw_token_similarity(self, name):
        assert "token_similarity" not in json.dumps(DASHBOARDS[name])

    def test_shows_the_range_of_healthy_runs_behind_token_diversity(self, name):
        low = min(json.loads(FILE.read_text())["token_diversity"]["low"])
        for panel in panels(name):
            defaults = panel["fieldConfig"]["defaults"]
            is_drawn = defaults.get("custom", {}).get("thresholdsStyle") == {"mode": "area"}
            assert is_drawn == panel["title"].startswith("Token diversity")
            assert not is_drawn or [step["value"] for step in defaults["thresholds"]["steps"]] == [None, low]

    def test_has_one_query_of_each_letter_in_a_panel(self, name):
        for panel in panels(name):
            letters = [target["refId"] for target in panel["targets"]]
            assert letters == [*"ABCDEF"[: len(letters)]]


def found_in(told, key):
    """All values of the key, wherever they are."""
    if isinstance(told, dict):
        for name, value in told.items():
            if name == key:
                yield value
            yield from found_in(value, key)
    elif isinstance(told, list):
        for value in told:
            yield from found_in(value, key)


def test_there_is_a_query_of_each_kind():
    assert {query.is_of_prometheus for query in queries()} == {True, False}


class TestTheAlertRules:
    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["title"])
    def test_are_all_known_to_the_sdk(self, rule):
        placed = rule | {"folderUID": "tsemon", "ruleGroup": "tsemon", "orgID": 1}
        assert again(Rule, placed) == placed

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["title"])
    def test_test_whether_a_query_is_above_zero(self, rule):
        query, threshold = rule["data"]
        assert (query["datasourceUid"], query["model"]["instant"]) == ("tsemon-prometheus", True)
        assert (threshold["datasourceUid"], threshold["model"]["type"]) == ("__expr__", "threshold")
        assert threshold["model"]["expression"] == query["refId"] == query["model"]["refId"]
        assert rule["condition"] == threshold["refId"] == threshold["model"]["refId"]
        (condition,) = threshold["model"]["conditions"]
        assert condition["evaluator"] == {"type": "gt", "params": [0.0]}

    def test_are_those_of_prometheus(self):
        (group,) = yaml.safe_load((CLIENTS / "prometheus/rules/alerts.yml").read_text())["groups"]
        own = [
            (alert["alert"], alert["expr"].split(), alert.get("for", "0s"), alert.get("labels", {}))
            for alert in group["rules"]
        ]
        told = [
            (rule["title"], rule["data"][0]["model"]["expr"].split(), rule["for"], rule["labels"]) for rule in RULES
        ]
        assert told == own

    def test_have_ids_of_their_own(self):
        assert len({rule["uid"] for rule in RULES}) == len(RULES)

    def test_are_quiet_where_runs_have_gone(self):
        assert {rule["noDataState"] for rule in RULES} == {"OK"}

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["title"])
    def test_link_to_the_run_or_else_to_the_server(self, rule):
        uid, variable = re.fullmatch(
            r"{{ externalURL }}d/([\w-]+)(?:\?var-(\w+)={{ \.Labels\.run_id }})?", rule["annotations"]["dashboard"]
        ).groups()
        (dashboard,) = (dashboard for dashboard in DASHBOARDS.values() if dashboard["uid"] == uid)
        variables = {variable["name"] for variable in dashboard["templating"].get("list", [])}
        assert (variable in variables) == ("run_id" in rule["data"][0]["model"]["expr"])

    def test_say_who_is_told_of_points_that_there_are(self):
        points = {point["name"] for point in provisioned("alerting/contact-points.yaml")["contactPoints"]}
        (tree,) = provisioned("alerting/policies.yaml")["policies"]
        assert {tree["receiver"], *(route["receiver"] for route in tree["routes"])} == points


TEXTS = {path: re.sub(r"#.*", "", path.read_text()) for path in sorted(FOLDER.glob("provisioning/*/*.yaml"))}
"""Without their comments."""


class TestProvisioning:
    def test_reads_dashboards_from_the_folder_that_the_readme_names(self):
        (provider,) = provisioned("dashboards/tsemon.yaml")["providers"]
        assert provider["options"]["path"] in (FOLDER / "README.md").read_text().replace("tsemon/`", "tsemon`")

    def test_takes_addresses_from_variables_that_the_readme_names(self):
        readme = (FOLDER / "README.md").read_text()
        for path, text in TEXTS.items():
            for name in re.findall(r"\$(\w+)", text):
                assert name == "__file" or f"| `{name}` |" in readme
            assert not re.search("https?://", text), f"{path} has an address"

    def test_has_no_secret(self):
        (rest,) = (one for one in provisioned("datasources/tsemon.yaml")["datasources"] if one["uid"] == "tsemon-rest")
        assert rest["secureJsonData"] == {"bearerToken": "$__file{/run/secrets/tsemon_read_token}"}
        for path, text in TEXTS.items():
            assert not re.search(r"(?i)(password|secret|token|credentials)\w*: *[^$\s{]", text), path

    @pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
    def test_has_no_dollar_that_grafana_would_take_for_a_variable(self, path):
        """In labels, and in some versions in annotations, `$labels` becomes what the environment has under this name."""
        known = {"TSEMON_URL", "TSEMON_PROMETHEUS_URL", "TSEMON_ALERTMANAGER_URL", "TSEMON_GRAFANA_WEBHOOK", "__file"}
        assert {*re.findall(r"\$\{?(\w+)", TEXTS[path])} <= known
