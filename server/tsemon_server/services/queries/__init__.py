"""Answers questions about what is stored."""

from tsemon_server.services.queries.routes import make_router

__all__ = ["make_router"]
