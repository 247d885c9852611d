"""`tsemon runs`, `series`, `incidents`, `alerts` and `tail`.

A command imports inside itself all that it needs beyond the command line.
"""
