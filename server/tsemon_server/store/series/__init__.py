"""Frames: hot ones in a row each, settled ones in chunks."""
