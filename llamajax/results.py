"""Results of the library's functions, which a notebook shows as pages."""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.text import Text

from llamajax.checkpoint.steps import steps_in
from llamajax.config.generate import GenerateConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import num_parts
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import ConfigError
from llamajax.generation.completion import Completer
from llamajax.generation.run import Encoded, Loaded, make_completer
from llamajax.model import Llama
from llamajax.parallel.sharding import spec
from llamajax.planning.plan import Plan as MadePlan
from llamajax.planning.report import picture
from llamajax.planning.report import text as plan_text
from llamajax.verification import page as verification_page
from llamajax.verification import text as verification_text
from llamajax.watch import console, run_log, run_page


def _frame(page: str, height: int) -> str:
    """Returns a whole page as an element of a notebook, with its styles kept apart."""
    return f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: {height}px; border: 0"></iframe>'


def _printed(print_report: Callable[[], object]) -> str:
    """Returns what is printed through `CONSOLE`, without colours, which a notebook asks for."""
    with console.captured() as report:
        print_report()
    return Text.from_ansi(report.getvalue()).plain.rstrip()


@dataclass(frozen=True)
class TrainResult:
    """A run after training, read from the logs in its directory; a notebook shows its curves."""

    run_dir: Path
    """Directory of the run."""

    @cached_property
    def _log(self) -> run_log.RunLog | None:
        try:
            return run_log.read_run(self.run_dir)
        except ConfigError:  # no step is finished
            return None

    @cached_property
    def _summary(self) -> run_log.RunSummary | None:
        return None if self._log is None else run_log.summarize(self._log)

    @property
    def steps(self) -> int:
        """Number of finished optimizer steps."""
        return self._summary.step if self._summary else 0

    @property
    def loss(self) -> float | None:
        """Training loss in nats per token, mean of the last 20 steps; None before the first step."""
        return self._summary.train_loss if self._summary else None

    @property
    def held_out_loss(self) -> float | None:
        """Loss on held-out documents in nats per token, newest evaluation; None without one."""
        return self._summary.eval_loss if self._summary else None

    @property
    def stop_reason(self) -> str | None:
        """`finished`, `stopped` by a signal, or an error; None before the first step."""
        return self._summary.stop_reason if self._summary else None

    @property
    def checkpoints(self) -> list[Path]:
        """Directories of the run's checkpoints, oldest first."""
        folder = self.run_dir / "checkpoints"
        return [folder / str(step) for step in steps_in(folder)]

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics by step, in order: a dictionary for each step, with `step` and the names of `metrics.jsonl`.

        `pandas.DataFrame(result.metrics)` is a table of them.
        """
        records: dict[int, dict[str, Any]] = {}
        for name, (steps, values) in self._log.series.items() if self._log else ():
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                records.setdefault(step, {"step": step})[name] = value
        return [records[step] for step in sorted(records)]

    def __repr__(self) -> str:
        losses = {"loss": self.loss, "held_out_loss": self.held_out_loss}
        shown = "".join(f", {name}={loss:.4f}" for name, loss in losses.items() if loss is not None)
        return f"TrainResult({str(self.run_dir)!r}, steps={self.steps}{shown}, stop_reason={self.stop_reason!r})"

    def _repr_html_(self) -> str | None:
        return None if self._log is None else _frame(run_page.report_page(self.run_dir, self._log), 900)


@dataclass(frozen=True, repr=False)
class Plan:
    """A plan of a run; printed, it is the report, and a notebook shows its picture."""

    figures: dict[str, Any]
    """All figures, as `--json` writes them; `llamajax/planning/report/figures.py` describes them."""
    made: MadePlan
    """Compiled program, memory and timeline."""

    @property
    def fits(self) -> bool:
        """Whether the run fits the memory of a GPU."""
        return self.figures["fits"]

    @property
    def verdict(self) -> str:
        """One line: whether the run fits, how fast it is, and what it waits for; predicted, not measured."""
        return plan_text.verdict(self.figures)

    def __repr__(self) -> str:
        return _printed(lambda: plan_text.print_plan(self.made, self.figures))

    def _repr_html_(self) -> str:
        return _frame(picture.page(self.made, self.figures), 900)


@dataclass(frozen=True, repr=False)
class Verification:
    """A comparison of a run with one device; falsy if numbers differ. A notebook shows every tensor's difference."""

    figures: dict[str, Any] | None
    """All figures, as `--json` writes them; None if the run has one device, and so nothing to verify."""
    verdict: str
    """One line: equal, or what differs first."""

    @property
    def equal(self) -> bool:
        """Whether loss, gradients, moments and weights equal those of one device within the tolerance."""
        return self.figures is None or self.figures["equal"]

    def __bool__(self) -> bool:
        return self.equal

    def __repr__(self) -> str:
        if self.figures is None:
            return f"verdict    {self.verdict}"
        figures = self.figures
        return _printed(lambda: verification_text.print_verification(figures))

    def _repr_html_(self) -> str | None:
        return None if self.figures is None else _frame(verification_page.page(self.figures), 900)


@dataclass(frozen=True, repr=False)
class Model:
    """A model with its weights on the devices."""

    loaded: Loaded
    mesh: jax.sharding.Mesh
    """Mesh of its devices; code of your own that calls `weights` runs in `with jax.set_mesh(model.mesh):`."""
    _completers: dict[Any, Completer] = field(default_factory=dict)
    """Compiled generation, by its settings."""

    @property
    def weights(self) -> Llama:
        """Flax module, an NNX pytree on the mesh."""
        return self.loaded.weights

    @property
    def config(self) -> ModelConfig:
        """Settings of the model: `config.vocab_size`, `config.num_layers` and the rest of the section `model`."""
        return self.loaded.config

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model: `encode_prompt(text)` returns token ids, `decode(ids)` text."""
        return self.loaded.tokenizer

    def __call__(self, tokens: Sequence[Sequence[int]] | np.ndarray | jax.Array) -> jax.Array:
        """Returns the logits of the next token at each position, float32 [B, T, V], whole on every device.

        Args:
            tokens: token ids [B, T]; each row is one document.
        """
        ids = np.asarray(tokens, np.int32)
        assert ids.ndim == 2, f"tokens: need shape [B, T], not {ids.shape}"
        batch, seq = (num_parts(dim, self.mesh.shape) for dim in ("batch", "seq"))
        padded = np.pad(ids, ((0, -ids.shape[0] % batch), (0, -ids.shape[1] % seq)))
        with jax.set_mesh(self.mesh):
            logits = _logits(self.weights, jax.device_put(padded, spec("batch", "seq")))
            return logits[: ids.shape[0], : ids.shape[1]]

    def completer(self, config: GenerateConfig, encoded: Encoded) -> Completer:
        """Returns what writes continuations as `config` says, with the programs of earlier calls."""
        key = (config.temperature, config.top_k, config.top_p, config.min_p, config.seed, encoded.max_seq_len)
        key = (*key, tuple(encoded.end_ids))
        if key not in self._completers:
            self._completers[key] = make_completer(config, self.loaded, encoded)
        return self._completers[key]

    def __repr__(self) -> str:
        return f"Model({self.loaded.pretrained.about})"


@partial(jax.jit)
def _logits(weights: Llama, tokens: jax.Array) -> jax.Array:
    return jax.reshard(weights(tokens), jax.P(None, None, None)).astype(jnp.float32)
