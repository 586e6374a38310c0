"""Predicts a run before it is paid for: its memory, time and price on GPUs that this machine does not have."""
