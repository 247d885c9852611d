"""Tells whoever listens what has changed, as it changes."""

from __future__ import annotations

from tsemon_server.events.feed import Feed
from tsemon_server.events.routes import BEAT_S, make_router

__all__ = ["BEAT_S", "Feed", "make_router"]
