"""Two lines for training loops that are somebody else's: one module for each library, imported only by who has it."""
