"""tsemon looks inside a transformer while it trains."""

__version__ = "0.1.0"
