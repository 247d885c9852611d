"""The command line, and readers of checkpoints and of other tools' runs. The guest never imports it."""
