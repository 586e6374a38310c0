"""The chunked, vocabulary-sharded loss against the plain formula: values, gradients, what is counted, what is alive."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.zero import PreparedWeights, gathered, weight
from llamajax.step import loss
from llamajax.step.batch import FIELDS, IGNORE
from llamajax.step.loss import LossSums, token_losses
from llamajax.step.state import abstract_state
from tests.tiny import tiny_config

B, T, D, V = 4, 6, 8, 32
MESHES = [MeshConfig(fsdp=2, sequence=2, tensor=2), MeshConfig(data=2, tensor=4), MeshConfig(data=2, fsdp=2, sequence=2)]


def _inputs(dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    targets[0, :3] = targets[3, 5] = IGNORE
    return (
        jax.device_put(jnp.asarray(rng.standard_normal((B, T, D)), dtype), spec("batch", "seq", None)),
        jax.device_put(rng.standard_normal((V, D)).astype(np.float32), spec("vocab", "embed")),
        jax.device_put(targets, spec("batch", "seq")),
    )


def _losses(hidden: jax.Array, head: jax.Array, targets: jax.Array, z_loss_weight: float) -> LossSums:
    """`token_losses` of a head as it is stored."""
    param = weight(
        head.shape, head.dtype, stored=("vocab", "embed"), compute=("vocab", None), init=lambda *_, out_sharding: head
    )
    return token_losses(hidden, gathered(param, hidden.dtype)[...], targets, z_loss_weight, V)


def _plain(hidden: jax.Array, weight: jax.Array, targets: jax.Array, z_loss_weight: float) -> LossSums:
    """The definition, on one device, with every logit at once."""
    counted = targets != IGNORE
    logits = jnp.einsum("BTD,VD->BTV", hidden, weight)
    lse = jax.nn.logsumexp(logits, axis=-1)
    target_logits = jnp.take_along_axis(logits, jnp.where(counted, targets, 0)[:, :, None], axis=-1)[:, :, 0]
    cross_entropy = jnp.sum(counted * (lse - target_logits))
    return LossSums(cross_entropy + z_loss_weight * jnp.sum(counted * lse**2), cross_entropy, jnp.sum(counted))


def _value_and_gradients(function, *inputs, z_loss_weight: float):
    def scaled(hidden: jax.Array, weight: jax.Array):
        sums = function(hidden, weight, inputs[2], z_loss_weight)
        return 3 * sums.loss, sums  # a cotangent that is not 1

    (_, sums), gradients = jax.jit(jax.value_and_grad(scaled, (0, 1), has_aux=True))(*inputs[:2])
    return sums, gradients


def _assert_equals_plain(z_loss_weight: float) -> None:
    inputs = _inputs()
    sums, gradients = _value_and_gradients(_losses, *inputs, z_loss_weight=z_loss_weight)
    on_host = [jnp.asarray(np.asarray(x)) for x in inputs]
    plain_sums, plain_gradients = _value_and_gradients(_plain, *on_host, z_loss_weight=z_loss_weight)
    for ours, plain in zip(sums, plain_sums, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)
    for ours, plain, given in zip(gradients, plain_gradients, inputs[:2], strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)
        assert jax.typeof(ours) == jax.typeof(given)


@pytest.mark.parametrize("axes", MESHES)
def test_sharded_vocabulary_equals_the_plain_formula(axes: MeshConfig):
    jax.set_mesh(mesh.make_mesh(axes))
    _assert_equals_plain(z_loss_weight=0.1)


@pytest.mark.parametrize(("tokens_per_chunk", "axes"), [(1, MESHES[0]), (3, MESHES[0]), (2, MeshConfig(data=4, sequence=2))])
def test_chunks_change_nothing(tokens_per_chunk: int, axes: MeshConfig, monkeypatch: pytest.MonkeyPatch):
    """Chunks of one token, chunks that divide a device's tokens, and (2 of 3) a last chunk that must be filled up."""
    jax.set_mesh(mesh.make_mesh(axes))
    monkeypatch.setattr(loss, "MAX_CHUNK_LOGITS", tokens_per_chunk * V // axes.tensor)
    _assert_equals_plain(z_loss_weight=0.1)


def test_logits_are_never_alive_for_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loss, "MAX_CHUNK_LOGITS", 2 * 16)
    jax.set_mesh(mesh.make_mesh(MESHES[0]))
    inputs = _inputs()
    program = (
        jax.jit(jax.grad(lambda hidden, weight, targets: _losses(hidden, weight, targets, 0.1).loss, (0, 1)))
        .lower(*inputs)
        .as_text()
    )
    assert "tensor<2x16xf32>" in program  # a chunk of 2 tokens, the device's 16 entries of the vocabulary
    for tokens in (6, B * T):
        for vocab in (16, V):
            assert f"tensor<{tokens}x{vocab}xf32>" not in program
    assert "tensor<2x32x" not in program  # no logits gathered over the vocabulary


def test_evaluation_computes_no_gradients():
    jax.set_mesh(mesh.make_mesh(MESHES[0]))
    inputs = _inputs()

    def loss_of(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
        return _losses(hidden, weight, targets, 0.0).loss

    def flops(function: Callable[..., Any]) -> float:
        analysis = jax.jit(function).lower(*inputs).compile().cost_analysis()
        assert analysis is not None
        return analysis["flops"]

    assert flops(loss_of) < 0.5 * flops(jax.grad(loss_of, (0, 1)))  # one matmul, not three


def test_z_loss_by_hand():
    jax.set_mesh(mesh.make_mesh(MESHES[0]))
    hidden, weight, targets = _inputs()
    sums = jax.jit(_losses, static_argnums=3)(jnp.zeros_like(hidden), weight, targets, 0.5)
    assert int(sums.num_counted) == B * T - 4  # all logits are 0, so every token's lse is log V
    np.testing.assert_allclose(sums.cross_entropy, 20 * np.log(V), rtol=1e-6)
    np.testing.assert_allclose(sums.loss, 20 * (np.log(V) + 0.5 * np.log(V) ** 2), rtol=1e-6)
    assert sums.loss.dtype == sums.cross_entropy.dtype == jnp.float32
    assert sums.num_counted.dtype == jnp.int32


def test_nothing_counted_is_zero_not_nan():
    jax.set_mesh(mesh.make_mesh(MESHES[0]))
    hidden, weight, targets = _inputs()
    sums, gradients = _value_and_gradients(_losses, hidden, weight, jnp.full_like(targets, IGNORE), z_loss_weight=0.1)
    assert sums == (0, 0, 0)
    assert all(np.all(np.asarray(gradient) == 0) for gradient in gradients)


def test_large_logits_do_not_overflow():
    jax.set_mesh(mesh.make_mesh(MESHES[0]))
    hidden, weight, targets = _inputs()
    sums, gradients = _value_and_gradients(_losses, 1e3 * hidden, weight, targets, z_loss_weight=0.0)
    assert np.isfinite(sums.loss)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_bf16_head_gradient_is_summed_in_fp32_over_chunks(monkeypatch: pytest.MonkeyPatch):
    jax.set_mesh(mesh.make_mesh(MeshConfig(data=2, tensor=4)))
    inputs = _inputs("bfloat16")
    sums, whole = _value_and_gradients(_losses, *inputs, z_loss_weight=0.0)
    monkeypatch.setattr(loss, "MAX_CHUNK_LOGITS", V // 4)
    chunked_sums, chunked = _value_and_gradients(_losses, *inputs, z_loss_weight=0.0)
    np.testing.assert_allclose(sums.loss, chunked_sums.loss, rtol=1e-6)
    assert whole[0].dtype == jnp.bfloat16
    assert whole[1].dtype == jnp.float32
    np.testing.assert_allclose(whole[1], chunked[1], rtol=2**-7, atol=1e-5)  # one rounding to bf16 apart


def test_the_heads_gradient_is_scattered_before_the_layers_backward_pass_begins():
    """Nothing else would: it is whole until then, and as large as several layers."""
    jax.set_mesh(mesh.make_mesh(MESHES[0]))
    config = tiny_config()
    tokens = jax.NamedSharding(jax.sharding.get_mesh(), spec("batch", "seq"))
    batch = dict.fromkeys(FIELDS, jax.ShapeDtypeStruct((8, 32), jnp.int32, sharding=tokens))
    gradient = jax.grad(lambda model, batch: loss.loss_fn(PreparedWeights(model), batch, z_loss_weight=0.0)[0])
    program = jax.make_jaxpr(gradient)(abstract_state(config).model, batch)
    barriers = [eqn for eqn in program.eqns if eqn.primitive.name == "optimization_barrier"]
    shapes = {(8, 32, config.model.embed_dim), (config.model.vocab_size, config.model.embed_dim)}
    assert any({out.aval.shape for out in eqn.outvars} == shapes for eqn in barriers)
