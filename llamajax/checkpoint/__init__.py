"""A run's states on the disk: written by all processes at once, whole or not at all, and never believed when damaged."""
