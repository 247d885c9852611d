"""The Python client of the tsemon service."""
