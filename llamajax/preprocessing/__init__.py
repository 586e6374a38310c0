"""Sources to tokenized shards and packings ahead of a run, by many processes."""
