"""Rows of jax: `llamajax`, the real training step; `jax_naive`, plain jax; and jax's part of the ceiling.

python -m scripts.bench.jax_rows TASK
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from llamajax.estimates.gpu_memory_budget import MEMORY_FRACTION, VARIABLE
from llamajax.kernels.choice import compute_capability
from llamajax.model import Llama
from llamajax.parallel import startup
from llamajax.parallel.arrays import named_arrays
from llamajax.step.batch import batch_sharding
from llamajax.step.compile import compile_with, compiler_options, lower
from llamajax.step.optim import moments
from llamajax.step.resolve import attention_kernel, resolve
from llamajax.step.state import abstract_state, init_state
from llamajax.weights import names
from llamajax.weights.loading import read_array
from scripts.bench.case import Case, Choice, digest, norms_by_kind
from scripts.bench.child import Task, answer, first_that_fits, resident_bytes, timed_steps
from scripts.bench.jax_ceiling import ceiling
from scripts.bench.jax_naive import make as make_naive
from scripts.bench.weights import open_weights

Batches = list[dict[str, jax.Array]]
_FUSED = re.compile(r'custom_call_target="__cudnn\$(fmha\w+)"|\bname = \\?"(attention_\w+)\\?"')
"""Pattern of calls to cuDNN's and llamajax's own kernels in a compiled program."""


def fused_calls(hlo: str) -> dict[str, list[str]]:
    """Returns the fused attention kernels by their names in a compiled program: `forward` and `backward`."""
    called = sorted({cudnn or own for cudnn, own in _FUSED.findall(hlo)})
    return {
        "forward": [name for name in called if "backward" not in name.lower()],
        "backward": [name for name in called if "backward" in name.lower()],
    }


def llamajax(task: Task) -> dict[str, Any]:
    """Measures `llamajax.step.step.train_step` with the forms, options and memory that training uses."""
    case = task.case
    startup.start(case.config(Choice(micro_batch=case.rows, remat="none")))
    return first_that_fits(task.choices, partial(_llamajax, task))


def _llamajax(task: Task, choice: Choice) -> dict[str, Any]:
    case, run = task.case, resolve(task.case.config(choice), jax.sharding.get_mesh().shape)
    config = run.config
    abstract, is_gpu = abstract_state(config), jax.default_backend() == "gpu"
    lowered = lower(run, abstract)
    compiled, compile_s = _compiled(lambda: compile_with(lowered, compiler_options(run) if is_gpu else {}))

    tensors = names.tensors_for(config.model, open_weights(Path(task.weights)), Path(task.weights))
    arrays = named_arrays({"model": abstract.model}).items()
    leaves = [read_array(name, leaf, tensors, config.model) for name, leaf in arrays]
    model: Llama = jax.tree.unflatten(jax.tree.structure(abstract.model), leaves)
    state = init_state(config, model)

    def step(batch: dict[str, jax.Array]) -> jax.Array:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics["loss"]

    def squares() -> Iterator[tuple[str, float]]:
        arrays = {f"model.{name}": moment for name, moment in moments(state.opt_state, state.model)[0].items()}
        for array, moment in arrays.items():
            for tensor in names.tensors_of(array, config.model):
                yield tensor.hf_name, _sum_of_squares(moment, (*(slice(None),) * tensor.num_leading, *tensor.part))

    told, _ = attention_kernel(run, compute_capability())
    return _measured(case, _batches(case, choice, batch_sharding()), step, squares) | {
        "compile_s": compile_s, "attention": fused_calls(compiled.as_text() or ""), "note": told,
    }  # fmt: skip


def jax_naive(task: Task) -> dict[str, Any]:
    """Measures `scripts.bench.jax_naive` with the same share of the GPU's memory as llamajax."""
    if task.case.is_toy:
        jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault(VARIABLE, str(MEMORY_FRACTION))
    return first_that_fits(task.choices, partial(_naive, task))


def _naive(task: Task, choice: Choice) -> dict[str, Any]:
    case = task.case
    train_step, init = make_naive(case.config(choice), packed=case.packed)
    tensors, batches = open_weights(Path(task.weights)), _batches(case, choice)
    shapes = {name: jax.ShapeDtypeStruct(stored.shape, jnp.float32) for name, stored in tensors.items()}
    lowered = jax.jit(train_step, donate_argnums=(0, 1)).lower(shapes, jax.eval_shape(init, shapes), batches[0])
    compiled, compile_s = _compiled(lowered.compile)
    params = {name: jnp.asarray(stored.read().astype(np.float32)) for name, stored in tensors.items()}
    opt_state = jax.jit(init)(params)

    def step(batch: dict[str, jax.Array]) -> jax.Array:
        nonlocal params, opt_state
        params, opt_state, loss = compiled(params, opt_state, batch)
        return loss

    def squares() -> Iterator[tuple[str, float]]:
        for name, moment in optax.tree.get(opt_state, "mu").items():
            yield name, _sum_of_squares(moment, ())

    return _measured(case, batches, step, squares) | {
        "compile_s": compile_s, "attention": fused_calls(compiled.as_text() or ""), "note": "XLA's attention",
    }  # fmt: skip


def _batches(case: Case, choice: Choice, sharding: Any = None) -> Batches:
    """Returns the batches of all steps on the device, [micro-batches, B, T]."""
    shape = (case.rows // choice.micro_batch, choice.micro_batch, case.seq_len)
    return [
        {name: jax.device_put(x.reshape(shape), sharding) for name, x in case.batch(step).items()}
        for step in range(case.num_steps)
    ]


def _compiled(compile_: Callable[[], jax.stages.Compiled]) -> tuple[jax.stages.Compiled, float]:
    """Compiles the program, if it fits the device. Returns it and the seconds of compilation."""
    clock = time.perf_counter()
    compiled = compile_()
    stats, limit = compiled.memory_analysis(), (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if stats is not None and limit is not None:
        needed = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        if needed + stats.temp_size_in_bytes > limit:
            raise MemoryError
    return compiled, time.perf_counter() - clock


def _measured(
    case: Case, batches: Batches, step: Callable[[Any], jax.Array], squares: Callable[[], Iterator[tuple[str, float]]]
) -> dict[str, Any]:
    """Runs the steps of a round. `squares` returns sums of squares of Adam's first moments, a tenth of the first step's
    gradients, by Hugging Face name."""
    losses: list[jax.Array] = []
    found = timed_steps(
        lambda number: losses.append(step(batches[number])),
        lambda: losses[-1].block_until_ready(),
        lambda: norms_by_kind(squares()),
    )
    stats = jax.local_devices()[0].memory_stats() or {}
    return found | {
        "losses": [float(loss) for loss in losses],
        "tokens": digest(np.stack([np.asarray(batch["tokens"]).reshape(case.rows, -1) for batch in batches])),
        "peak_bytes": resident_bytes() if case.is_toy else stats["peak_bytes_in_use"],
    }


def _sum_of_squares(x: jax.Array, part: tuple[slice | int, ...]) -> float:
    """Computes the sum in one kernel, because a copy would count as memory of the row."""
    return float(jax.jit(lambda x: jnp.sum(jnp.square(x[part].astype(jnp.float32))))(x))


if __name__ == "__main__":
    answer({"llamajax": llamajax, "jax_naive": jax_naive, "ceiling": ceiling})
