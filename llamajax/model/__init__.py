"""The Llama model: mathematics and logical axis names, without a mesh or a trainer."""

from flax import nnx

# Tree mode: a module is a plain pytree, so jax.vmap, lax.scan, jax.checkpoint and jax.grad accept it directly.
nnx.set_graph_mode(False)
nnx.set_graph_updates(False)

from llamajax.model.llama import Llama  # noqa: E402

__all__ = ["Llama"]
