"""Runs EleutherAI's lm-evaluation-harness (extra `eval`) on a Llama: log-likelihoods and continuations, without torch.

Rows are padded to few lengths, so that few programs are compiled. All processes of a run get the same requests and compute
the same answers.
"""

# The harness is optional.
# pyright: reportMissingImports=false

import difflib
import json
import os
import random
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window, make_table

from llamajax.config.evaluate import EvaluateConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import num_parts
from llamajax.data.chat.chat_template import ChatTemplate, load_chat_template
from llamajax.data.documents.messages import Message
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import ConfigError, DataError
from llamajax.evaluation.document_loss import whole_batch
from llamajax.evaluation.scoring import row_length, score
from llamajax.generation.completion import Completer
from llamajax.generation.prompts import find_ends
from llamajax.generation.sampling import Sampling
from llamajax.model import Llama
from llamajax.parallel.sharding import spec
from llamajax.step.batch import IGNORE, check_ids
from llamajax.watch import console
from llamajax.watch.console import say
from llamajax.weights.loading import load_model
from llamajax.weights.pretrained import Pretrained

ROWS_PER_DEVICE = 8
"""Number of rows at once on each device that shares a batch, unless `batch_size` sets it."""
MAX_NEW_TOKENS = 256
"""Number of tokens to generate if a task sets no limit; the harness's own default."""
RANDOM_SEED, EXAMPLES_SEED = 0, 1234
"""Seeds of the harness itself, so that the same examples are shown."""

_GENERATION_SETTINGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p")


def evaluate_tasks(
    config: EvaluateConfig, pretrained: Pretrained, model_config: ModelConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Prints the harness's table of the tasks that `config` names; returns its results, ready for JSON.

    Args:
        config: what to evaluate.
        pretrained: the location of the model.
        model_config: configuration of the model, with the types to compute in.
        tokenizer: tokenizer of the model.

    Raises:
        ConfigError: a task does not exist, or does not work with this model.
        DataError: files or data of a task cannot be read.
    """
    template = load_chat_template(pretrained.files, tokenizer) if config.apply_chat_template else None
    if config.apply_chat_template and template is None:
        raise ConfigError(f"apply_chat_template: {pretrained.files} has no chat template; put chat_template.jinja there")
    end_ids = find_ends(pretrained.ends(), tokenizer, template)
    random.seed(RANDOM_SEED)
    np.random.seed(EXAMPLES_SEED)  # noqa: NPY002  (the harness draws from it)
    tasks = load_tasks(config)
    limit: Any = config.limit  # may be a share, despite the harness's type
    results: Any = evaluate(
        lm=LlamaLM(
            load_model(pretrained, model_config),
            tokenizer,
            template=template,
            end_ids=end_ids,
            max_seq_len=config.seq_len or model_config.max_seq_len,
            batch_size=whole_batch(config.batch_size or ROWS_PER_DEVICE * num_parts("batch", jax.sharding.get_mesh().shape)),
        ),
        task_dict=tasks,
        limit=limit,
        log_samples=config.log_samples,
        system_instruction=config.system,
        apply_chat_template=config.apply_chat_template,
        fewshot_as_multiturn=config.apply_chat_template,
    )
    for kind in ("results", "groups"):
        if kind in results:
            console.log(make_table(results, kind))
    return json.loads(json.dumps(results, default=handle_non_serializable))


def load_tasks(config: EvaluateConfig) -> Any:
    """Loads the tasks that `config` names, with their data, in the form that `lm_eval.evaluator.evaluate` takes.

    Raises:
        ConfigError: there is no such task, or it needs features of the harness's own command.
        DataError: files or data of a task cannot be read.
    """
    assert config.tasks is not None
    names = [name.strip() for name in config.tasks.split(",") if name.strip()]
    manager = None
    if config.include_path is not None:
        path = Path(os.path.expanduser(config.include_path))
        if not path.is_dir():
            raise ConfigError(f"include_path: {path} is not a directory; name the one with the YAML files of your tasks")
        manager = TaskManager(include_path=str(path), include_defaults=False)
    if manager is None or not set(names) <= set(manager.all_subtasks):
        manager = TaskManager(include_path=config.include_path)  # takes seconds: thousands of files
    for name in names:
        if not manager.match_tasks([name]):
            close = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"did you mean {close[0]}?" if close else "`lm-eval ls tasks` lists them all"
            raise ConfigError(f"tasks: {name!r} is not a task, group or tag of lm-evaluation-harness; {hint}")
    try:
        loaded = manager.load(manager.match_tasks(names))
    except Exception as error:  # from the network, from files, or from a task's own code
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"tasks: cannot be loaded: {type(error).__name__}: {reason}; correct this and try again") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            why = "runs code that the model writes" if getattr(task, "UNSAFE_CODE", False) else "shows the model images"
            raise ConfigError(f"tasks: {name} {why}; leave it out, or export the model and use the harness's own command")
        default = task.get_config("num_fewshot")
        if default is None or (config.num_fewshot is not None and default != 0):  # 0 in a task's file is intentional
            task.set_config(key="num_fewshot", value=config.num_fewshot or 0)
        task.set_fewshot_seed(seed=EXAMPLES_SEED)
    return loaded


class LlamaLM(TemplateLM):
    """Adapter of a model for the harness; see lm_eval.api.model.TemplateLM.

    A text starts as the tokenizer starts prompts. Special tokens written in it are plain text, unless a chat template wrote
    it.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None,
        end_ids: Collection[int],
        max_seq_len: int,
        batch_size: int,
    ) -> None:
        """Creates the adapter.
        Args:
            model: the model, on the current mesh.
            tokenizer: tokenizer of the model.
            template: chat template for every prompt, if the harness applies one.
            end_ids: tokens that end a generated text.
            max_seq_len: maximum length of a row in tokens; longer contexts lose their beginning.
            batch_size: number of rows at once; a multiple of the devices that share a batch.
        """
        super().__init__()
        self._model, self._tokenizer, self._template = model, tokenizer, template
        self._end_ids, self._max_seq_len, self._batch_size = end_ids, max_seq_len, batch_size
        self._seq_shards = num_parts("seq", jax.sharding.get_mesh().shape)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context."""
        return self._tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        """Hashes of tokenizer and template, by which the harness recognizes its stored requests."""
        return self._tokenizer.sha256 + (self._template.sha256 if self._template else "")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the template's text."""
        return self._template.text if self._template and chat_template else None

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """Returns the conversation as text; without a generation prompt, the last message stays open for continuation."""
        assert self._template is not None
        text = self._template.render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the tokens of a text.

        Unless `add_special_tokens` says otherwise, a text that no template wrote starts as the tokenizer starts prompts.
        """
        has_template = self._template is not None
        encode = self._tokenizer.encode_template_parts if has_template else self._tokenizer.encode_batch
        is_begun = not has_template if add_special_tokens is None else add_special_tokens
        return [*(self._tokenizer.prefix if is_begun else ()), *encode([string])[0].tolist()]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Returns (log-likelihood, whether greedy decoding produces it) for each continuation after its context."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = []
        for (_, text), context, targets in requests:
            if len(targets) > self._max_seq_len:
                raise ConfigError(
                    f"seq_len: {self._max_seq_len} is below the {len(targets)} tokens of the answer {text[:40]!r}; raise it"
                )
            rows.append((np.array((context + targets)[-self._max_seq_len - 1 :], np.int32), len(targets)))
        longest_first = sorted(range(len(rows)), key=lambda number: -len(rows[number][0]))
        batches = [longest_first[at : at + self._batch_size] for at in range(0, len(rows), self._batch_size)]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for batch in console.track(batches, len(batches), "scoring"):
            logprobs, greedy = self._score([rows[number] for number in batch])
            for number, logprob, is_greedy in zip(batch, logprobs.tolist(), greedy.tolist(), strict=False):
                results[number] = logprob, is_greedy
        return results

    def _score(self, rows: Sequence[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Calls `score` on a batch of (text, number of its last tokens that are targets); returns fp32 and bool
        [batch_size]."""
        T = row_length(max(len(ids) for ids, _ in rows) - 1, self._seq_shards)
        tokens = np.zeros((self._batch_size, T), np.int32)
        targets = np.full((self._batch_size, T), IGNORE, np.int32)
        for row, (ids, num_targets) in enumerate(rows):
            check_ids(ids, self._model.config.vocab_size, "tasks", "the tokenizer has tokens that the model lacks")
            end = len(ids) - 1
            tokens[row, :end] = ids[:-1]
            targets[row, end - num_targets : end] = ids[len(ids) - num_targets :]
        placed = (jax.device_put(array, spec("batch", "seq")) for array in (tokens, targets))
        logprobs, greedy = score(self._model, *placed)
        return np.asarray(logprobs), np.asarray(greedy)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Returns the log-likelihood of each text, starting after its beginning token, in rows of the maximum length."""
        windows: list[tuple[int, list[int], list[int]]] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.arguments[0], add_special_tokens=False)
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self._max_seq_len, context_len=1)
            windows += [(number, *make_disjoint_window((before, targets))) for before, targets in rolling]
        scores = self._loglikelihood_tokens([(("", ""), context, targets) for _, context, targets in windows])
        sums = [0.0] * len(requests)
        for (number, _, _), (logprob, _) in zip(windows, scores, strict=True):
            sums[number] += logprob
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Returns the continuation of each context, up to the first of its stop texts."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.arguments[1], sort_keys=True), []).append(number)
        texts = [""] * len(requests)
        for settings, numbers in groups.items():
            written = self._generate([requests[number].arguments[0] for number in numbers], json.loads(settings))
            for number, text in zip(numbers, written, strict=True):
                texts[number] = text
        return texts

    def _generate(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        """Returns the continuations of contexts with the same `generation_kwargs` of a task."""
        settings = dict(normalize_gen_kwargs(settings, MAX_NEW_TOKENS))
        if unknown := sorted(settings.keys() - set(_GENERATION_SETTINGS)):
            say(f"warning    generation_kwargs: {', '.join(unknown)} of the task are ignored")
        max_tokens = settings["max_gen_toks"]
        longest_context = self._max_seq_len - max_tokens
        if longest_context < 1:
            raise ConfigError(
                f"seq_len: {self._max_seq_len} leaves no room before the {max_tokens} tokens that a task writes; raise it,"
                " or lower max_gen_toks in the task"
            )
        filters = {name: settings.get(name) for name in ("top_k", "top_p", "min_p")}
        temperature = float(settings.get("temperature", 0.0)) if settings["do_sample"] else 0.0
        completer = Completer(
            self._model,
            self._tokenizer,
            sampling=Sampling(temperature=temperature, **filters),
            key=jax.random.key(0),
            max_seq_len=self._max_seq_len,
            end_ids=self._end_ids,
        )
        # A task may request several continuations of one context, which differ only by sampling.
        counts = Counter(contexts)
        num_samples = max(counts.values()) if temperature else 1
        prompts = [(self.tok_encode(context) or [self.prefix_token_id])[-longest_context:] for context in counts]
        pieces = completer.complete(
            prompts,
            max_tokens=max_tokens,
            stop=[text for text in settings["until"] if text],
            num_samples=num_samples,
            batch_size=self._batch_size,
        )
        finished = ((piece.row, piece.completion.text) for piece in pieces if piece.completion)
        texts = dict(console.track(finished, len(prompts) * num_samples, "generating"))
        samples = {context: cycle(range(p * num_samples, (p + 1) * num_samples)) for p, context in enumerate(counts)}
        return [texts[next(samples[context])] for context in contexts]
