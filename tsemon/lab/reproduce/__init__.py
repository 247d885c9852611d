"""`tsemon reproduce`: the papers' experiments, measured by tsemon's own probes, and written down beside what they say."""

from tsemon.lab.reproduce.experiments import EXPERIMENTS, MODULES, available
from tsemon.lab.reproduce.running import reproduce, run

__all__ = ["EXPERIMENTS", "MODULES", "available", "reproduce", "run"]
