from __future__ import annotations

import shutil

import pytest

from tests.clients.grafana.watched import watch


@pytest.fixture(scope="session")
def watched(tmp_path_factory):
    """A service with recorded runs, and a Prometheus that scraped it where there is one."""
    yield from watch(tmp_path_factory.mktemp("watched"), with_prometheus=shutil.which("prometheus") is not None)


@pytest.fixture(scope="session")
def prometheus(watched):
    if watched.prometheus is None:
        pytest.skip("Prometheus is not installed; scripts/system_parts.py does it where it can")
    return watched.prometheus


@pytest.fixture(scope="session")
def values(watched):
    """What the variables of the dashboards stand for."""
    return {
        "project": ".*",
        "run": watched.run_ids["tse_vit24-s0"],
        "runs": [*watched.run_ids.values()],
        "measure": "token_diversity",
        "number": "total_grad_norm",
        "layer": "-1",
        "from_step": "",
        "to_step": "",
        "__rate_interval": "1m",
    }
