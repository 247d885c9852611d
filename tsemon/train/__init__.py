"""Data, settings and the training loop of the demo."""
