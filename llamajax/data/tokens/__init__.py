"""Tokens on disk: shards of tokenized documents, and token files of Megatron-LM."""
