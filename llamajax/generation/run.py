"""Text from a model, from prompts to output: read `run` from top to bottom."""

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from llamajax.config.generate import GenerateConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.serve import ServeConfig
from llamajax.config.shipped import find_file
from llamajax.data.chat.chat_template import ChatTemplate, load_chat_template
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.disk import may_pass
from llamajax.errors import ConfigError
from llamajax.generation.completion import Completer, Completion, Piece, Stats, check_prompts
from llamajax.generation.prompts import Prompt, find_ends, read_prompts
from llamajax.generation.sampling import Sampling
from llamajax.model import Llama
from llamajax.parallel import compilation_cache, mesh, startup
from llamajax.processes.exit import end_process, exit_code
from llamajax.watch import console
from llamajax.watch.console import say
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.pretrained import Pretrained


def run(config: GenerateConfig) -> None:
    """Writes texts as `config` says.

    Raises:
        UserError: one of `llamajax.errors`, when the settings, prompts, machine or model do not allow it.
    """
    if config.is_talk and not sys.stdin.isatty():
        raise ConfigError("chat: standard input is no terminal to talk at; give a prompt, or prompts_file")
    prompts = read_all_prompts(config)
    opened = open_model(config)
    say(f"model      {opened.pretrained.about}")
    encoded = encode(config, opened, prompts)
    model_config = lay_out(config, opened)
    say(f"devices    {console.devices()}; {model_config.param_dtype}")
    loaded = load(opened, model_config)
    completer = make_completer(config, loaded, encoded)
    console.CONSOLE.ends_with_reader = config.output is None
    try:
        if config.is_talk:
            assert encoded.template is not None
            talk(config, completer, opened.tokenizer, encoded.template)
        else:
            write_texts(config, completer, prompts, encoded)
    except KeyboardInterrupt:
        print()
        say_speed(completer.stats)
        raise
    say_speed(completer.stats)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model; its weights are not read yet."""

    pretrained: Pretrained
    tokenizer: Tokenizer


@dataclass(frozen=True, kw_only=True)
class Loaded(Opened):
    """A model with its weights on the current mesh."""

    config: ModelConfig
    """The model, with the types of weights and computation."""
    weights: Llama
    """The Flax model."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Prompts as tokens, and the tokens that end a text."""

    token_ids: Sequence[Sequence[int]]
    template: ChatTemplate | None
    """Chat template, if a prompt needs one."""
    end_ids: Collection[int]
    """Tokens that end a text."""
    max_seq_len: int
    """Longest prompt with its continuation, in tokens."""


def read_all_prompts(config: GenerateConfig) -> list[Prompt]:
    """Returns the prompts of the command line or of `prompts_file`.

    Raises:
        UserError: the file cannot be read.
    """
    prompts = [Prompt(text) for text in config.prompt]
    if config.prompts_file is not None:
        prompts = read_prompts(Path(config.prompts_file).expanduser())
    return [prompt.in_chat(config.system) for prompt in prompts] if config.chat else prompts


def open_model(config: GenerateConfig) -> Opened:
    """Starts jax and opens the model without its weights.

    Raises:
        UserError: machine or model do not allow it.
    """
    startup.connect(config.mesh, config.distributed)
    compilation_cache.start("auto", say)
    pretrained = open_pretrained(config.model)
    pretrained.check_predicts()
    return Opened(pretrained=pretrained, tokenizer=pretrained.tokenizer())


def encode(config: GenerateConfig, opened: Opened, prompts: Sequence[Prompt]) -> Encoded:
    """Encodes the prompts, and checks that the model can continue each.

    Raises:
        ConfigError: the model has no chat template, or takes fewer tokens than `max_seq_len`.
        DataError: a prompt is too long, or has tokens that the model lacks.
    """
    pretrained, tokenizer, template = opened.pretrained, opened.tokenizer, None
    if config.chat or any(prompt.messages is not None for prompt in prompts):
        path = pretrained.files if config.chat_template is None else Path(find_file(config.chat_template))
        template = load_chat_template(path, tokenizer)
        if template is None:
            raise ConfigError(f"chat_template: {path} has none; name one, for example from configs/chat_templates")
    end_ids = () if config.ignore_eos else find_ends(pretrained.ends(), tokenizer, template)
    token_ids = [prompt.encode(tokenizer, template, parse_special=config.parse_special) for prompt in prompts]
    if not config.parse_special:
        for number in (number for number, prompt in enumerate(prompts, start=1) if prompt.has_special(tokenizer)):
            say(f"note       prompt {number}: special tokens in it are read as text; parse_special reads them as tokens")
    meant_for = pretrained.config.max_seq_len
    max_seq_len = config.max_seq_len or meant_for
    if max_seq_len > meant_for:
        raise ConfigError(f"max_seq_len: {max_seq_len} is more than the {meant_for} tokens that the model is meant for")
    check_prompts(token_ids, max_seq_len, pretrained.config.vocab_size)
    return Encoded(token_ids=token_ids, template=template, end_ids=end_ids, max_seq_len=max_seq_len)


def lay_out(config: GenerateConfig, opened: Opened) -> ModelConfig:
    """Makes the mesh of the model the current one of the process, and returns the model with its types.

    Raises:
        ConfigError: the model cannot be divided over the mesh.
    """
    model_config = choose_types(config, opened.pretrained.config)
    jax.set_mesh(mesh.make_mesh(choose_mesh(config.mesh, model_config, jax.device_count())))
    return model_config


def load(opened: Opened, model_config: ModelConfig) -> Loaded:
    """Reads the weights onto the current mesh.

    Raises:
        CheckpointError: the weights are damaged.
    """
    weights = load_model(opened.pretrained, model_config)
    return Loaded(pretrained=opened.pretrained, tokenizer=opened.tokenizer, config=model_config, weights=weights)


def make_completer(config: GenerateConfig, loaded: Loaded, encoded: Encoded) -> Completer:
    """Returns what writes continuations as `config` says."""
    return Completer(
        loaded.weights,
        loaded.tokenizer,
        sampling=Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p),
        key=jax.random.key(config.seed),
        max_seq_len=encoded.max_seq_len,
        end_ids=encoded.end_ids,
    )


def complete(config: GenerateConfig, completer: Completer, encoded: Encoded) -> Iterator[Piece]:
    """Continues every prompt as `config` says."""
    return completer.complete(
        encoded.token_ids,
        max_tokens=config.max_tokens,
        stop=config.stop,
        num_samples=config.num_samples,
        batch_size=config.batch_size,
    )


def choose_types(config: GenerateConfig | ServeConfig, model: ModelConfig) -> ModelConfig:
    """Returns the model with the types of weights and computation that `config` chooses."""
    compute_dtype = model.compute_dtype if config.compute_dtype == "auto" else config.compute_dtype
    param_dtype = compute_dtype if config.param_dtype == "auto" else config.param_dtype
    return dataclasses.replace(model, param_dtype=param_dtype, compute_dtype=compute_dtype)


def choose_mesh(config: MeshConfig, model: ModelConfig, num_devices: int) -> MeshConfig:
    """Returns the mesh that `config` asks for, or else the fastest one that fits any model and number of devices.

    Splitting heads splits the reading of weights, which takes most of a token's time. The remaining devices hold copies of
    the model, because weights split along `fsdp` would travel for every token.

    Raises:
        ConfigError: the model cannot be divided over the mesh that `config` asks for.
    """
    if config == MeshConfig(num_cpu_devices=config.num_cpu_devices):
        tensor = math.gcd(num_devices, model.num_kv_heads, model.mlp_dim, model.vocab_size)
        return dataclasses.replace(config, data=num_devices // tensor, fsdp=1, tensor=tensor)
    if problems := model.undivided(config.axis_sizes(num_devices)):
        raise ConfigError("\n".join(f"{problem}; leave mesh out to have it chosen" for problem in problems))
    return config


def write_texts(config: GenerateConfig, completer: Completer, prompts: Sequence[Prompt], encoded: Encoded) -> None:
    """Writes all continuations: a single one while it is generated, several as each and those before it are done."""
    num_rows = len(prompts) * config.num_samples
    pieces = complete(config, completer, encoded)
    if config.output is not None:
        with create(config.output) if jax.process_index() == 0 else contextlib.nullcontext() as output:
            for row, completion in in_order(pieces, num_rows):
                prompt, sample = prompts[row // config.num_samples], row % config.num_samples
                given = {"prompt": prompt.text} if prompt.messages is None else {"messages": prompt.messages}
                record = given | {"sample": sample} | dataclasses.asdict(completion)
                if output is not None:
                    print(json.dumps(record, ensure_ascii=False), file=output, flush=True)
    elif num_rows == 1:
        title = prompts[0].text if prompts[0].messages is None else ""
        console.print_stream(title, (piece.text for piece in pieces))
    else:
        for row, completion in in_order(pieces, num_rows):
            prompt = prompts[row // config.num_samples]
            console.print_stream(prompt.text, ["" if prompt.messages is None else "\n", completion.text, "\n"])


def create(path: str) -> TextIO:
    """Creates a file and opens it for writing.

    Raises:
        ConfigError: it cannot be created.
        OSError: the disk fails, or is full.
    """
    try:
        return Path(os.path.expanduser(path)).open("x", encoding="utf-8")
    except OSError as error:
        if may_pass(error):
            raise
        raise ConfigError(f"output: {path}: {error.strerror}; choose another file") from error


def in_order(pieces: Iterator[Piece], num_rows: int) -> Iterator[tuple[int, Completion]]:
    """Yields each row's completion once it and all earlier ones are complete; shows progress on a terminal."""
    finished: dict[int, Completion] = {}
    next_row = num_tokens = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_shown = console.is_interactive() and jax.process_index() == 0
    with Progress(*columns, console=console.CONSOLE, refresh_per_second=4, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("writing", total=num_rows)
        try:
            for piece in pieces:
                num_tokens += 1
                progress.update(task, description=f"writing, {num_tokens:,} tokens")
                if piece.completion is not None:
                    finished[piece.row] = piece.completion
                    progress.advance(task)
                if next_row in finished:
                    progress.stop()  # it would write into unfinished lines
                    while next_row in finished:
                        yield next_row, finished.pop(next_row)
                        next_row += 1
                    progress.start()
        except KeyboardInterrupt:
            progress.stop()
            yield from sorted(finished.items())
            raise


def talk(config: GenerateConfig, completer: Completer, tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """Holds a conversation at the terminal until the end of input.

    Raises:
        DataError: it is longer than the model takes.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for `input`)

    say("talk       Ctrl-C ends an answer, Ctrl-D the talk")
    messages = [] if config.system is None else [{"role": "system", "content": config.system}]
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        token_ids = Prompt(text, tuple(messages)).encode(tokenizer, template)
        answer: list[str] = []

        def told(pieces: Iterator[Piece], answer: list[str] = answer) -> Iterator[str]:
            for piece in pieces:
                answer.append(piece.text)
                yield piece.text

        try:
            pieces = completer.complete([token_ids], max_tokens=config.max_tokens, stop=config.stop)
            console.print_stream("", told(pieces))
        except KeyboardInterrupt:
            print()
        messages.append({"role": "assistant", "content": "".join(answer)})


def say_speed(stats: Stats) -> None:
    """Prints the speed of prefill and decoding, and the time of compilation."""
    if not stats.prefill_s:
        return
    parts = [f"prefill {stats.prompt_tokens:,} tokens, {stats.prompt_tokens / stats.prefill_s:,.0f} tokens/s"]
    if stats.decoded_tokens:
        parts.append(f"decode {stats.decoded_tokens:,} tokens, {stats.decoded_tokens / stats.decode_s:,.0f} tokens/s")
    say(f"speed      {'; '.join(parts)}; compiled in {stats.compile_s:.1f} s")


def main(config: GenerateConfig) -> None:
    """Generates and ends the process."""
    code = exit_code(
        lambda: run(config),
        memory_remedy="a smaller batch_size or max_tokens, param_dtype: bfloat16, or a larger mesh.tensor or mesh.fsdp",
        disk=config.output or config.model,
        disk_remedy="check the disk",
    )
    end_process(code, distributed=config.distributed.enabled)
