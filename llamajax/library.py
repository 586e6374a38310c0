"""Python interface of llamajax: what the commands do, as functions that return their results.

```python
import llamajax

config = llamajax.load_config("quickstart", {"run_dir": "runs/mine", "train.num_steps": 20})
result = llamajax.train(config)
print(result.held_out_loss, llamajax.generate(result.run_dir, "def ", max_tokens=20))
```

No function ends the process. A mistake raises a `llamajax.UserError` whose text is the line that the command prints: what
is wrong, where, the rule, the remedy. Each function imports what it needs when it is called, because importing jax takes
seconds.

The first call that computes starts jax, which takes its devices once: `mesh.num_cpu_devices` cannot change afterwards, and
`verify` and `plan` belong in a process that has not started jax on GPUs. With `distributed.enabled`, the rules of the
command hold: the failure of one process ends all.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llamajax.config.run import Config

if TYPE_CHECKING:
    from llamajax.checkpoint.read import Restored
    from llamajax.results import Model, Plan, TrainResult, Verification
    from llamajax.step.state import TrainState
    from llamajax.training.own_loop import OwnLoop

Name = str | os.PathLike[str]
"""A path, or the name of a shipped configuration."""


def load_config(config: Name, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """Reads a configuration.

    Args:
        config: path of a YAML file, or name of a shipped configuration without folder and suffix, such as `quickstart`.
        overrides: settings that replace those of the file, as on the command line: texts such as `"train.num_steps=10"`,
            or a mapping from dotted keys to values. Lists and sections may be Python lists and mappings; None unsets.

    Returns:
        The configuration, a frozen dataclass: `config.train.num_steps`. `config.changed({"seed": 1})` returns a copy with
        other values. Files that it names are not looked at.

    Raises:
        ConfigError: one `file:line: key: rule; remedy` line for every mistake.
        DiskError: the weights that `init_from` names cannot be read.

    Example:
        >>> import llamajax
        >>> config = llamajax.load_config("quickstart", {"train.num_steps": 20, "mesh": {"num_cpu_devices": 1}})
        >>> config.train.num_steps, config.model.embed_dim, config.mesh.num_cpu_devices
        (20, 256, 1)
    """
    from llamajax.config.file import load_config as read

    texts = overrides if not isinstance(overrides, Mapping) else [f"{key}={_text(it)}" for key, it in overrides.items()]
    return read(config, texts)


def train(config: Config, *, dry_run: bool = False) -> "TrainResult":
    """Trains a run to its last step, or continues the run in `config.run_dir` from its newest checkpoint.

    Does what `python -m llamajax.train` does, with the same files in `run_dir` and the same numbers. Ctrl-C (in a notebook:
    interrupt the kernel) and SIGTERM stop it after the current step: the checkpoint is saved and the function returns.
    Before the first step, or a second time, a signal acts as without llamajax: Ctrl-C raises KeyboardInterrupt. In one
    process there is no watchdog.

    Args:
        config: the run.
        dry_run: check everything, compile and stop before the first step; nothing is written to `run_dir`.

    Returns:
        Steps, losses (nats per token) and metrics of the run so far; a notebook draws its curves.

    Raises:
        UserError: configuration, data, machine or checkpoints do not allow the run.
        KeyboardInterrupt: Ctrl-C before the first step; nothing is lost.

    Example:
        >>> import llamajax
        >>> tiny = {"model": {"vocab_size": 300, "embed_dim": 16, "mlp_dim": 32, "num_layers": 1, "num_heads": 2,
        ...         "num_kv_heads": 1, "head_dim": 8, "max_seq_len": 64, "compute_dtype": "float32"},
        ...         "mesh": {"num_cpu_devices": 2}, "data.seq_len": 64, "sample": {}, "metrics.tensorboard": False}
        >>> config = llamajax.load_config("quickstart", {**tiny, "run_dir": "runs/tiny", "train.num_steps": 3,
        ...     "train.eval_batches": 1, "optimizer": {"learning_rate": 1e-3}})
        >>> result = llamajax.train(config)  # doctest: +ELLIPSIS
        llamajax   ...
        >>> result.steps, result.stop_reason, [record["step"] for record in result.metrics]
        (3, 'finished', [1, 2, 3])
        >>> result.loss < 6, result.held_out_loss < 6
        (True, True)
    """
    raise NotImplementedError


def plan(config: Config, *, alternatives: bool = False, sweep: str | None = None) -> "Plan":
    """Predicts memory, time, communication and cost of a run's step on the cluster in `config.hardware`.

    Compiles the step for the cluster's GPUs; this machine needs none, only the extra `plan`. Does what
    `python -m llamajax.plan` does. Keeps jax on the CPU for the rest of the process, so plan in a process of its own on a
    machine with GPUs. Nothing is measured: `docs/plan_accuracy.md` compares predictions with published runs.

    Args:
        config: the run; its data need not exist here.
        alternatives: also compile with other settings, and report which are fastest.
        sweep: `KEY=VALUE,VALUE`: also plan other values of one setting, such as `hardware.nodes=4,8,16`.

    Returns:
        `figures` (what `--json` writes; bytes, seconds), `fits` and `verdict`; `str()` is the printed report, and a
        notebook draws the timeline of a layer and the memory.

    Raises:
        CompilerMissingError: XLA's compiler for GPUs is not installed; `pip install 'llamajax[plan]'`.
        ConfigError: no GPU is named, or the cluster cannot be divided this way.

    Example:
        >>> import llamajax
        >>> config = llamajax.load_config("llama3_2_1b_8xh100")
        >>> plan = llamajax.plan(config)  # doctest: +SKIP
        >>> plan.fits, plan.figures["step_time_s"]  # doctest: +SKIP
        >>> plan  # doctest: +SKIP
    """
    raise NotImplementedError


def verify(config: Config, *, devices: int | None = None) -> "Verification":
    """Certifies a run's mesh and forms: compares its first steps, scaled down, with those of one device.

    Does what `python -m llamajax.verify` does, on emulated CPU devices, in fp32. jax must not have started yet, or have at
    least as many CPU devices.

    Args:
        config: the run; its data are not read.
        devices: emulated devices at most, 2 to 64; None: 8, or as many as keep what matters of the mesh.

    Returns:
        Whether all numbers are equal, with the figures; a notebook draws the difference of every tensor. It is falsy if
        numbers differ.

    Raises:
        ConfigError: the mesh cannot be laid over so many devices.
        EnvironmentMismatchError: jax already runs with fewer devices, or on other ones; start a new process.

    Example:
        >>> import llamajax
        >>> config = llamajax.load_config("quickstart", {"mesh": {"fsdp": 2, "num_cpu_devices": 2}})
        >>> verification = llamajax.verify(config, devices=2)  # doctest: +ELLIPSIS
        run        ...
        >>> verification.equal
        True
    """
    raise NotImplementedError


def generate(model: "Name | Model", prompts: str | Sequence[str], **settings: Any) -> list[str]:
    """Writes texts that continue prompts.

    Args:
        model: a run's directory (its newest checkpoint), one of its checkpoints, a Hugging Face directory, or a `Model` of
            `load_model`, which saves reading the weights again.
        prompts: one text, or several.
        settings: those of `python -m llamajax.generate --help`, such as `max_tokens=64`, `temperature=0.8`, `seed=0`,
            `num_samples=1`, `stop=["\\n"]`, `chat=True`.

    Returns:
        The continuations without their prompts, `num_samples` for each prompt, in the order of the prompts.

    Raises:
        ConfigError: a setting breaks a rule, or `model` is no model.
        DataError: a prompt is too long.
        CheckpointError: the checkpoint is damaged.

    Example:
        >>> import llamajax
        >>> texts = llamajax.generate("runs/tiny", ["def main(", "import "], max_tokens=8, temperature=0)
        >>> len(texts), all(isinstance(text, str) for text in texts)
        (2, True)
    """
    raise NotImplementedError


def evaluate(model: Name, **settings: Any) -> dict[str, Any]:
    """Evaluates a model: its loss on held-out documents, or its results in lm-evaluation-harness.

    Args:
        model: a run's directory (its newest checkpoint), one of its checkpoints, or a Hugging Face directory.
        settings: those of `python -m llamajax.evaluate --help`, such as `num_batches=8`, `split="train"`,
            `tasks="hellaswag,arc_easy"`, `limit=100`.

    Returns:
        What `--json` writes: losses in nats per token and bits per byte, or the results of each task.

    Raises:
        ConfigError: a setting breaks a rule, or `model` is no model.
        DataError: the documents cannot be read.
        EnvironmentMismatchError: a package is missing.

    Example:
        >>> import llamajax
        >>> figures = llamajax.evaluate("runs/tiny", num_batches=1)  # doctest: +ELLIPSIS
        model      ...
        >>> figures["loss"] < 6
        True
    """
    raise NotImplementedError


def load_model(
    model: Name,
    *,
    mesh: Mapping[str, int] | None = None,
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> "Model":
    """Reads the weights of a model onto the devices, with its tokenizer. Its mesh becomes the current one of the process.

    Args:
        model: a run's directory (its newest checkpoint), one of its checkpoints, or a Hugging Face directory.
        mesh: sizes of mesh axes, such as `{"fsdp": 8}`, or `{"num_cpu_devices": 2}` for emulated devices; None: split over
            as many devices along `tensor` as the heads allow, copied along `data` for the rest.
        param_dtype: type of the weights; `auto`: `compute_dtype`.
        compute_dtype: type of activations and matmuls; `auto`: the type that the model was trained or stored in.

    Returns:
        The Flax model with its weights (`weights`), `tokenizer` and `config`. Calling it with token ids [B, T] returns
        logits, float32 [B, T, V].

    Raises:
        ConfigError: `model` is no model, or cannot be divided over the mesh.
        CheckpointError: the checkpoint is damaged.

    Example:
        >>> import llamajax
        >>> model = llamajax.load_model("runs/tiny")
        >>> tokens = model.tokenizer.encode_prompt("def main(")
        >>> logits = model([tokens])
        >>> logits.shape == (1, len(tokens), model.config.vocab_size), logits.dtype.name
        (True, 'float32')
        >>> next_token = int(logits[0, -1].argmax())
    """
    raise NotImplementedError


def restore(run_dir: Name, *, step: int | None = None) -> "Restored[TrainState]":
    """Reads a whole checkpoint of a run: weights, optimizer state and random key, by the configuration stored with it.

    Starts jax as the run does, and makes its mesh, over the devices of this machine, the current one of the process. Takes
    no lock and changes nothing, so the run may be training.

    Args:
        run_dir: the run's directory.
        step: which checkpoint; None: the newest one that is undamaged.

    Returns:
        `state` (`state.model` is the Flax model, `state.opt_state` optax's state), `step` (finished steps) and `meta`.

    Raises:
        CheckpointError: no checkpoint, or none that is undamaged.
        ConfigError: this machine's devices cannot hold the run's mesh.
        EnvironmentMismatchError: jax already runs with other devices.

    Example:
        >>> import llamajax
        >>> restored = llamajax.restore("runs/tiny")
        >>> restored.step, restored.state.model.embedding.shape
        (3, (300, 16))
    """
    raise NotImplementedError


def preprocess(config: Config, *, workers: int | None = None) -> None:
    """Tokenizes and packs a run's data ahead of training, into `config.data.cache_dir`.

    Training finds everything there, and makes the same itself otherwise. Starts processes: a script, unlike a notebook,
    must call it below `if __name__ == "__main__":`.

    Args:
        config: the run.
        workers: processes; None: one for each processor that this process may use.

    Raises:
        ConfigError: the tokenizer does not fit the run.
        DataError: a source, tokenizer, template or cache cannot be read.
        DiskError: the disk fails or is full.

    Example:
        >>> import llamajax
        >>> config = llamajax.load_config("quickstart", {"data.cache_dir": "cache"})
        >>> llamajax.preprocess(config, workers=1)  # doctest: +SKIP
    """
    raise NotImplementedError


@contextlib.contextmanager
def setup(config: Config) -> "Iterator[OwnLoop]":
    """Prepares a run for a training loop of your own: devices, data, compiled step, checkpoints.

    The state after the same steps equals, to the bit, that of `llamajax.train`. Its checkpoints are those of the command,
    which generates from them, evaluates and continues them. Logs, evaluations, rollbacks, stages' schedules of checkpoints
    and signals are the loop's own business.

    Args:
        config: the run. If its `run_dir` has a checkpoint, the loop continues from there.

    Yields:
        `state`, `batches()`, `train_step(state, batch)`, `evaluate(state)` and `save(state)`.

    Raises:
        UserError: configuration, data, machine or checkpoints do not allow the run.

    Example:
        >>> import llamajax
        >>> config = llamajax.load_config("runs/tiny/config.yaml", {"run_dir": "runs/mine"})
        >>> with llamajax.setup(config) as run:  # doctest: +ELLIPSIS
        ...     state = run.state
        ...     for step, batch in run.batches():
        ...         state, metrics = run.train_step(state, batch)
        ...         print("step", step, "of", config.train.num_steps)
        ...         if step == 2:
        ...             break
        ...     run.save(state)
        llamajax   ...
        step 1 of 3
        step 2 of 3
    """
    raise NotImplementedError
    yield


def _text(value: Any) -> str:
    """Returns a value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value, default=os.fspath)
