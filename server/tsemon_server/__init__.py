"""The tsemon service."""
