"""Grafana's dashboards and alert rules for tsemon, as code. `python clients/grafana/generate.py` writes the files."""
