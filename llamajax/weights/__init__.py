"""Reads initial weights piece by piece from other checkpoints and Hugging Face directories."""
