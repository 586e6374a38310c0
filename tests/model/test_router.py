"""The choices of a router, against the definitions in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.experts import ExpertsConfig
from llamajax.config.parallel import MeshConfig
from llamajax.model.router import choose, kept_choices
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sequence import in_order
from llamajax.parallel.sharding import spec

N, E = 40, 8
LOGITS = np.random.default_rng(0).normal(size=(N, E)).astype(np.float32)
BIAS = np.linspace(-0.4, 0.4, E, dtype=np.float32)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_choices_are_the_largest_biased_scores_and_weights_have_no_bias(scores, normalize):
    config = ExpertsConfig(num_experts=E, top_k=3, scores=scores, normalize=normalize, weight_scale=2.5)
    chosen = choose(jnp.asarray(LOGITS), jnp.asarray(BIAS), config)
    own = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True) if scores == "softmax" else 1 / (1 + np.exp(-LOGITS))
    experts = np.argsort(-(own + BIAS), axis=-1)[:, :3]
    np.testing.assert_array_equal(chosen.experts, experts)
    weights = np.take_along_axis(own, experts, axis=-1)
    weights = weights / weights.sum(-1, keepdims=True) if normalize else weights
    np.testing.assert_allclose(chosen.weights, 2.5 * weights, rtol=1e-5)
    np.testing.assert_allclose(chosen.scores, own / own.sum(-1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_token_chooses_within_its_best_groups(scores):
    config = ExpertsConfig(num_experts=E, top_k=2, scores=scores, num_groups=4, top_groups=2)
    chosen = np.asarray(choose(jnp.asarray(LOGITS), None, config).experts)
    by_group = (np.exp(LOGITS) if scores == "softmax" else 1 / (1 + np.exp(-LOGITS))).reshape(N, 4, 2)
    # The score of a group of two: the larger one of softmax scores, the sum of sigmoid scores.
    of_group = by_group.max(-1) if scores == "softmax" else by_group.sum(-1)
    best = np.argsort(-of_group, axis=-1)[:, :2]
    for token in range(N):
        allowed = [expert for expert in range(E) if expert // 2 in best[token]]
        assert list(chosen[token]) == sorted(allowed, key=lambda expert: -LOGITS[token, expert])[:2]


@pytest.mark.parametrize("form", ["gather", "ring"])
def test_the_first_tokens_of_a_row_keep_an_expert(form):
    jax.set_mesh(make_mesh(MeshConfig(fsdp=4, sequence=2)))
    config, (B, T, K) = ExpertsConfig(num_experts=4, top_k=2, capacity_factor=0.75), (4, 16, 2)
    rng = np.random.default_rng(1)
    chosen = np.stack([rng.permutation(4)[:K] for _ in range(B * T)]).reshape(B, T, K).astype(np.int32)
    most = 6  # 0.75 * 16 tokens * 2 choices / 4 experts
    expected, taken = chosen.copy(), np.zeros((B, 4), int)
    for row in range(B):
        for token in range(T):
            for k, expert in enumerate(chosen[row, token]):
                taken[row, expert] += 1
                if taken[row, expert] > most:
                    expected[row, token, k] = 4
    assert (expected == 4).any()

    def laid_out(x: np.ndarray) -> jax.Array:
        by_token = jax.device_put(np.moveaxis(x, 2, 0), spec(None, "batch", "seq"))
        return jax.reshard(jnp.moveaxis(jax.reshard(in_order(by_token, form), jax.P()), 0, 2), jax.P())

    def kept(chosen: jax.Array) -> jax.Array:
        return jax.shard_map(lambda own: kept_choices(own, config, form), in_specs=jax.P(), out_specs=jax.P())(chosen)

    np.testing.assert_array_equal(jax.jit(kept)(laid_out(chosen)), laid_out(expected))
