"""Text to batches: sources -> tokenizer -> shards (cached) -> packing -> order -> loader."""
