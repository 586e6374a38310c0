"""Checkpoints of a run: all processes write them at once, as a whole or not at all, and damaged ones are never used."""
