"""Models of other programs to llamajax checkpoints and back."""
