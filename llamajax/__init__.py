"""llamajax trains LLaMA-family models with JAX, Flax and XLA."""

import time

__version__ = "0.2.0"

BEGAN = time.monotonic()
"""When the program began, as far as it is this package's."""
