"""A server of models, from their weights to its end: read `run` from top to bottom."""

import dataclasses
import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from llamajax.config.model import ModelConfig
from llamajax.config.parallel import DistributedConfig, num_parts
from llamajax.config.serve import LOOPBACK, TOKEN_VARIABLE, ServeConfig
from llamajax.config.shipped import find_file
from llamajax.data.chat.chat_template import ChatTemplate, load_chat_template
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import ConfigError
from llamajax.generation.prompts import find_ends
from llamajax.generation.run import choose_mesh, choose_types
from llamajax.model import Llama
from llamajax.parallel import compilation_cache, mesh, startup
from llamajax.parallel.zero import trained_only
from llamajax.processes.exit import end_process, exit_code
from llamajax.serving.answers import Limits
from llamajax.serving.app import Server
from llamajax.serving.engine import Engine
from llamajax.serving.listening import bind, listen
from llamajax.serving.metrics import Metrics
from llamajax.serving.models import Served
from llamajax.serving.worker import Worker
from llamajax.units import format_bytes
from llamajax.watch import console
from llamajax.watch.console import say
from llamajax.weights.beside import check_base, open_beside
from llamajax.weights.loading import load_beside, load_model
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.pretrained import Pretrained

MAX_SEQ_LEN = 8192
"""Longest sequence, unless the settings say otherwise."""
MAX_SLOTS, CPU_SLOTS = 64, 8
CACHE_SHARE = 0.8
"""Share of the memory that the weights leave free which the slots may take; the rest is for the programs."""


def run(config: ServeConfig) -> None:
    """Serves as `config` says, until a signal.

    Raises:
        UserError: one of `llamajax.errors`, when the settings, machine or models do not allow it.
    """
    listener = bind(config.host, config.port)  # before all that takes long
    startup.connect(config.mesh, DistributedConfig())
    compilation_cache.start("auto", say)
    models = load_models(config)
    server = Server(
        models=models,
        worker=Worker([served.engine for served in models.values()]),
        limits=limits_of(config),
        metrics=Metrics(models),
        token=os.environ.get(TOKEN_VARIABLE) or None,
        hosts=tuple({*LOOPBACK, config.host}),
        log=say,
    )
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    access = f"with the token in {TOKEN_VARIABLE}" if server.token else "without a token"
    ready = f"ready      {address}/v1 for {', '.join(models)}, {access}; {address} in a browser; Ctrl-C ends it"
    num_slots = sum(len(served.engine.slots) for served in models.values())
    most = num_slots + config.max_queue * len(models)
    listen(server, listener, drain_s=config.drain_s, max_requests=most, on_ready=functools.partial(say, ready))
    say("ended      at a signal")


def load_models(config: ServeConfig) -> dict[str, Served]:
    """Reads all models, makes their mesh the current one of the process, and prepares each for requests, by name.

    Raises:
        UserError: see `run`.
    """
    found = {name: open_pretrained(path) for name, path in config.models.items()}
    for pretrained in found.values():
        pretrained.check_predicts()
    types = {name: choose_types(config, pretrained.config) for name, pretrained in found.items()}
    base = next(iter(found))
    of_base = {key: getattr(types[base], key) for key in ("param_dtype", "compute_dtype")}
    for name, path in config.adapters.items():
        found[name] = open_beside(path, found[base], of_base["param_dtype"])
        types[name] = dataclasses.replace(found[name].config, **of_base)
    jax.set_mesh(mesh.make_mesh(choose_mesh(config.mesh, types[base], jax.device_count())))
    say(f"devices    {console.devices()}")
    parents = dict.fromkeys(config.adapters, base)
    opened = [check(config, name, found[name], types[name], parents.get(name)) for name in found]
    weights = dict[str, Llama]()
    for each in opened:  # the base is the first
        weights[each.name] = load(each) if each.parent is None else attach(each, weights[each.parent])
    room = room_for_slots(len(opened))
    return {each.name: serve(config, each, weights[each.name], room) for each in opened}


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model that can be served; its weights are not read yet."""

    name: str
    parent: str | None
    """Name of the model that it adds to with adapters; None: it is a whole model."""
    pretrained: Pretrained
    config: ModelConfig
    """The model, with the types of weights and computation."""
    max_seq_len: int
    """Number of tokens of a slot."""
    tokenizer: Tokenizer
    template: ChatTemplate | None


def check(config: ServeConfig, name: str, pretrained: Pretrained, model_config: ModelConfig, parent: str | None) -> Opened:
    """Checks all of a model but its weights.

    Raises:
        ConfigError: the settings or the mesh do not suit the model.
        DataError: its tokenizer or chat template cannot be read.
    """
    if parent is None:
        say(f"model      {name}: {pretrained.about}")
    if problems := model_config.undivided(jax.sharding.get_mesh().shape):
        raise ConfigError("\n".join(f"{name}: {problem}; serve it alone, or choose another mesh" for problem in problems))
    tokenizer = pretrained.tokenizer()
    template_at = pretrained.files if config.chat_template is None else Path(find_file(config.chat_template))
    max_seq_len = config.max_seq_len or min(MAX_SEQ_LEN, model_config.max_seq_len)
    if max_seq_len > model_config.max_seq_len:
        rule = f"is more than the {model_config.max_seq_len} tokens that {name} is meant for"
        raise ConfigError(f"max_seq_len: {max_seq_len} {rule}; lower it")
    return Opened(
        name=name,
        parent=parent,
        pretrained=pretrained,
        config=model_config,
        max_seq_len=max_seq_len,
        tokenizer=tokenizer,
        template=load_chat_template(template_at, tokenizer),
    )


def load(opened: Opened) -> Llama:
    """Reads the weights of a model onto the mesh.

    Raises:
        CheckpointError: they are damaged.
    """
    started = time.monotonic()
    weights = load_model(opened.pretrained, opened.config)
    jax.block_until_ready(weights)
    say(f"loaded     {opened.name} in {time.monotonic() - started:.1f} s")
    return weights


def attach(opened: Opened, base: Llama) -> Llama:
    """Reads adapters onto the mesh; the model that it returns has the very arrays of the base.

    Raises:
        CheckpointError: they are damaged.
        ConfigError: a run trained them beside other weights.
    """
    adapters = opened.pretrained.adapters
    assert adapters is not None
    started = time.monotonic()
    check_base(opened.pretrained, base, opened.config.param_dtype)
    weights = load_beside(opened.pretrained, opened.config, base)
    size = format_bytes(sum(x.nbytes for x in jax.tree.leaves(trained_only(weights))))
    about = f"{opened.pretrained.source}: {adapters.about}; {size} beside {opened.parent}"
    say(f"adapter    {opened.name}: {about}, loaded in {time.monotonic() - started:.1f} s")
    return weights


def serve(config: ServeConfig, opened: Opened, weights: Llama, room: float | None) -> Served:
    """Creates the slots of a model and compiles its programs.

    Args:
        config: the settings.
        opened: the model.
        weights: its weights, on the current mesh.
        room: bytes of each device for its slots; None: unknown.

    Raises:
        ConfigError: there is no room for a single slot.
    """
    started = time.monotonic()
    engine = Engine(
        weights,
        vocab_size=opened.tokenizer.vocab_size,
        num_slots=config.slots or choose_slots(opened.config, opened.max_seq_len, room),
        max_seq_len=opened.max_seq_len,
        tokens_per_step=config.tokens_per_step,
        shares=config.share_prefixes,
    )
    size = format_bytes(engine.cache_bytes)
    say(f"slots      {opened.name}: {len(engine.slots)} of {opened.max_seq_len:,} tokens, {size}; compiling")
    engine.compile()
    say(f"compiled   {opened.name} in {time.monotonic() - started:.1f} s")
    if opened.template is None:
        rule = "has no chat template: /v1/chat/completions needs one, and the page continues texts"
        say(f"note       {opened.name} {rule}; --chat_template names one")
    return Served(
        name=opened.name,
        parent=opened.parent,
        engine=engine,
        tokenizer=opened.tokenizer,
        template=opened.template,
        end_ids=find_ends(opened.pretrained.ends(), opened.tokenizer, opened.template),
        num_rows=opened.config.vocab_size,
        parse_special=config.parse_special,
    )


def room_for_slots(num_models: int) -> float | None:
    """Returns the bytes of each device that the slots of each model may take beside all weights; None on CPUs."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return (stats["bytes_limit"] - stats["bytes_in_use"]) * CACHE_SHARE / num_models


def choose_slots(model: ModelConfig, max_seq_len: int, room: float | None) -> int:
    """Returns the number of slots for which the devices have room.

    Args:
        model: the model.
        max_seq_len: number of tokens of a slot.
        room: bytes of each device for them; None: unknown.

    Raises:
        ConfigError: there is no room for a single one.
    """
    if room is None:
        return CPU_SLOTS
    sizes = jax.sharding.get_mesh().shape
    return slots_in(room, slot_bytes(model, max_seq_len, sizes), num_parts("batch", sizes), max_seq_len)


def slot_bytes(model: ModelConfig, max_seq_len: int, sizes: Mapping[str, int]) -> int:
    """Returns the size of a slot on each of the devices that share it, on a mesh with axes of these sizes."""
    heads = model.computed_kv_heads(sizes) // num_parts("kv_heads", sizes)
    tokens = -(-max_seq_len // num_parts("seq", sizes))
    return 2 * model.num_layers * heads * tokens * model.head_dim * jnp.dtype(model.compute_dtype).itemsize


def slots_in(free: float, of_slot: int, batch_parts: int, max_seq_len: int) -> int:
    """Returns how many slots of a size fit into the free memory of each device, over all devices that share a batch."""
    per_device = min(int(free // of_slot), MAX_SLOTS // batch_parts or 1)
    if per_device < 1:
        raise ConfigError(
            f"max_seq_len: a slot of {max_seq_len:,} tokens takes {format_bytes(of_slot)} of each device, which has"
            f" {format_bytes(int(max(0, free)))} for it; lower it"
        )
    return per_device * batch_parts


def limits_of(config: ServeConfig) -> Limits:
    """Returns what a request may take."""
    return Limits(
        max_body_bytes=config.max_body_bytes,
        max_tokens=config.max_tokens,
        max_queue=config.max_queue,
        max_time_s=config.max_time_s,
    )


def main(config: ServeConfig) -> None:
    """Serves and ends the process."""
    code = exit_code(
        functools.partial(run, config),
        memory_remedy="fewer slots, a smaller max_seq_len, param_dtype: bfloat16, or a larger mesh.tensor or mesh.fsdp",
        disk=next(iter(config.models.values())),
        disk_remedy="check the disk",
    )
    end_process(code, distributed=False)
