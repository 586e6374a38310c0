"""Kernels that do in one pass what XLA would do in many; each has a plain form beside it that it must agree with."""
