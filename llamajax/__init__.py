"""llamajax trains LLaMA-family models with JAX, Flax and XLA."""

__version__ = "0.2.0"
