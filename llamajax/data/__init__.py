"""Text to batches: sources -> tokenizer -> shards (cached) -> packing -> order -> loader."""

from llamajax.data.dataset import Dataset, prepare

__all__ = ["Dataset", "prepare"]
