"""Measures a run, shows its progress, and keeps its records."""
