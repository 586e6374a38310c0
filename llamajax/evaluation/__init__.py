"""Measures how good a model is."""
