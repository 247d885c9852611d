"""Answers questions about what is stored."""

from tsemon_server.queries.routes import make_router

__all__ = ["make_router"]
