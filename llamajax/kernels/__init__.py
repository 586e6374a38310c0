"""Attention behind one door: the plain form, and kernels that do in one pass what XLA would do in many."""
