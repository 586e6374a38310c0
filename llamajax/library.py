"""Python interface of llamajax: what the commands do, as functions that return their results.

```python
import llamajax

config = llamajax.load_config("quickstart", {"run_dir": "runs/mine"})
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
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llamajax import disk
from llamajax.config.file import Root, read_config
from llamajax.config.file import load_config as read_file
from llamajax.config.run import Config
from llamajax.config.yaml_text import Problems
from llamajax.errors import CheckpointError, ConfigError

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
        >>> config = llamajax.load_config("quickstart", {"train.num_steps": 900, "mesh": {"num_cpu_devices": 1}})
        >>> config.train.num_steps, config.model.embed_dim, config.mesh.num_cpu_devices
        (900, 256, 1)
    """
    texts = overrides if not isinstance(overrides, Mapping) else [f"{key}={_text(it)}" for key, it in overrides.items()]
    return read_file(config, texts)


def train(config: Config, *, rewards: Any = None, dry_run: bool = False) -> "TrainResult":
    r"""Trains a run to its last step, or continues the run in `config.run_dir` from its newest checkpoint.

    Does what `python -m llamajax.train` does, with the same files in `run_dir` and the same numbers. Ctrl-C (in a notebook:
    interrupt the kernel) and SIGTERM stop it after the current step: the checkpoint is saved and the function returns.
    Before the first step, or a second time, a signal acts as without llamajax: Ctrl-C raises KeyboardInterrupt. In one
    process there is no watchdog.

    Args:
        config: the run.
        rewards: reward functions for `objective.kind: grpo`: one, a list, or a dict with their weights; see
            docs/how-to/grpo.md. With several processes, those of process 0 count.
        dry_run: check everything, compile and stop before the first step; nothing is written to `run_dir`.

    Returns:
        Steps, losses (nats per token) and metrics of the run so far; a notebook draws its curves.

    Raises:
        UserError: configuration, data, machine or checkpoints do not allow the run.
        KeyboardInterrupt: Ctrl-C before the first step; nothing is lost.

    Example:
        >>> import llamajax
        >>> from pathlib import Path
        >>> lines = [f'{{"text": "{n} bottles of beer on the wall, {n} bottles of beer"}}\n' for n in range(99, 0, -1)]
        >>> _ = Path("text.jsonl").write_text("".join(lines))
        >>> config = llamajax.load_config("quickstart", {
        ...     "run_dir": "runs/tiny", "data.sources": [{"kind": "jsonl", "paths": ["text.jsonl"]}], "sample": {},
        ...     "model.vocab_size": 320, "mesh": {"num_cpu_devices": 2}, "train.num_steps": 3, "train.eval_batches": 1,
        ...     "optimizer": {"learning_rate": 1e-3}})
        >>> result = llamajax.train(config)  # doctest: +ELLIPSIS
        llamajax   ...
        >>> result.steps, result.stop_reason, [record["step"] for record in result.metrics]
        (3, 'finished', [1, 2, 3])
        >>> result.loss < 6, result.held_out_loss < 6
        (True, True)
    """
    _check_files(config)
    from llamajax.results import TrainResult
    from llamajax.training.rewards import rewards_of
    from llamajax.training.run import run

    functions = None if rewards is None else rewards_of(rewards)
    with _guest():
        run(config, rewards=functions, dry_run=dry_run, owns_process=config.distributed.enabled)
    return TrainResult(Path(config.run_dir).expanduser())


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
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of programs that are too large; so does the plan
    from llamajax.planning.run import check, compile_plan
    from llamajax.results import Plan

    with _guest():
        made, figures = compile_plan(config, *check(config, sweep), alternatives=alternatives)
    return Plan(figures, made)


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
    from llamajax.results import Verification
    from llamajax.verification import run, text

    if devices is not None and not 2 <= devices <= run.MOST_DEVICES:
        raise ConfigError(f"devices: {devices} must be a number from 2 to {run.MOST_DEVICES}")
    with _guest():
        scaled = run.scale(config, devices)
        figures = None if scaled is None else run.compare(scaled)
    return Verification(figures, run.NOTHING if figures is None else text.verdict(figures))


def generate(model: "Name | Model", prompts: str | Sequence[str], **settings: Any) -> list[str]:
    """Writes texts that continue prompts.

    Args:
        model: a run's directory (its newest checkpoint), one of its checkpoints, a Hugging Face or PEFT directory,
            hf://ORG/NAME[@REVISION], or a `Model` of `load_model`, which saves reading the weights again.
        prompts: one text, or several.
        settings: those of `python -m llamajax.generate --help`, such as `max_tokens=64`, `temperature=0.8`, `seed=0`,
            `num_samples=1`, `stop=["END"]`, `chat=True`.

    Returns:
        The continuations without their prompts, `num_samples` for each prompt, in the order of the prompts.

    Raises:
        ConfigError: a setting breaks a rule, `model` is no model, or there is no prompt.
        DataError: a prompt is too long.
        CheckpointError: the checkpoint is damaged.

    Example:
        >>> import llamajax
        >>> texts = llamajax.generate("runs/tiny", ["9 bottles", "no bottles"], max_tokens=8, temperature=0)
        >>> len(texts), all(isinstance(text, str) for text in texts)
        (2, True)
    """
    import jax

    from llamajax.config.generate import GenerateConfig
    from llamajax.generation import run
    from llamajax.results import Model

    given = model.loaded.pretrained.source if isinstance(model, Model) else model
    several = [prompts] if isinstance(prompts, str) else prompts
    if not several:
        raise ConfigError("prompts: there is none; give a text, or a list of texts")
    config = _settings(GenerateConfig, settings | {"model": os.fspath(given), "prompt": list(several)})
    if config.output is not None or config.prompts_file is not None:
        raise ConfigError("prompts: this function takes prompts and returns the texts; leave output and prompts_file out")
    with _guest():
        opened = model.loaded if isinstance(model, Model) else run.open_model(config)
        encoded = run.encode(config, opened, run.read_all_prompts(config))
        if not isinstance(model, Model):
            model = Model(run.load(opened, run.lay_out(config, opened)), jax.sharding.get_mesh())
        jax.set_mesh(model.mesh)
        completer = model.completer(config, encoded)
        pieces = run.in_order(run.complete(config, completer, encoded), len(several) * config.num_samples)
        return [completion.text for _, completion in pieces]


def evaluate(model: Name, **settings: Any) -> dict[str, Any]:
    """Evaluates a model: its loss on held-out documents, or its results in lm-evaluation-harness.

    Args:
        model: a run's directory (its newest checkpoint), one of its checkpoints, a Hugging Face or PEFT directory, or
            hf://ORG/NAME[@REVISION].
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
    from llamajax.config.evaluate import EvaluateConfig
    from llamajax.evaluation.run import run

    with _guest():
        return run(_settings(EvaluateConfig, settings | {"model": os.fspath(model)}))


def load_model(
    model: Name,
    *,
    mesh: Mapping[str, int] | None = None,
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> "Model":
    """Reads the weights of a model onto the devices, with its tokenizer.

    Args:
        model: a run's directory (its newest checkpoint), one of its checkpoints, a Hugging Face or PEFT directory, or
            hf://ORG/NAME[@REVISION].
        mesh: sizes of mesh axes, such as `{"fsdp": 8}`, or `{"num_cpu_devices": 2}` for emulated devices; None: split over
            as many devices along `tensor` as the heads allow, copied along `data` for the rest.
        param_dtype: type of the weights; `auto`: `compute_dtype`.
        compute_dtype: type of activations and matmuls; `auto`: the type that the model was trained or stored in.

    Returns:
        The Flax model with its weights (`weights`), `tokenizer`, `config` and `mesh`. Calling it with token ids [B, T]
        returns logits, float32 [B, T, V].

    Raises:
        ConfigError: `model` is no model, or cannot be divided over the mesh.
        CheckpointError: the checkpoint is damaged.

    Example:
        >>> import llamajax
        >>> model = llamajax.load_model("runs/tiny")
        >>> tokens = model.tokenizer.encode_prompt("9 bottles of")
        >>> logits = model([tokens])
        >>> logits.shape == (1, len(tokens), model.config.vocab_size), logits.dtype.name
        (True, 'float32')
        >>> next_token = int(logits[0, -1].argmax())
    """
    import jax

    from llamajax.config.generate import GenerateConfig
    from llamajax.generation import run
    from llamajax.results import Model

    given = {"model": os.fspath(model), "param_dtype": param_dtype, "compute_dtype": compute_dtype, "mesh": mesh or {}}
    config = _settings(GenerateConfig, {**given, "prompt": [""]})
    with _guest():
        opened = run.open_model(config)
        return Model(run.load(opened, run.lay_out(config, opened)), jax.sharding.get_mesh())


def restore(run_dir: Name, *, step: int | None = None, mesh: Mapping[str, int] | None = None) -> "Restored[TrainState]":
    """Reads a whole checkpoint of a run: weights, optimizer state and random key, by the configuration stored with it.

    Takes no lock and changes nothing, so the run may be training.

    Args:
        run_dir: the run's directory.
        step: which checkpoint; None: the newest one that is undamaged.
        mesh: sizes of mesh axes, such as `{"fsdp": 8}`; None: those of the run, over the devices of this machine.

    Returns:
        `state` (`state.model` is the Flax model, `state.opt_state` optax's state), `step` (finished steps) and `meta`. The
        mesh is `state.step.sharding.mesh`; code that calls the model runs in `with jax.set_mesh(...)`.

    Raises:
        CheckpointError: no checkpoint, or none that is undamaged.
        ConfigError: this machine's devices cannot hold the run's mesh.
        EnvironmentMismatchError: jax already runs with other devices.

    Example:
        >>> import llamajax
        >>> restored = llamajax.restore("runs/tiny")
        >>> restored.step, restored.state.model.embedding.shape
        (3, (320, 256))
    """
    import jax

    from llamajax.checkpoint.meta import newest_meta, read_meta
    from llamajax.checkpoint.read import restore as read
    from llamajax.config.file import settings_of
    from llamajax.config.keys import without_removed
    from llamajax.config.parallel import MeshConfig
    from llamajax.parallel import startup
    from llamajax.step import pinned_memory
    from llamajax.step.resolve import with_placed_state
    from llamajax.step.state import abstract_state
    from llamajax.training import elastic

    path = Path(run_dir).expanduser()
    meta = newest_meta(path) if step is None else read_meta(path / "checkpoints" / str(step))
    if meta is None and disk.is_missing(path, stat.S_ISDIR):
        raise CheckpointError(f"{path}: there is no such directory; name the run_dir of a run")
    if meta is None:
        which = "no undamaged checkpoint" if step is None else f"no undamaged checkpoint of step {step}"
        raise CheckpointError(f"{path}: has {which}; name the run_dir of a run, and a step of it")
    config = settings_of(Config, without_removed(meta["config"]))
    if mesh is not None:
        sizes: dict[str, Any] = dict(mesh)
        config = config.changed({"mesh": MeshConfig(**sizes), "hardware.domains": (), "hardware.domain_bandwidth": None})
    if not jax.distributed.is_initialized():
        config = config.changed({"distributed.enabled": False})
    with _guest():
        pinned_memory.prepare(config)
        startup.begin(config)
        config = elastic.fit(config, path).config
        config = with_placed_state(config, startup.lay_out(config).shape)
        return read(path, abstract_state(config).as_saved(), step)


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
        >>> config = llamajax.load_config("runs/tiny/config.yaml", {"data.cache_dir": "cache/ahead"})
        >>> llamajax.preprocess(config, workers=1)  # doctest: +ELLIPSIS
        work       1 of 1 pieces...
    """
    import llamajax.preprocessing.run as preprocessing  # before the next line, or jax would read it in this process

    given = {} if workers is None else {"--workers": str(workers)}
    with _guest(), _environment("JAX_PLATFORMS", "cpu"):  # workers leave devices to training
        preprocessing.run(config, given)


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
        ...     path = run.save(state)
        llamajax   ...
        step 1 of 3
        step 2 of 3
    """
    _check_files(config)
    from llamajax.training.own_loop import prepare_loop

    with _guest(), prepare_loop(config) as loop:
        yield loop


@contextlib.contextmanager
def _guest() -> Iterator[None]:
    """Closes new files to users outside the group, as commands do; afterwards restores the umask and jax's mesh."""
    import jax

    mesh, mask = jax.sharding.get_mesh(), os.umask(0o077)
    os.umask(mask | 0o027)
    try:
        yield
    finally:
        os.umask(mask)
        jax.set_mesh(mesh)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable while the block runs."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update({} if before is None else {name: before})


def _check_files(config: Config) -> None:
    """Checks that this machine has the files that the run names.

    Raises:
        ConfigError: a line for each that is missing.
    """
    if problems := config.file_problems():
        raise ConfigError("\n".join(problems))


def _settings(root: type[Root], settings: Mapping[str, Any]) -> Root:
    """Builds the settings of a command from Python values.

    Raises:
        ConfigError: a line for each mistake.
    """
    pairs: list[tuple[str, str | None]] = []
    for key, value in settings.items():
        items = value if isinstance(value, list | tuple) else [value]
        pairs += [(key, _text(item)) for item in items]
    return read_config(root, None, pairs, Problems(), check=getattr(root, "file_problems", None))


def _text(value: Any) -> str:
    """Returns a value as the command line takes it."""
    return os.fspath(value) if isinstance(value, str | os.PathLike) else json.dumps(value, default=os.fspath)
