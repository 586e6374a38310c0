"""One optimizer step as a pure function, and how it is compiled."""
