"""One optimizer step as a pure function, and its compilation."""
