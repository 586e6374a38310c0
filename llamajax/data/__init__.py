"""Turns text into batches: sources -> tokenizer -> shards (cached) -> packing -> order -> loader."""
