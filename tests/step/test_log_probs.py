"""Log-probabilities of targets, in chunks of a split vocabulary, against the plain formula: values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.zero import gathered, weight
from llamajax.step import loss
from llamajax.step.batch import IGNORE
from llamajax.step.log_probs import target_log_probs

B, T, D, V = 4, 6, 8, 32


def plain(hidden: Any, head: Any, targets: np.ndarray) -> jax.Array:
    """The definition, on one device, with every logit at once."""
    found = jax.nn.log_softmax(jnp.einsum("BTD,VD->BTV", hidden, head))
    return jnp.where(targets != IGNORE, jnp.take_along_axis(found, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0], 0.0)


@pytest.mark.parametrize("axes", [MeshConfig(fsdp=2, sequence=2, tensor=2), MeshConfig(data=2, tensor=4)])
def test_values_and_gradients_are_those_of_the_definition(axes, monkeypatch):
    """Every token has a weight of its own in what is differentiated, as answers have."""
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((B, T, D), np.float32), rng.standard_normal((V, D), np.float32)
    targets = rng.integers(0, V, (B, T), np.int32)
    targets[0, :3] = targets[3, 5] = IGNORE
    weights = rng.standard_normal((B, T), np.float32)
    monkeypatch.setattr(loss, "MAX_CHUNK_LOGITS", 2 * V)

    def of_plain(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return jnp.sum(weights * plain(hidden, head, targets))

    expected, d_expected = jax.value_and_grad(of_plain, (0, 1))(hidden, head)
    with jax.set_mesh(mesh.make_mesh(axes)):
        given = jax.device_put(weights, spec("batch", "seq")), jax.device_put(targets, spec("batch", "seq"))

        def ours(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
            lies = {"stored": ("vocab", "embed"), "compute": ("vocab", None)}
            stored = weight(head.shape, head.dtype, **lies, init=lambda *_, out_sharding: head)
            found: Any = target_log_probs(hidden, gathered(stored, hidden.dtype)[...], given[1], V)
            return jnp.sum(given[0] * found), found

        placed = jax.device_put(hidden, spec("batch", "seq", None)), jax.device_put(head, spec("vocab", "embed"))
        (total, found), gradients = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(*placed)
    np.testing.assert_allclose(found, plain(hidden, head, targets), atol=1e-5)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    for gradient, wanted in zip(gradients, d_expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, atol=1e-5)
