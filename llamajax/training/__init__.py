"""Runs training from start to end."""
