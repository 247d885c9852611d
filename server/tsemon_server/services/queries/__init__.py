"""Answers questions about what is stored."""
