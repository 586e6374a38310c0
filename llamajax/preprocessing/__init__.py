"""Turns sources into tokenized shards and packings ahead of a run, with many processes."""
