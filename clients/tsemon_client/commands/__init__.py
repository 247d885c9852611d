"""`tsemon runs`, `series`, `incidents`, `alerts` and `tail`.

What a command needs beyond the command line is imported inside it."""
