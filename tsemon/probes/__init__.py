"""Find blocks, hook them on sampled steps, and reduce what passes by on the device."""

from tsemon.probes.depth import joined, named_stacks
from tsemon.probes.discovery import Block, Found, discover, find_blocks
from tsemon.probes.held import ProbeBatch, check_probe_batch
from tsemon.probes.hooks import Span, ThreadState
from tsemon.probes.layout import Layout, check_layout
from tsemon.probes.losses import PastLosses
from tsemon.probes.packing import OfInputs, check_of_inputs
from tsemon.probes.parameters import why_trains_nothing
from tsemon.probes.probe import Probe
from tsemon.probes.ranks import Asked, Ranks, agree, arrange
from tsemon.probes.reading import OnHost, Reading, Undefined
from tsemon.probes.sequences import Given

__all__ = [
    "Asked",
    "Block",
    "Found",
    "Given",
    "Layout",
    "OfInputs",
    "OnHost",
    "PastLosses",
    "Probe",
    "ProbeBatch",
    "Ranks",
    "Reading",
    "Span",
    "ThreadState",
    "Undefined",
    "agree",
    "arrange",
    "check_layout",
    "check_of_inputs",
    "check_probe_batch",
    "discover",
    "find_blocks",
    "joined",
    "named_stacks",
    "why_trains_nothing",
]
