"""Ask a tsemon service about its runs.

from tsemon_client import Client
client = Client("http://127.0.0.1:8731")
run = client.find_run("gpt-82m")
client.series(run.run_id, "token_diversity", layer=-1).to_pandas()
"""

from typing import TYPE_CHECKING

# ruff: noqa: F405  # mypy knows the names of star imports

__all__ = [
    "Alert",
    "AlertChanged",
    "AsyncClient",
    "AsyncFound",
    "Attempt",
    "Client",
    "ComparedRun",
    "Comparison",
    "Connected",
    "Event",
    "Found",
    "Glance",
    "Heatmap",
    "Incident",
    "Latest",
    "Record",
    "Recorded",
    "RecordedFrame",
    "Records",
    "RuleStanding",
    "RuleStandings",
    "RuleVersion",
    "Run",
    "RunChanged",
    "RunDeleted",
    "RunDetail",
    "Series",
    "TagUse",
    "Tried",
    "TriedAlert",
]

if TYPE_CHECKING:
    from tsemon_client.asking import AsyncFound, Found
    from tsemon_client.client import AsyncClient, Client
    from tsemon_client.models import *  # noqa: F403
else:
    # The command line has its commands below this package: `tsemon --help` needs neither httpx nor pydantic.
    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tsemon_client import client, models

        return getattr(client if hasattr(client, name) else models, name)

    def __dir__():
        return sorted({*globals(), *__all__})
