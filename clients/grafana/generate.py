"""Write the dashboards and alert rules that Grafana reads, or, with --check, tell whether they are as the code says.

python clients/grafana/generate.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tsemon_dashboards.alerting import rules
from tsemon_dashboards.compare import compare
from tsemon_dashboards.fleet import fleet
from tsemon_dashboards.health import health
from tsemon_dashboards.run import run

FOLDER = Path(__file__).parent
DASHBOARDS = {"fleet": fleet, "run": run, "compare": compare, "server": health}
HEADER = "# Written by clients/grafana/generate.py from clients/prometheus/rules/alerts.yml; a test compares them.\n"


def files() -> dict[Path, str]:
    """What each file says."""
    dashboards = {
        FOLDER / "dashboards" / f"{name}.json": json.dumps(numbered(make().build()), cls=JSONEncoder, indent=2) + "\n"
        for name, make in DASHBOARDS.items()
    }
    told = yaml.safe_dump(rules(), sort_keys=False, width=10_000, allow_unicode=True)
    return dashboards | {FOLDER / "provisioning/alerting/rules.yaml": HEADER + told}


def numbered(dashboard: Dashboard) -> Dashboard:
    """With an id for each panel, in their order: links and alert rules name panels by it."""
    for number, panel in enumerate(dashboard.panels or [], start=1):
        panel.id_val = number
    return dashboard


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    old = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    if arguments == ["--check"]:
        for path in old:
            print(f"{path.relative_to(FOLDER)} is not what the code says; run python clients/grafana/generate.py")
        return 1 if old else 0
    for path, text in files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
