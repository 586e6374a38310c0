"""What a run needs and how fast it can be, before it runs: figures of the hardware."""
