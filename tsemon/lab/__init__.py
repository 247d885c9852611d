"""Trains and studies reference models: training, the papers' experiments, and the demo. The guest never imports it."""
