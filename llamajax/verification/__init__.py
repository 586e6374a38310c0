"""Checks on emulated devices that a run's mesh and forms compute the same numbers as one device."""
