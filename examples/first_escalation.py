"""At which step did the last layer's token diversity first fall below 0.1? For each run of a server, as in a notebook.

python examples/first_escalation.py

An editor that knows cells (`# %%`) runs it one by one; `jupytext --to ipynb` makes a notebook of it.
"""

# %% The service
import os

from tsemon_client import Client

METRIC, LEVEL = "token_diversity", 0.1
client = Client(os.environ.get("TSEMON_SERVER", "http://127.0.0.1:8731"))


# %% One run. A bucket has the smallest value of its steps, so none is missed; asked again for what is around it, the service
# gives finer buckets, in the end each sampled step by itself.
def first_below(run_id, metric, level, **span):
    series = client.series(run_id, metric, layer=-1, **span)
    below = next((i for i, value in enumerate(series.min) if value is not None and value < level), None)
    if below is None:
        return None
    around = {"from_step": series.step[max(below - 1, 0)], "to_step": series.step[min(below + 1, len(series.step) - 1)]}
    return series.step[below] if around == span else first_below(run_id, metric, level, **around)


# %% All runs
first = {}
for run in client.runs(order="name"):
    if METRIC in client.run(run.run_id).metrics.layers:
        first[run.run_id] = first_below(run.run_id, METRIC, LEVEL)
        step = first[run.run_id]
        print(f"{run.project}/{run.run}: {'never' if step is None else f'step {step}'}")

fell = {run_id: step for run_id, step in first.items() if step is not None}
print(f"{len(fell)} of {len(first)} runs fell below {LEVEL}")

# %% The first to fall below it, with its heat map where this is a notebook
client.run(min(fell, key=fell.get)) if fell else None
