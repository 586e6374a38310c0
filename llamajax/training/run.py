"""The whole story of a training run: read `run` from top to bottom."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from llamajax.checkpoint.meta import checkpoint_meta
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.file import write_config
from llamajax.config.run import Config
from llamajax.data.chat.chat_template import TEMPLATE_FILE, ChatTemplate
from llamajax.data.rows.dataset import Dataset, prepare
from llamajax.data.rows.example import find_example
from llamajax.data.rows.position import PassedOver
from llamajax.data.rows.stages import Passes
from llamajax.errors import CheckpointError, ConfigError
from llamajax.generation.completion import encode_prompt, stream_text
from llamajax.generation.prompts import Prompt, find_ends
from llamajax.model import Llama
from llamajax.parallel import compilation_cache, mesh, startup
from llamajax.parallel.arrays import concretise
from llamajax.parallel.zero import whole_over_data
from llamajax.planning.scheduling import check_told
from llamajax.processes.exit import end_process, exit_code
from llamajax.processes.peers import check_same_everywhere, everyones
from llamajax.step import pinned_memory
from llamajax.step.checksum import fingerprint
from llamajax.step.resolve import with_placed_state
from llamajax.step.state import TrainState, abstract_state, init_state
from llamajax.training import elastic, reference
from llamajax.training.bad_steps import GoBack
from llamajax.training.beginning import (
    Beginning,
    check_beginning,
    find_beginning,
    first_state,
    open_first_weights,
    open_weights,
    with_commit,
)
from llamajax.training.loop import Trainer
from llamajax.training.replicas import Replicas
from llamajax.training.resume import check_data
from llamajax.training.rewards import Rewards, load_rewards
from llamajax.training.rollback import go_back
from llamajax.training.rollouts import OnPolicy
from llamajax.training.stages import Programs, check_forms, resolve_stages
from llamajax.training.stop import StopSignal
from llamajax.training.watchdog import Watchdog, process_ends
from llamajax.watch import console, startup_time
from llamajax.watch.console import say
from llamajax.watch.example import print_example
from llamajax.watch.peak import peak_flops
from llamajax.weights.pretrained import Pretrained


def run(asked: Config, *, rewards: Rewards | None = None, dry_run: bool = False, owns_process: bool = True) -> None:
    """Trains as `asked`, resuming the run in its directory.

    Everything that can be checked without the compiler is checked before it starts.

    Args:
        asked: the run, as its user wrote it.
        rewards: reward functions for `objective.kind: grpo`.
        dry_run: check everything, compile and stop.
        owns_process: this process exists for the run. Signals and the watchdog may end it, and the run began when the
            process did. Otherwise see `StopSignal`; there is no watchdog.

    Raises:
        UserError: one of `llamajax.errors`, when the configuration, data, machine or checkpoints do not allow the run.
    """
    check_rewards(asked, rewards)
    run_dir = Path(asked.run_dir).expanduser()
    limits = asked.watchdog if owns_process else dataclasses.replace(asked.watchdog, enabled=False)
    if not owns_process:
        startup_time.begins_now()
    with StopSignal(ends_process=owns_process) as stop, Watchdog(limits, run_dir) as watchdog:
        outset = look(asked, run_dir, watchdog)
        if dry_run:
            check_beginning(outset.asked, outset.config, outset.abstract, outset.pretrained)
            compile_all(outset.config, outset.abstract, watchdog)
            return

        in_background = functools.partial(watchdog.phase, "save")
        with Checkpointer(run_dir, outset.config.checkpoint, on_failure=say, around_commit=in_background) as checkpointer:
            watchdog.keep_stacks()
            trainer, beginning = prepare_trainer(outset, checkpointer, stop, watchdog)
            if rewards is not None:
                trainer = with_rewards(trainer, beginning, rewards)
            state, stopped = train_to_the_end(trainer, beginning, outset)
            watchdog.begin("evaluate")
            if not stopped:
                write_sample(outset.config, state, trainer.dataset)
        if jax.process_index() == 0 and int(state.step) > 0:
            console.print_end(run_dir, run_dir / "checkpoints" / str(int(state.step)))


@dataclass(frozen=True, kw_only=True)
class Outset:
    """A run that fits this machine; nothing of it is read or compiled yet."""

    asked: Config
    """The run as its user wrote it, with the commit of weights on the Hub."""
    config: Config
    """The run on these devices."""
    began: dict[str, Any]
    """Mesh and accumulation that the run began with; see `elastic.Fitted`."""
    abstract: TrainState
    """Its `abstract_state`."""
    pretrained: Pretrained | None
    """The model whose weights a new run starts from."""


def look(asked: Config, run_dir: Path, watchdog: Watchdog) -> Outset:
    """Starts jax for the run and checks that the run fits the devices and weights; all processes call this together.

    Raises:
        UserError: the configuration, machine or weights do not allow the run.
    """
    pinned = pinned_memory.prepare(asked)
    startup.begin(asked)
    if pinned is not None:
        console.log(f"pinned     {pinned}")
    asked = with_commit(asked, run_dir)
    fitted = elastic.fit(asked, run_dir)
    config = fitted.config
    config = with_placed_state(config, startup.lay_out(config).shape)
    watchdog.begin("load")
    abstract = abstract_state(config)
    console.print_header(config, abstract.model)
    if fitted.line is not None:
        console.log(f"elastic    {fitted.line}")
    check_forms(config)
    if jax.default_backend() == "gpu":
        check_told(config)
    pretrained = open_weights(config, run_dir)
    if pretrained is not None:
        console.log(f"init_from  {pretrained.described}{pretrained.changed_by(config.model)}")
    return Outset(asked=asked, config=config, began=fitted.began, abstract=abstract, pretrained=pretrained)


def prepare_trainer(
    outset: Outset, checkpointer: Checkpointer, stop: StopSignal, watchdog: Watchdog
) -> tuple[Trainer, Beginning]:
    """Finds the beginning of the run, prepares its data and compiles its steps; all processes call this together.

    Raises:
        UserError: checkpoint, data or disk do not allow the run.
    """
    asked, config = outset.asked, outset.config
    beginning = find_beginning(asked, config, outset.abstract, outset.pretrained, checkpointer)
    watchdog.begin("load")
    config, dataset = prepare_data(config, beginning)
    meta = checkpoint_meta(asked, dataset, beginning.origin.hf, outset.began)
    if beginning.found is not None:
        check_data(asked, beginning.found, meta)
    programs, replicas = compile_all(config, outset.abstract, watchdog)
    trainer = Trainer(
        config=config,
        num_eval_rows=config.train.eval_batches * asked.train.micro_batch_size,
        programs=programs,
        replicas=replicas,
        dataset=dataset,
        meta=meta,
        files={**beginning.origin.files, **dataset.files},
        checkpointer=checkpointer,
        stop=stop,
        watchdog=watchdog,
    )
    return trainer, beginning


def prepare_data(config: Config, beginning: Beginning) -> tuple[Config, Dataset]:
    """Prepares the data of the run and logs its steps and epochs; all processes call this together.

    Returns:
        The run with its number of steps, and its data.

    Raises:
        UserError: see `prepare`; also if data differs between processes, the sample prompt does not fit the model, or
            `train.num_epochs` takes fewer steps than other settings need.
    """
    dataset = prepare(config, log=console.log, log_work=console.log_own, tokenizer=beginning.origin.tokenizer)
    fingerprints = repr((dataset.fingerprint, dataset.stage_fingerprints))
    same = {"data (documents or tokenizer)": fingerprints, "tokenized documents": dataset.content}
    check_same_everywhere(same)
    config = with_steps(config, dataset.passes)
    dataset.passes.check(config.data.sources, config.train.num_steps)
    if config.sample.prompt is not None:
        encode_prompt(dataset.tokenizer, config.sample.prompt, config.data.seq_len)
        if Prompt(config.sample.prompt).has_special(dataset.tokenizer):
            console.log("note       sample.prompt: special tokens in it are read as text")
    epochs = dataset.epochs(config.train.num_steps, beginning.passed_over)
    of_sources = ", ".join(f"{n:.2f} of {key}" for key, n in epochs.items())
    console.log(f"epochs     {of_sources} in {config.train.num_steps:,} steps")
    if (example := find_example(dataset)) is not None:
        print_example(*example)
    return config, dataset


def with_steps(config: Config, passes: Passes) -> Config:
    """Returns the run with the number of steps that `train.num_epochs` takes, and logs how it comes about.

    Raises:
        ConfigError: other settings need more steps.
    """
    num_epochs, train = config.train.num_epochs, config.train
    if num_epochs is None:
        return config
    num_steps = passes.num_steps(num_epochs)
    rows = " or ".join(dict.fromkeys(f"{passes.rows_of(stage):,}" for stage in passes.stages))
    sizes = (train.batch_phases[0].batch_size, train.global_batch_size)
    per_step = " to ".join(dict.fromkeys(f"{size:,}" for size in sizes))
    arithmetic = f"{num_epochs:g} epochs x {rows} rows / {per_step} rows per step"
    console.log(f"steps      {arithmetic} = {num_steps:,} steps, rounded up")
    return config.changed({"train.num_steps": num_steps, "train.num_epochs": None})


def compile_all(config: Config, abstract: TrainState, watchdog: Watchdog) -> tuple[Programs, Replicas]:
    """Compiles the training step for each length of rows, and the comparison of replicas; all processes call this
    together."""
    watchdog.begin("compile")
    runs = resolve_stages(config)
    run_dir = Path(config.run_dir).expanduser().absolute()
    same = (str(run_dir), os.path.expanduser(config.data.cache_dir), os.environ.get("XLA_FLAGS"))
    compilation_cache.start(config.xla.compilation_cache, say, run=repr(same))
    return Programs(config, runs), Replicas(config.recovery, abstract)


def train_to_the_end(trainer: Trainer, beginning: Beginning, outset: Outset) -> tuple[TrainState, bool]:
    """Trains to the last step or a request to stop; goes back to an earlier checkpoint when a step goes wrong.

    Returns:
        The last state, and whether a request stopped the run.
    """
    config, watchdog, checkpointer = trainer.config, trainer.watchdog, trainer.checkpointer
    watchdog.begin("load")
    restored = None if beginning.found is None else beginning.found.read()
    passed_over: tuple[PassedOver, ...] = beginning.passed_over
    if jax.process_index() == 0:
        write_config(outset.asked, Path(config.run_dir).expanduser() / "config.yaml")
    watchdog.begin("load")
    console.log(f"start      {beginning.described(config)}")
    console.log(f"peak       {peak_flops(config.model.compute_dtype)}")
    with trainer.stop.at_end_of_step():
        while True:
            trainer = with_reference(trainer, passed_over)
            start = beginning.start_from(restored, config, passed_over)
            checkpointer.go_on_from(start.step)  # before its logs are cut
            everyones("ready")  # the first collective of devices waits half a minute at most
            try:
                return trainer.train(start)
            except GoBack as error:
                bad = error.with_traceback(None)  # the frames hold the state that went wrong
                del start, restored  # they hold the state that it began with
            watchdog.begin("load")
            restored, passed_over = go_back(bad, config, outset.abstract.as_saved(), checkpointer, passed_over)


def with_reference(trainer: Trainer, passed_over: Sequence[PassedOver]) -> Trainer:
    """Returns the trainer with the log-probabilities of the reference where the objective needs them; what is missing is
    computed before the run has a state on the devices. All processes call this together."""
    config = trainer.config
    if config.objective.reference_of(config.adapters) != "cached":
        return trainer

    def load() -> Llama:
        return first_state(config, open_first_weights(config)).model

    dataset = reference.with_reference(config, trainer.dataset, passed_over, trainer.num_eval_rows, load)
    return dataclasses.replace(trainer, dataset=dataset)


def check_rewards(config: Config, rewards: Rewards | None) -> None:
    """Raises `ConfigError` if the run needs reward functions, or has no use for them."""
    if config.objective.is_on_policy and rewards is None:
        raise ConfigError("objective.kind: grpo needs reward functions; name a Python file that has them: --rewards FILE")
    if rewards is not None and not config.objective.is_on_policy:
        raise ConfigError(f"--rewards: has no effect with objective.kind={config.objective.kind}; set grpo, or remove it")


def with_rewards(trainer: Trainer, beginning: Beginning, rewards: Rewards) -> Trainer:
    """Returns the trainer with what it needs to write and reward completions, the weights of the reference among it.

    Raises:
        UserError: the weights of the start cannot be read, or are others than those that the run started from.
    """
    config, tokenizer, files = trainer.config, trainer.dataset.tokenizer, trainer.dataset.files
    console.log(f"rewards    {rewards.described}; the code in {rewards.source} runs as part of this command")
    template = None
    if TEMPLATE_FILE in files:
        template = ChatTemplate(files[TEMPLATE_FILE].decode(), tokenizer, TEMPLATE_FILE)
    pretrained, held, meta = open_first_weights(config), None, trainer.meta
    if config.objective.holds_reference(config.adapters):
        dtype = config.model.compute_dtype
        held = jax.jit(lambda model: jax.tree.map(lambda x: x.astype(dtype), model))(first_state(config, pretrained).model)
        meta = meta | {"reference": fingerprint(held)}
        if beginning.found is not None and beginning.found.meta.get("reference", meta["reference"]) != meta["reference"]:
            raise CheckpointError(
                f"init_from: {config.init_from} holds other weights than those that the run in {config.run_dir} started"
                " from, which its reference needs; name these, or choose another run_dir"
            )
    on_policy = OnPolicy(rewards=rewards, end_ids=find_ends(pretrained.ends(), tokenizer, template), held=held)
    return dataclasses.replace(trainer, on_policy=on_policy, meta=meta)


def write_sample(config: Config, state: TrainState, dataset: Dataset) -> None:
    """Prints the trained model's continuation of `sample.prompt`, if one is set."""
    if config.sample.prompt is None:
        return
    on, model, key = jax.sharding.get_mesh(), state.weights, state.rng
    if on.shape["pipeline"] > 1:
        on, model, key = _without_stages(config, state)
    with jax.set_mesh(on):
        pieces = stream_text(
            whole_over_data(model, config.model.compute_dtype),
            dataset.tokenizer,
            config.sample.prompt,
            max_tokens=config.sample.max_tokens,
            temperature=config.sample.temperature,
            key=key,
            seq_len=config.data.seq_len,
        )
        console.log("sample")
        console.print_stream(config.sample.prompt, pieces)


def _without_stages(config: Config, state: TrainState) -> tuple[jax.sharding.Mesh, Llama, jax.Array]:
    """Returns the weights and the key of a pipelined run on a mesh for generation, which has no stages: layers are split
    along `fsdp` instead, where that divides them, or devices along `data` have copies."""
    meshes = [mesh.without_stages(jax.sharding.get_mesh(), axis) for axis in ("fsdp", "data")]
    on = next((on for on in meshes if not state.model.config.undivided(on.shape)), meshes[-1])
    with jax.set_mesh(on):
        like = concretise(jax.eval_shape(functools.partial(init_state, config)).model)
        model = jax.tree.map(lambda weight, like: jax.device_put(weight, like.sharding), state.model, like)
        return on, model, jax.device_put(state.rng, jax.NamedSharding(on, jax.P()))


def main(config: Config, *, rewards: str | None = None, dry_run: bool) -> None:
    """Trains and ends the process; `rewards` is a Python file with reward functions."""
    code = exit_code(
        lambda: run(config, rewards=None if rewards is None else load_rewards(Path(rewards).expanduser()), dry_run=dry_run),
        memory_remedy="model.remat: full, more train.grad_accum_steps, or a larger mesh.fsdp or mesh.tensor",
        disk=config.run_dir,
        disk_remedy="check the disk and run the same command again",
    )
    process_ends(config.watchdog)
    end_process(code, distributed=config.distributed.enabled)
