"""Find blocks, hook them on sampled steps, and reduce what passes by on the device."""

from tsemon.probes.discovery import Block, find_blocks
from tsemon.probes.held import ProbeBatch, check_probe_batch
from tsemon.probes.hooks import Span, ThreadState
from tsemon.probes.parameters import why_trains_nothing
from tsemon.probes.probe import Probe
from tsemon.probes.ranks import Ranks, agree, arrange
from tsemon.probes.reading import OnHost, Reading

__all__ = [
    "Block",
    "OnHost",
    "Probe",
    "ProbeBatch",
    "Ranks",
    "Reading",
    "Span",
    "ThreadState",
    "agree",
    "arrange",
    "check_probe_batch",
    "find_blocks",
    "why_trains_nothing",
]
