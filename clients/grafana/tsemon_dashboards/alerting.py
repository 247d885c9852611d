"""Alert rules for Grafana's own alerting, written from the alerts of clients/prometheus, which define them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import alerting, expr
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.alerting import RelativeTimeRange
from grafana_foundation_sdk.models.common import DataSourceRef

from tsemon_dashboards.queries import PROMETHEUS, now

ALERTS = Path(__file__).parents[2] / "prometheus/rules/alerts.yml"
EXPRESSION = DataSourceRef(type_val="__expr__", uid="__expr__")
RANGE = RelativeTimeRange(from_val=600, to=0)
"""The seconds that a query may read. Grafana requires a range, though these queries are instant."""
PLACE = ("folderUID", "ruleGroup", "orgID", "id")
"""Where a rule belongs. A file states this once, for the group."""


def rules() -> dict[str, Any]:
    """The file of rules: one group, evaluated every minute."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found = [in_a_file(built(alert)) for alert in group["rules"]]
    return {
        "apiVersion": 1,
        "groups": [{"orgId": 1, "name": "tsemon", "folder": "tsemon", "interval": "1m", "rules": found}],
    }


def built(alert: dict[str, Any]) -> alerting.Rule:
    """Fires per series that the alert's expression returns, once it has done so for as long as the alert says."""
    about = {name: in_grafana(alert["annotations"][name]) for name in ("summary", "description")}
    page = "tsemon-run?var-run={{ .Labels.run_id }}" if "run_id" in alert["expr"] else "tsemon-server"
    return (
        alerting.Rule(alert["alert"])
        .uid(re.sub(r"(?<!^)(?=[A-Z])", "-", alert["alert"]).lower())
        .folder_uid("tsemon")
        .rule_group("tsemon")
        .org_id(1)
        .condition("B")
        .with_query(asked("A", PROMETHEUS).model(now(" ".join(alert["expr"].split()))))
        .with_query(asked("B", EXPRESSION).model(is_above_zero()))
        .for_val(alert.get("for", "0s"))
        # Without a series nothing is wrong: series vanish when runs end.
        .no_data_state("OK")
        .exec_err_state("Error")
        .labels(alert.get("labels", {}))
        # Grafana's `externalURL` ends in a slash.
        .annotations(about | {"dashboard": "{{ externalURL }}d/" + page})
    )


def in_grafana(template: str) -> str:
    """With Grafana's names for Prometheus's variables, without the `$` that provisioning may expand."""
    return template.replace("$labels", ".Labels").replace("$value", ".Values.A.Value")


def asked(ref_id: str, source: DataSourceRef) -> alerting.Query:
    return alerting.Query(ref_id).datasource_uid(str(source.uid)).relative_time_range(RANGE)


def is_above_zero() -> expr.TypeThreshold:
    """Expression B, on the query A."""
    evaluator = expr.ExprTypeThresholdConditionsEvaluator().type("gt").params([0.0])
    condition = expr.ExprTypeThresholdConditions().evaluator(evaluator)
    return expr.TypeThreshold().ref_id("B").datasource(EXPRESSION).expression("A").conditions([condition])


def in_a_file(rule: alerting.Rule) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(rule.build(), cls=JSONEncoder))
    return {key: value for key, value in told.items() if key not in PLACE}
