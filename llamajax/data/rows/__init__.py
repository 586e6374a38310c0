"""Rows: documents split, packed, ordered and loaded as batches."""
