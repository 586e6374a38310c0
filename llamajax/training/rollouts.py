"""Completions of the model that is being trained: written, rewarded, and made into the batches of the next steps."""

import contextlib
import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jaxtyping import Float32

from llamajax.config.objective import ObjectiveConfig
from llamajax.config.run import Config
from llamajax.data.rows.dataset import Dataset
from llamajax.data.rows.loader import make_batch
from llamajax.data.rows.packing import Row, fill_row
from llamajax.data.rows.position import PassedOver, next_row, rows_read
from llamajax.data.rows.prompts import Prompt
from llamajax.errors import DataError
from llamajax.generation.completion import Completer, Completion
from llamajax.generation.sampling import Sampling
from llamajax.model import Llama
from llamajax.parallel.zero import whole_over_data
from llamajax.processes import peers
from llamajax.step.batch import FIELDS, IGNORE, Batch, batch_sharding, fields
from llamajax.step.policy import completion_log_probs
from llamajax.step.state import TrainState
from llamajax.training.rewards import Rewards, Scored

FILE = "rollout.npz"
"""File of a checkpoint with the completions that steps after it train on."""
_OF_EVALUATION = 2**31 - 1
_LEAST_DEVIATION = 1e-4
"""Added to a group's standard deviation, as TRL does."""


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Reward functions, end tokens and reference weights: all that a rollout needs beside the model that is trained."""

    rewards: Rewards
    end_ids: frozenset[int]
    """Tokens that end a completion."""
    held: Llama | None
    """Weights of the reference; None: those below the adapters, or no reference."""


class Rewarded(NamedTuple):
    """Completions of prompts, `group_size` of each, one after the other."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    of_functions: Float32[np.ndarray, "N F"]
    """Reward of each completion by each function; NaN where the function returns None."""
    rewards: Float32[np.ndarray, "N"]
    """Their weighted sums."""

    @property
    def group_size(self) -> int:
        """Completions of a prompt."""
        return len(self.completions) // len(self.prompts)


class Rollouts:
    """Batches of the run's own completions, in place of a `Loader`. All processes call every method together."""

    wait_s = 0.0
    """Seconds that the last batch was waited for: none, since the loop counts the time of a rollout apart."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        on_policy: OnPolicy,
        passed_over: Sequence[PassedOver],
        saved: bytes | None,
    ) -> None:
        """Starts with the completions in `saved`, the `FILE` of a checkpoint, or without any."""
        self._config, self._dataset, self._on_policy, self._passed_over = config, dataset, on_policy, passed_over
        self._datasets = [dataset.of_stage(number) for number in range(len(config.data.all_stages))]
        self._steps: dict[int, tuple[list[Row], dict[str, float]]] = {}
        self._completer: Completer | None = None
        if saved is not None:
            self._steps = _unpacked(saved)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._steps = {}

    def is_due(self, step: int) -> bool:
        """Returns whether the step after `step` finished steps needs new completions."""
        return self._first_row(step) not in self._steps

    def write(
        self, step: int, state: TrainState, tell: Callable[[str], object], is_stopping: Callable[[], bool]
    ) -> tuple[Prompt, Completion, float] | None:
        """Writes and rewards the completions of the next `objective.rollout.steps` steps.

        Args:
            step: number of finished steps.
            state: the state after them.
            tell: receives how far it is, for people.
            is_stopping: called after every token; once it returns True, all completions of the rollout are given up.

        Returns:
            For people, the first prompt, the best of its completions, and the reward of that; None if `is_stopping`.

        Raises:
            DataError: a reward function fails.
        """
        config, objective = self._config, self._config.objective
        last = min(step + objective.rollout.steps, config.train.num_steps)
        prompts: list[Prompt] = []
        for of_step in range(step, last):
            dataset, first = self._datasets[config.data.stage_at(of_step)], self._first_row(of_step)
            prompts += map(dataset.prompt, range(first, first + objective.rows_of_data(config.train.global_batch_size)))
        found = self._rewarded(prompts, objective.rollout.group_size, state, step, tell, is_stopping)
        if found is None:
            return None
        rows = rows_of(objective, found, config.data.seq_len)
        self._add_log_probs(rows, state)
        size, self._steps = config.train.global_batch_size, {}
        for number, of_step in enumerate(range(step, last)):
            own = slice(number * size, (number + 1) * size)
            self._steps[self._first_row(of_step)] = rows[own], _metrics(self._on_policy.rewards, found, own)
        best = int(np.argmax(found.rewards[: found.group_size]))
        return found.prompts[0], found.completions[best], float(found.rewards[best])

    def take(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Returns the batch of the step after `step` finished steps, and metrics of its completions."""
        rows, metrics = self._steps.pop(self._first_row(step))
        train = self._config.train
        shape = (train.grad_accum_steps, train.micro_batch_size, self._config.data.seq_len)
        return self._batch(rows, shape, fields(self._config)), metrics

    def files(self) -> dict[str, bytes]:
        """Returns what a checkpoint has to keep, by file name: the completions that are not trained on yet."""
        return {FILE: _packed(self._steps)} if self._steps else {}

    def evaluate(
        self,
        state: TrainState,
        dataset: Dataset,
        num_prompts: int,
        tell: Callable[[str], object],
        is_stopping: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Returns the metrics of one completion of each of the first held-out prompts, every time with the same draws; None
        if there are none, or if `is_stopping`. The last two arguments are those of `write`."""
        prompts = [dataset.held_out_prompt(number) for number in range(min(num_prompts, len(dataset.held_out_rows)))]
        found = self._rewarded(prompts, 1, state, _OF_EVALUATION, tell, is_stopping) if prompts else None
        return None if found is None else _metrics(self._on_policy.rewards, found, slice(None))

    def _first_row(self, step: int) -> int:
        return next_row(step, rows_read(self._config), self._passed_over)

    def _rewarded(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        state: TrainState,
        draw: int,
        tell: Callable[[str], object],
        is_stopping: Callable[[], bool],
    ) -> Rewarded | None:
        """Writes `group_size` completions of each prompt with the draws of number `draw`, and rewards them."""
        rollout, config = self._config.objective.rollout, self._config
        key = jax.random.fold_in(state.rng, draw)
        model = whole_over_data(state.weights, config.model.compute_dtype)
        if self._completer is None:
            self._completer = Completer(
                model, self._dataset.tokenizer, key=key, max_seq_len=config.data.seq_len, end_ids=self._on_policy.end_ids,
                sampling=Sampling(temperature=rollout.temperature, top_p=rollout.top_p),
            )  # fmt: skip
        pieces = self._completer.with_model(model, key).complete(
            [prompt.ids for prompt in prompts], max_tokens=rollout.max_tokens, num_samples=group_size,
            batch_size=rollout.batch_size or config.train.micro_batch_size, apart=True,
        )  # fmt: skip
        by_row, number = dict[int, Completion](), len(prompts) * group_size
        for piece in pieces:
            if is_stopping():
                return None
            if piece.completion is not None:
                by_row[piece.row] = piece.completion
                tell(f"writing completions, {len(by_row):,} of {number:,}")
        tell("rewarding completions")
        completions = [by_row[row] for row in range(number)]
        own = self._rewards(prompts, completions) if peers.rank() == 0 else None
        # Functions of the user may draw, or ask others: what they give is that of process 0.
        told = peers.of_first(own)
        if "error" in told:
            raise DataError(told["error"])
        of_functions = np.array(told["rewards"], np.float32)  # None becomes NaN
        return Rewarded(prompts, completions, of_functions, self._on_policy.rewards.total(of_functions))

    def _rewards(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> dict[str, Any]:
        """Returns the functions' rewards, or the error of one."""
        several = len(completions) // len(prompts)
        each = [prompt for prompt in prompts for _ in range(several)]
        scored = Scored(
            [prompt.said for prompt in each],
            [_as_said(prompt, completion.text) for prompt, completion in zip(each, completions, strict=True)],
            [list(completion.tokens) for completion in completions],
            [prompt.record for prompt in each],
        )
        try:
            found = self._on_policy.rewards.of(scored)
        except DataError as error:
            return {"error": str(error)}
        return {"rewards": [[None if np.isnan(value) else float(value) for value in of_one] for of_one in found]}

    def _add_log_probs(self, rows: list[Row], state: TrainState) -> None:
        """Adds the log-probabilities that the objective needs to the rows."""
        config, wanted = self._config, fields(self._config)
        models: dict[str, Llama] = {"old": state.weights} if "old" in wanted else {}
        if "reference" in wanted:
            models["reference"] = self._on_policy.held or state.weights.without_adapters()
        size = config.train.micro_batch_size
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            batch = self._batch(some, (1, size, config.data.seq_len), dict.fromkeys(FIELDS, np.int32))
            for name, model in models.items():
                for row, values in zip(some, np.asarray(completion_log_probs(config, model, batch)), strict=True):
                    row[name] = values

    def _batch(self, rows: Sequence[Row], shape: tuple[int, int, int], names: Mapping[str, Any]) -> Batch:
        def row(a: int, i: int) -> Row:
            return {name: values for name, values in rows[a * shape[1] + i].items() if name in names}

        return make_batch(row, shape, batch_sharding(), self._config.model.vocab_size, names)


def _as_said(prompt: Prompt, text: str) -> Any:
    """Returns a completion in the form of its prompt: a text, or messages."""
    return text if isinstance(prompt.said, str) else [{"role": "assistant", "content": text}]


def advantages(objective: ObjectiveConfig, rewards: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    """Returns how much better each completion is than its group, in standard deviations of the group unless
    `scale_rewards` is off (arXiv:2402.03300, section 4.1.2)."""
    groups = rewards.reshape(-1, objective.rollout.group_size)
    above = groups - groups.mean(axis=1, keepdims=True)
    if objective.scale_rewards:
        above /= groups.std(axis=1, ddof=1, keepdims=True) + _LEAST_DEVIATION
    return above.reshape(-1).astype(np.float32)


def rows_of(objective: ObjectiveConfig, found: Rewarded, seq_len: int) -> list[Row]:
    """Returns a row for every completion: prompt and completion, the tokens of which are its targets, with advantages."""
    rows: list[Row] = []
    above = advantages(objective, found.rewards)
    for number, (completion, advantage) in enumerate(zip(found.completions, above, strict=True)):
        prompt = found.prompts[number // found.group_size].ids
        ids = np.array([*prompt, *completion.tokens], np.int32)
        row = fill_row([ids], seq_len, [np.arange(1, len(ids)) >= len(prompt)])
        row["advantages"] = np.where(row["targets"] != IGNORE, advantage, np.float32(0))
        rows.append(row)
    return rows


def _metrics(rewards: Rewards, found: Rewarded, own: slice) -> dict[str, float]:
    """Returns the metrics of some completions."""
    completions, of_functions = found.completions[own], found.of_functions[own]
    groups = found.rewards[own].reshape(-1, found.group_size)
    told = {
        "reward": float(groups.mean()),
        **({"reward_std": float(groups.std(axis=1).mean())} if found.group_size > 1 else {}),
        "completion_tokens": float(np.mean([len(completion.tokens) for completion in completions])),
        "truncated": float(np.mean([completion.finish_reason == "length" for completion in completions])),
    }
    if len(rewards.names) > 1:
        for name, column in zip(rewards.names, of_functions.T, strict=True):
            told[f"reward_of_{name}"] = float(np.nanmean(column)) if not np.isnan(column).all() else float("nan")
    return told


def _packed(steps: Mapping[int, tuple[list[Row], dict[str, float]]]) -> bytes:
    """Returns rows and metrics of steps as the contents of a file, the same for the same rows."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for first_row, (rows, metrics) in steps.items():
            arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            arrays["metrics"] = np.array(list(metrics.values()))
            arrays["names"] = np.array(list(metrics))
            for name, array in arrays.items():
                content = io.BytesIO()
                np.save(content, array)
                archive.writestr(zipfile.ZipInfo(f"{first_row}/{name}"), content.getvalue(), zipfile.ZIP_DEFLATED)
    return file.getvalue()


def _unpacked(saved: bytes) -> dict[int, tuple[list[Row], dict[str, float]]]:
    arrays: dict[int, dict[str, np.ndarray]] = {}
    with contextlib.closing(zipfile.ZipFile(io.BytesIO(saved))) as archive:
        for name in archive.namelist():
            first_row, _, field = name.partition("/")
            arrays.setdefault(int(first_row), {})[field] = np.load(io.BytesIO(archive.read(name)))
    steps = {}
    for first_row, own in arrays.items():
        metrics = dict(zip(own.pop("names").tolist(), own.pop("metrics").tolist(), strict=True))
        steps[first_row] = [{name: own[name][i] for name in own} for i in range(len(own["tokens"]))], metrics
    return steps
