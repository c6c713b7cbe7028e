"""Traces: capturing them with the profiler, merging them, and reading what they say about gaps between steps."""
