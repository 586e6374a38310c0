"""What a run takes, by arithmetic: parameters, FLOPs, bytes, messages and memory; figures of GPUs."""
