"""What keeps this machine from training, and the remedy of each problem; starts no jax in its own process."""
