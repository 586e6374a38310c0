"""Generates text with a model."""
