"""Takes runs and frames from writers: read raw, validated in one step, committed before the reply."""
