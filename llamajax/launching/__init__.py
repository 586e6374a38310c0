"""Starts the processes of a run on a host, watches them from outside, and starts them again when that can help."""
