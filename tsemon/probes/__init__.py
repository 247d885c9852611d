"""Find blocks, hook them on sampled steps, and reduce what passes by on the device."""

from tsemon.probes.discovery import Block, find_blocks
from tsemon.probes.probe import Probe, Reading

__all__ = ["Block", "Probe", "Reading", "find_blocks"]
