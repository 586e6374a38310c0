"""Checks of a machine for training, each with the remedy of its problem; jax runs in a process of its own."""
