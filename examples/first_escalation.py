"""At which step did the last layer's token similarity first pass 0.9? Of every run of a service, as a notebook would ask.

python examples/first_escalation.py

An editor that knows cells (`# %%`) runs it one by one; `jupytext --to ipynb` makes a notebook of it.
"""

# %% The service
import os

from tsemon_client import Client

METRIC, LEVEL = "token_similarity", 0.9
client = Client(os.environ.get("TSEMON_SERVER", "http://127.0.0.1:8731"))


# %% One run. A bucket has the largest value of its steps, so none is missed; asked again for what is around it, the service
# gives finer buckets, in the end each sampled step by itself.
def first_above(run_id, metric, level, **span):
    series = client.series(run_id, metric, layer=-1, **span)
    above = next((i for i, value in enumerate(series.max) if value is not None and value > level), None)
    if above is None:
        return None
    around = {"from_step": series.step[max(above - 1, 0)], "to_step": series.step[min(above + 1, len(series.step) - 1)]}
    return series.step[above] if around == span else first_above(run_id, metric, level, **around)


# %% All runs
first = {}
for run in client.runs(order="name"):
    if METRIC in client.run(run.run_id).metrics.layers:
        first[run.run_id] = first_above(run.run_id, METRIC, LEVEL)
        step = first[run.run_id]
        print(f"{run.project}/{run.run}: {'never' if step is None else f'step {step}'}")

passed = {run_id: step for run_id, step in first.items() if step is not None}
print(f"{len(passed)} of {len(first)} runs passed {LEVEL}")

# %% The first to pass it, with its heat map where this is a notebook
client.run(min(passed, key=passed.get)) if passed else None
