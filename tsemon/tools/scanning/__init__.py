"""Computes from a folder of checkpoints what a run would have kept of its parameters: see docs/scan.md."""

from tsemon.tools.scanning.scanner import Record, Scanner

__all__ = ["Record", "Scanner"]
