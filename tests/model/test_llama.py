"""The whole model: its parameters, what a token may see, packing, padding, remat, and what collectives carry."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import chex
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.estimates.formulas import weights
from llamajax.model import Llama
from llamajax.parallel import mesh
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.sharding import spec
from llamajax.parallel.zero import PreparedWeights
from llamajax.step.batch import IGNORE
from llamajax.step.loss import loss_fn
from llamajax.verification.differences import largest_entry, relative_difference
from tests.tiny import single_device_mesh

CONFIG = ModelConfig(
    vocab_size=32, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    init_std=0.3, compute_dtype="float32",
)  # fmt: skip
MIXED = MeshConfig(fsdp=2, sequence=2, tensor=2)


def _llama(config: ModelConfig = CONFIG) -> Llama:
    return jax.jit(Llama, static_argnums=0)(config, jax.random.key(0))


def _leaves(tree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_born_sharded_and_as_many_as_the_config_says(tied: bool):
    jax.set_mesh(mesh.make_mesh(MIXED))
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, param_dtype="bfloat16")
    model = jax.jit(Llama, static_argnums=0).eval_shape(config, jax.random.key(0))
    assert {name: leaf.size for name, leaf in named_arrays(model).items()} == weights(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("bfloat16")}
    table = {"embedding.value": spec("vocab", "embed")}
    head = {} if tied else {"head.value": spec("vocab", "embed")}
    assert {path: leaf.sharding.spec for path, leaf in _leaves(model)} == table | head | {
        "final_norm.scale.value": spec(None),
        "layers.attention.wqkv.value": spec(None, "embed", "kv_heads", None, "head_dim"),
        "layers.attention.wo.value": spec(None, "embed", "kv_heads", None, "head_dim"),
        "layers.attention_norm.scale.value": spec(None, None),
        "layers.mlp.w_gate_up.value": spec(None, "embed", None, "mlp"),
        "layers.mlp.w_down.value": spec(None, "embed", "mlp"),
        "layers.mlp_norm.scale.value": spec(None, None),
    }


def test_biases_and_head_norms_are_born_sharded_and_as_many_as_the_config_says():
    jax.set_mesh(mesh.make_mesh(MIXED))
    config = dataclasses.replace(CONFIG, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)
    model = jax.jit(Llama, static_argnums=0).eval_shape(config, jax.random.key(0))
    plain = dict(_leaves(jax.jit(Llama, static_argnums=0).eval_shape(CONFIG, jax.random.key(0))))
    assert {name: leaf.size for name, leaf in named_arrays(model).items()} == weights(config)
    added = {path: (leaf.shape, leaf.sharding.spec) for path, leaf in _leaves(model) if path not in plain}
    assert added == {
        "layers.attention.qkv_bias.value": ((2, 2, 4, 4), spec(None, "kv_heads", None, "head_dim")),
        "layers.attention.output_bias.value": ((2, CONFIG.embed_dim), spec(None, None)),
        "layers.mlp.gate_up_bias.value": ((2, 2, CONFIG.mlp_dim), spec(None, None, "mlp")),
        "layers.mlp.down_bias.value": ((2, CONFIG.embed_dim), spec(None, None)),
        "layers.attention.q_norm.scale.value": ((2, 4), spec(None, None)),
        "layers.attention.k_norm.scale.value": ((2, 4), spec(None, None)),
    }


def test_shapes_need_no_mesh():
    model = _llama()
    with jax.set_mesh(None):
        shapes = Llama.shapes(CONFIG)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, named_arrays(model))


def test_initial_values_do_not_depend_on_the_mesh():
    jax.set_mesh(single_device_mesh())
    alone = dict(_leaves(jax.tree.map(np.asarray, _llama())))
    for axes in (MIXED, MeshConfig(data=2, fsdp=4)):
        jax.set_mesh(mesh.make_mesh(axes))
        for path, leaf in _leaves(_llama()):
            np.testing.assert_array_equal(leaf, alone[path], err_msg=path)
    np.testing.assert_allclose(alone["layers.attention.wqkv.value"].std(), 0.3, rtol=0.1)
    np.testing.assert_allclose(alone["layers.mlp.w_down.value"].std(), 0.15, rtol=0.1)
    assert not np.array_equal(alone["layers.mlp.w_down.value"][0], alone["layers.mlp.w_down.value"][1])


def test_omitted_segments_and_positions_mean_one_document_from_zero():
    jax.set_mesh(mesh.make_mesh(MIXED))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 8)), jnp.int32)
    ones, arange = jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (2, 8))
    omitted, segments, both, shifted = jax.jit(
        lambda model: (model(tokens), model(tokens, ones), model(tokens, ones, arange), model(tokens, ones, 2 * arange))
    )(_llama())
    assert omitted.dtype == jnp.float32
    assert jax.typeof(omitted).sharding.spec == spec("batch", "seq", "vocab")
    np.testing.assert_allclose(omitted, both, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(segments, both, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(shifted) - both).max() > 1e-3


def test_omitted_positions_restart_with_each_document():
    # The logits cannot tell: rotary positions are relative. What differs is the rounding at long positions.
    jax.set_mesh(mesh.make_mesh(MIXED))
    segment_ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0]] * 2, jnp.int32)
    model = jax.jit(Llama, static_argnums=0).eval_shape(CONFIG, jax.random.key(0))
    cos, _, _ = jax.jit(lambda: model._tables_and_masks(jnp.zeros_like(segment_ids), segment_ids, None))()
    np.testing.assert_allclose(cos[:, :, 0], np.cos([[0, 1, 2, 0, 1, 2, 3, 0]] * 2), rtol=1e-6)


@pytest.mark.parametrize(
    ("axes", "window"), [(None, None), (MIXED, None), (MIXED, 2)], ids=["one-device", "mixed", "mixed-window"]
)
def test_a_token_sees_exactly_the_earlier_tokens_of_its_document(axes: MeshConfig | None, window: int | None):
    """Checked by gradient: token t's logits depend on token s's embedding if and only if s may be seen; all else is exactly
    0."""
    if axes is None:
        jax.set_mesh(single_device_mesh())
    else:
        jax.set_mesh(mesh.make_mesh(axes))
    B, T = 2, 8
    tokens = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)  # all different: embedding row = token
    segment_ids = np.array([[1] * T, [1, 1, 1, 2, 2, 2, 2, 0]], np.int32)
    model = _llama(dataclasses.replace(CONFIG, sliding_window=window))

    @jax.jit
    def gradient_norms(model: Llama) -> jax.Array:
        """[T, V]: of the logits at row t of both sequences, with respect to the embedding of each token."""

        def logits_at(embedding: jax.Array) -> jax.Array:
            changed = jax.tree.map(lambda x: x, model)
            changed.embedding[...] = embedding
            logits = changed(tokens, jnp.asarray(segment_ids))
            return jnp.sum(jnp.sin(7 * logits), axis=(0, 2))

        _, backward = jax.vjp(logits_at, model.embedding[...])
        one_hot = jax.reshard(jnp.eye(T, dtype=jnp.float32), spec(None, "seq"))
        return jax.lax.map(lambda row: jnp.sum(jnp.abs(backward(row)[0]), axis=-1), one_hot)

    norms = np.asarray(gradient_norms(model))[:, : B * T].reshape(T, B, T)
    for b in range(B):
        visible = np.tril(segment_ids[b][:, None] == segment_ids[b][None, :])
        if window is not None:  # which every layer looks back through once more
            visible = np.triu(visible, -CONFIG.num_layers * (window - 1))
        np.testing.assert_array_equal(norms[:, b] != 0, visible)


def test_packed_documents_read_as_if_they_were_alone():
    jax.set_mesh(mesh.make_mesh(MIXED))
    packed_tokens = np.random.default_rng(0).integers(0, 32, (2, 8)).astype(np.int32)
    packed_ids = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [0] * 8], np.int32)  # two documents; nothing but padding
    alone_tokens, alone_ids = np.zeros((2, 8), np.int32), np.zeros((2, 8), np.int32)
    alone_tokens[0, :3], alone_ids[0, :3] = packed_tokens[0, :3], 1
    alone_tokens[1, :4], alone_ids[1, :4] = packed_tokens[0, 3:7], 1

    forward, model = jax.jit(lambda model, tokens, segment_ids: model(tokens, segment_ids)), _llama()
    packed = np.asarray(forward(model, packed_tokens, packed_ids))
    alone = np.asarray(forward(model, alone_tokens, alone_ids))
    assert np.isfinite(packed).all()
    np.testing.assert_allclose(packed[0, :3], alone[0, :3], atol=1e-5)
    np.testing.assert_allclose(packed[0, 3:7], alone[1, :4], atol=1e-5)


def _batch(tokens: np.ndarray, targets: np.ndarray, segment_ids: np.ndarray) -> dict[str, np.ndarray]:
    """With positions counted from the start of each segment."""
    starts = np.argmax(segment_ids[:, :, None] == segment_ids[:, None, :], axis=1)
    positions = (np.arange(tokens.shape[1]) - starts).astype(np.int32)
    return {"tokens": tokens, "targets": targets, "segment_ids": segment_ids, "positions": positions}


def test_padding_has_no_gradient_and_never_makes_a_nan():
    jax.set_mesh(mesh.make_mesh(MIXED))
    tokens = np.full((4, 8), 31, np.int32)  # 31 is only ever padding
    tokens[:2, :5] = np.random.default_rng(0).integers(0, 31, (2, 5))
    segment_ids = np.where(tokens == 31, 0, 1).astype(np.int32)  # rows 2 and 3 are nothing but padding
    targets = np.where(segment_ids == 1, 7, IGNORE).astype(np.int32)
    batch = _batch(tokens, targets, segment_ids)

    gradients, (sums, _) = jax.jit(jax.grad(loss_fn, has_aux=True), static_argnames="z_loss_weight")(
        PreparedWeights(_llama()), batch, z_loss_weight=1e-3
    )
    assert sums.num_counted == 10
    for path, gradient in _leaves(gradients.trained):
        assert np.isfinite(gradient).all(), path
    embedding_gradient = np.asarray(gradients.trained.embedding[...])
    assert np.all(embedding_gradient[31] == 0)
    assert np.any(embedding_gradient != 0)


def _drawn(config: ModelConfig) -> Llama:
    """A model on the current mesh whose biases are not zero and norms not one; by numpy, to spare a compilation."""
    rng = np.random.default_rng(4)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        normal = 0.3 * rng.standard_normal(leaf.shape, dtype=np.float32)
        return jax.device_put(normal + ("scale" in jax.tree_util.keystr(path)), leaf.sharding.spec)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda key: Llama(config, key), jax.random.key(0)))


@pytest.mark.parametrize(
    "axes",
    [
        MIXED,
        pytest.param(MeshConfig(sequence=8), marks=pytest.mark.slow),
        *(
            pytest.param(axes, marks=pytest.mark.long)
            for axes in (MeshConfig(data=4, tensor=2), MeshConfig(data=2, sequence=2))
        ),
    ],
)
def test_window_biases_and_head_norms_give_the_same_loss_and_gradients_on_every_mesh(axes: MeshConfig):
    config = dataclasses.replace(CONFIG, sliding_window=3, qkv_bias=True, qk_norm=True)
    segment_ids = np.sort(np.random.default_rng(1).integers(1, 3, (4, 8)), axis=1).astype(np.int32)
    tokens, targets = np.random.default_rng(0).integers(0, 32, (2, 4, 8)).astype(np.int32)
    batch = _batch(tokens, targets, segment_ids)

    def loss_and_gradients() -> tuple[jax.Array, Llama]:
        grad = jax.jit(jax.value_and_grad(loss_fn, has_aux=True), static_argnames=("z_loss_weight", "remat"))
        (loss, _), gradients = grad(PreparedWeights(_drawn(config)), batch, z_loss_weight=0.0, remat=config.remat)
        return loss, gradients.trained

    jax.set_mesh(single_device_mesh())
    loss, gradients = loss_and_gradients()
    jax.set_mesh(mesh.make_mesh(axes))
    loss_on_mesh, gradients_on_mesh = loss_and_gradients()
    np.testing.assert_allclose(loss_on_mesh, loss, rtol=1e-6)
    assert all(np.abs(gradient).max() > 1e-2 for gradient in jax.tree.leaves(gradients))
    for name, ours, truth in zip(
        named_arrays(gradients), jax.tree.leaves(gradients_on_mesh), jax.tree.leaves(gradients), strict=True
    ):
        truth = np.asarray(truth)
        assert relative_difference(np.asarray(ours), truth, largest_entry(truth)) <= 1e-5, name


def _loss(model: Llama) -> jax.Array:
    tokens, targets = np.random.default_rng(0).integers(0, 32, (2, 2, 8)).astype(np.int32)
    batch = jax.tree.map(jnp.asarray, _batch(tokens, targets, np.ones_like(tokens)))
    return loss_fn(PreparedWeights(model), batch, z_loss_weight=0.0, remat=model.config.remat)[0]


def test_remat_policies_keep_what_they_say():
    jax.set_mesh(single_device_mesh())
    L, B, T, K, G, H, F = 2, 2, 8, 2, 2, 4, 24
    names = {(L, B, T, K, G, H): "attention", (L, B, T, K, G + 2, H): "qkv", (L, B, T, 2, F): "gate_up"}
    expected = {
        "full": set(),
        "save_attention": {"attention"},
        "save_attention_qkv": {"attention", "qkv"},
        "save_attention_qkv_mlp": {"attention", "qkv", "gate_up"},
        "none": {"attention", "gate_up"},  # and what qkv is turned and split into
    }
    sizes = []
    for remat, named in expected.items():
        model = jax.eval_shape(
            lambda key, remat=remat: Llama(dataclasses.replace(CONFIG, remat=remat), key), jax.random.key(0)
        )
        _, backward = jax.eval_shape(lambda model: jax.vjp(_loss, model), model)
        kept = [leaf.shape for leaf in jax.tree.leaves(backward)]
        assert {names[shape] for shape in kept if shape in names} == named
        assert not [shape for shape in kept if shape[-2:] == (T, T)]  # attention scores are never kept
        sizes.append(sum(int(np.prod(shape)) for shape in kept))
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    "remat",
    [
        "none",
        pytest.param("save_attention_qkv_mlp", marks=pytest.mark.slow),
        *(pytest.param(f"save_attention{more}", marks=pytest.mark.long) for more in ("", "_qkv")),
    ],
)
def test_remat_changes_no_value(remat: str):
    jax.set_mesh(single_device_mesh())
    value_and_gradients = jax.jit(jax.value_and_grad(_loss))
    loss, gradients = value_and_gradients(_llama(dataclasses.replace(CONFIG, remat=remat)))
    full_loss, full_gradients = value_and_gradients(_llama(dataclasses.replace(CONFIG, remat="full")))
    np.testing.assert_allclose(loss, full_loss, rtol=1e-6)
    chex.assert_trees_all_close(jax.tree.leaves(gradients), jax.tree.leaves(full_gradients), rtol=1e-5, atol=1e-6)


def _equations(jaxpr) -> Iterator:
    """Every equation of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


def _gradient_jaxpr(config: ModelConfig):
    tokens = jnp.zeros((2, 8), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": tokens, "positions": tokens}
    model = jax.jit(Llama, static_argnums=0).eval_shape(config, jax.random.key(0))
    gradient = partial(jax.grad(loss_fn, has_aux=True), batch=batch, z_loss_weight=0.0, remat=config.remat)
    return jax.make_jaxpr(gradient)(PreparedWeights(model)).jaxpr


def test_collectives_carry_bf16_copies():
    jax.set_mesh(mesh.make_mesh(MIXED))
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16", remat="none")
    moved = []
    for equation in _equations(_gradient_jaxpr(config)):
        name = equation.primitive.name
        if name in ("reshard", "all_gather", "reduce_scatter") and equation.invars[0].aval.ndim > 0:
            moved.append((name, str(equation.invars[0].aval.dtype)))
    assert Counter(moved) == {
        ("all_gather", "bfloat16"): 4,  # keys and values, the loss's tokens, gradients of embedded ones ...
        ("reduce_scatter", "bfloat16"): 4,  # ... and the transposed ones
        # embedding, head, wqkv, wo, gate/up and down in two steps, tokens before attention and MLP and behind; and back
        ("reshard", "bfloat16"): 32,
        ("reshard", "int32"): 4,  # the batch
        ("all_gather", "int32"): 1,  # the segment ids of the keys
    }


def test_depth_does_not_grow_the_program():
    jax.set_mesh(mesh.make_mesh(MIXED))
    sizes = [len(list(_equations(_gradient_jaxpr(dataclasses.replace(CONFIG, num_layers=L))))) for L in (2, 7)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("axes", "kept"), [(MIXED, 2), (MeshConfig(data=2, sequence=4), 1)], ids=["shared", "own"])
def test_devices_that_share_matmuls_keep_the_residual_between_attention_and_mlp(axes: MeshConfig, kept: int):
    jax.set_mesh(mesh.make_mesh(axes))
    model = jax.jit(Llama, static_argnums=0).eval_shape(CONFIG, jax.random.key(0))
    _, backward = jax.eval_shape(
        lambda model: jax.vjp(lambda model: model.hidden(jnp.zeros((2, 8), jnp.int32), remat=model.config.remat), model),
        model,
    )
    assert [leaf.shape for leaf in jax.tree.leaves(backward)].count((CONFIG.num_layers, 2, 8, CONFIG.embed_dim)) == kept
