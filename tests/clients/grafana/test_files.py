"""The files themselves, without anything that runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.alerting import Rule
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.clients.grafana.dashboards import DASHBOARDS, FOLDER, RULES, panels, provisioned, queries

register_default_plugins()


def again(kind, told):
    """The JSON after a way through the SDK's model, which drops keys that it does not know."""
    return json.loads(json.dumps(kind.from_json(told), cls=JSONEncoder))


class TestTheGeneratedFiles:
    def test_are_what_the_code_says(self):
        done = subprocess.run([sys.executable, FOLDER / "generate.py", "--check"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_are_told_apart_from_what_the_code_says(self, tmp_path):
        for path in [*FOLDER.rglob("*.py"), *FOLDER.rglob("*.json"), *FOLDER.rglob("*.yaml")]:
            copy = tmp_path / path.relative_to(FOLDER)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(
                path.read_text().replace('"Loss"', '"Loss of heart"') if copy.suffix == ".json" else path.read_text()
            )
        done = subprocess.run([sys.executable, tmp_path / "generate.py", "--check"], capture_output=True, text=True)
        assert done.returncode == 1
        assert "dashboards/run.json is not what the code says" in done.stdout


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
    def test_test_a_query_against_a_bound(self, rule):
        query, threshold = rule["data"]
        assert (query["datasourceUid"], query["model"]["instant"]) == ("tsemon-prometheus", True)
        assert (threshold["datasourceUid"], threshold["model"]["type"]) == ("__expr__", "threshold")
        assert threshold["model"]["expression"] == query["refId"] == query["model"]["refId"]
        assert rule["condition"] == threshold["refId"] == threshold["model"]["refId"]

    def test_have_names_of_their_own(self):
        for key in ("uid", "title"):
            assert len({rule[key] for rule in RULES}) == len(RULES) == 9

    def test_are_quiet_where_runs_have_gone_but_not_where_the_service_has(self):
        assert {rule["title"]: rule["noDataState"] for rule in RULES if rule["noDataState"] != "OK"} == {
            "TsemonDown": "Alerting"
        }

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
        """In rules `$labels` would become nothing, because the environment has no such variable."""
        known = {"TSEMON_URL", "TSEMON_PROMETHEUS_URL", "TSEMON_ALERTMANAGER_URL", "TSEMON_GRAFANA_WEBHOOK", "__file"}
        assert {*re.findall(r"\$\{?(\w+)", TEXTS[path])} <= known
