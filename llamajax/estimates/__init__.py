"""Estimates by arithmetic: parameters, FLOPs, bytes, messages and memory of a run. Data sheets of GPUs."""
