"""Weights to start from: other checkpoints and Hugging Face directories, read piece by piece."""
