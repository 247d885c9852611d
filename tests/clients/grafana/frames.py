"""Replies as the frames that Grafana's data sources make of them, and Grafana's transformations on these, in Node."""

from __future__ import annotations

import datetime
import json
import math
import shutil
import subprocess
from pathlib import Path

NODE = Path(__file__).parent / "node"


def frame_of_rows(query, rows):
    """As Infinity's backend parser does: a field for each column, in the order of their names, not of the query."""
    return {
        "refId": query["refId"],
        "fields": [
            {
                "name": column["text"],
                "type": {"timestamp": "time"}.get(column["type"], column["type"]),
                "values": [value_at(row, column) for row in rows],
            }
            for column in sorted(query["columns"], key=lambda column: column["text"])
        ],
    }


def value_at(row, column):
    for key in column["selector"].split("."):
        row = row[key]
    if column["type"] == "timestamp" and row is not None:
        return datetime.datetime.fromisoformat(row).timestamp() * 1000
    return row


def frames_of_tables(answers):
    """As Grafana does with the format `table`: time, labels by name, and the value, with its letter if there are several."""
    return [frame_of_table(ref_id, series, len(answers) > 1) for ref_id, series in answers.items() if series]


def frame_of_table(ref_id, series, is_one_of_several):
    labels = sorted({label for one in series for label in one["metric"]})
    rows = [(one["metric"], *point) for one in series for point in one.get("values", [one.get("value")])]
    fields = [{"name": "Time", "type": "time", "values": [1000 * time for _, time, _ in rows]}]
    fields += [
        {"name": label, "type": "string", "values": [metric.get(label, "") for metric, _, _ in rows]}
        for label in labels
    ]
    # JSON has no NaN; null is what a panel makes of it.
    values = [None if math.isnan(float(value)) else float(value) for _, _, value in rows]
    name = f"Value #{ref_id}" if is_one_of_several else "Value"
    return {"refId": ref_id, "fields": [*fields, {"name": name, "type": "number", "values": values}]}


def packages_missing():
    """What keeps Grafana's packages for Node from being here, or None. Installs them once, as they are locked."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "node and npm are not installed"
    lock, mark = NODE / "package-lock.json", NODE / "node_modules/.installed"
    if mark.exists() and mark.read_text() == lock.read_text():
        return None
    install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-timeout=20000", "--fetch-retries=1"]
    try:
        done = subprocess.run(install, cwd=NODE, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return f"`{' '.join(install)}` took too long in {NODE}"
    if done.returncode != 0:
        return f"`{' '.join(install)}` failed in {NODE}: {done.stderr.strip()[-300:]}"
    mark.write_text(lock.read_text())
    return None


class Transformations:
    """Grafana's own, in a process of Node, which is started once: it takes a second to load them."""

    def __init__(self):
        self._node = subprocess.Popen(
            ["node", "transform.cjs"], cwd=NODE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def applied(self, frames, transformations):
        """The frames that come out, as lists of fields."""
        self._node.stdin.write(json.dumps({"frames": frames, "transformations": transformations}) + "\n")
        self._node.stdin.flush()
        line = self._node.stdout.readline()
        assert line, "Node has ended; it says above why"
        return json.loads(line)

    def close(self):
        self._node.communicate()
