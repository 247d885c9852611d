"""Ask the service: over all runs, at which step did the last block's token similarity first pass 0.9?

python examples/query_runs.py
"""

import os

from tsemon_client import Client

with Client(os.environ.get("TSEMON_SERVER", "http://127.0.0.1:8731")) as client:
    for run in client.runs(order="name"):
        if "token_similarity" not in client.run(run["run_id"])["metrics"]["layers"]:
            continue
        series = client.series(run["run_id"], "token_similarity", layer=-1)
        pairs = zip(series["step"], series["max"], strict=True)
        first = next((step for step, value in pairs if value is not None and value > 0.9), None)
        print(f"{run['project']}/{run['run']}: {'never' if first is None else f'step {first}'}")
