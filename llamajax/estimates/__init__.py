"""Estimates by arithmetic: parameters, FLOPs, bytes, messages and memory of a run; and figures from GPU data sheets."""
