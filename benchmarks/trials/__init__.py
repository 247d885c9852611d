"""Trainings that fail in known ways and trainings that only look odd, recorded through the monitor and judged."""
