"""Attention kernels behind one entry point: a plain form, and fused kernels that do in one pass what XLA does in many."""
