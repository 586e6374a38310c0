"""The mesh axes."""

AXES = ("pipeline", "data", "expert", "fsdp", "sequence", "tensor")
"""Mesh axes, outer to inner: the more an axis communicates, the closer its devices lie. All always exist."""
