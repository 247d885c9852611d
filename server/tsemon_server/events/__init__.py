"""Tells whoever listens what has changed, as it changes."""

from tsemon_server.events.feed import Feed

__all__ = ["Feed"]
