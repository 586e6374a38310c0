"""Rows of torch: `hf`, transformers' Llama compiled; `torch_ideal`; and torch's part of the ceiling.

python -m scripts.bench.torch_rows TASK
"""

import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from llamajax.config.run import Config
from scripts.bench import torch_attention
from scripts.bench.case import IGNORE, PASSES, Case, Choice, digest, norms_by_kind
from scripts.bench.child import Task, answer, fastest, first_that_fits, resident_bytes, timed_steps
from scripts.bench.torch_attention import Batch, compiled, synchronize
from scripts.bench.torch_ideal import Ideal, Tensors

_FUSED = re.compile(r"cudnn\w*sdpa|flash_(fwd|bwd)|fmha_cutlass|flex_attention|\bmha_(fwd|bwd)", re.IGNORECASE)
_BACKWARD = re.compile(r"bprop|bwd|backward|cutlassB", re.IGNORECASE)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class AdamW:
    """AdamW of llamajax, with one kernel per tensor: fp32 master weights, moments, and the bfloat16 copy for computing."""

    def __init__(self, config: Config, weights: Tensors, decayed: list[bool]) -> None:
        self._config, moment_dtype = config.optimizer, getattr(torch, config.optimizer.moment_dtype)
        masters = [weight.detach().float() for weight in weights]
        self.first, second = ([torch.zeros_like(x, dtype=moment_dtype) for x in weights] for _ in range(2))
        copies = [weight.detach() for weight in weights]
        self._state = [tuple(x.view(-1) for x in own) for own in zip(copies, masters, self.first, second, strict=True)]
        self._decays = [config.optimizer.weight_decay if is_decayed else 0.0 for is_decayed in decayed]
        self._count = torch.zeros((), device=weights[0].device)
        self._update = compiled(self._update_one, dynamic=True)

    @torch.no_grad()
    def step(self, grads: Tensors, num_targets: torch.Tensor) -> None:
        """Applies gradients summed over the step's tokens, after dividing by the number of tokens and clipping."""
        optimizer = self._config
        self._count += 1
        norm = torch.stack(torch._foreach_norm(grads, 2, torch.float32)).norm() / num_targets  # pyright: ignore[reportPrivateImportUsage] (what torch's own optimizers call)
        factor = 1 / num_targets
        if optimizer.grad_clip_norm is not None:
            factor = factor * (optimizer.grad_clip_norm / norm).clamp(max=1)
        rate = optimizer.learning_rate * (self._count / optimizer.warmup_steps).clamp(max=1)
        unbias = 1 - optimizer.b1**self._count, 1 - optimizer.b2**self._count
        for grad, state, decay in zip(grads, self._state, self._decays, strict=True):
            self._update(grad.reshape(-1), state, factor, rate, unbias, decay)

    def _update_one(
        self,
        grad: torch.Tensor,
        state: tuple[torch.Tensor, ...],
        factor: torch.Tensor,
        rate: torch.Tensor,
        unbias: tuple[torch.Tensor, torch.Tensor],
        decay: float,
    ) -> None:
        (copy, master, first, second), b1, b2 = state, self._config.b1, self._config.b2
        grad = grad.float() * factor
        m = b1 * first.float() + (1 - b1) * grad
        v = b2 * second.float() + (1 - b2) * grad * grad
        update = (m / unbias[0]) / (torch.sqrt(v / unbias[1]) + self._config.eps) + decay * master
        new = master - rate * update
        for old, value in ((master, new), (copy, new), (first, m), (second, v)):
            old.copy_(value)


def hf(task: Task) -> dict[str, Any]:
    """Measures transformers' LlamaForCausalLM in bfloat16, with each layer and the loss compiled and attention by SDPA."""
    return first_that_fits(task.choices, partial(_hf, task))


def _hf(task: Task, choice: Choice) -> dict[str, Any]:
    _forget()
    case, model = task.case, _pretrained(task).to(DEVICE)
    model.train()
    if choice.remat == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # Compiled as a whole, it would not check for packed rows, and would build a mask of all pairs of tokens, which no fused
    # kernel accepts.
    for layer in model.model.layers:
        layer.compile(**compiled.keywords)
    model.loss_function = compiled(model.loss_function)
    names, weights = zip(*model.named_parameters(), strict=True)

    def loss_and_grads(batch: Batch) -> tuple[torch.Tensor, Tensors]:
        targets, one = batch["targets"].long(), torch.ones((), device=DEVICE)
        positions = {"position_ids": batch["positions"]} if case.packed else {}
        loss = model(
            batch["tokens"], **positions, labels=targets, shift_labels=targets, num_items_in_batch=one, ignore_index=IGNORE,
            use_cache=False,
        ).loss  # fmt: skip
        return loss.detach(), list(torch.autograd.grad(loss, weights))

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        parts = [{name: len(weight)} for name, weight in zip(names, weights, strict=True)]
        return _trained(case, choice, list(weights), parts, loss_and_grads) | {"note": "SDPA"}


def torch_ideal(task: Task) -> dict[str, Any]:
    """Measures `scripts.bench.torch_ideal`."""
    return first_that_fits(task.choices, partial(_torch_ideal, task))


def _torch_ideal(task: Task, choice: Choice) -> dict[str, Any]:
    if task.attention is None:
        raise ValueError("no form of attention in torch can compute this; see torch's part of the ceiling")
    _forget()
    case, form = task.case, torch_attention.forms(task.case)[task.attention]
    model = Ideal(case.network, _pretrained(task), form, choice.remat, DEVICE)
    with torch_attention.only(form):
        return _trained(case, choice, model.weights, model.parts, model.loss_and_grads) | {"note": task.attention}


def _forget() -> None:
    """Frees the leftovers of an attempt that did not fit."""
    torch.compiler.reset()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _trained(
    case: Case,
    choice: Choice,
    weights: Tensors,
    parts: list[dict[str, int]],
    loss_and_grads: Callable[[Batch], tuple[torch.Tensor, Tensors]],
) -> dict[str, Any]:
    """Runs the steps of a round with a model.

    Args:
        case: the case.
        choice: the row's choice.
        weights: weights of the model, in bfloat16.
        parts: Hugging Face names of the parts of each weight, in order, and their rows.
        loss_and_grads: returns the summed loss of a micro-batch and its gradients.
    """
    config = case.config(choice)
    undecayed = config.optimizer.no_weight_decay
    optimizer = AdamW(config, weights, [not any(part in name for name in own for part in undecayed) for own in parts])
    steps = [micro_batches(case, number, choice.micro_batch) for number in range(case.num_steps)]
    losses = torch.zeros(case.num_steps, device=DEVICE)

    def step(number: int) -> None:
        num_targets = torch.stack([(batch["targets"] != IGNORE).sum() for batch in steps[number]]).sum()
        sums: Tensors | None = None
        for batch in steps[number]:
            loss, grads = loss_and_grads(batch)
            losses[number] += loss / num_targets
            if len(steps[number]) == 1:
                sums = grads
            elif sums is None:
                sums = [grad.float() for grad in grads]
            else:
                torch._foreach_add_(sums, grads)  # pyright: ignore[reportPrivateImportUsage] (as above)
        assert sums is not None
        optimizer.step(sums, num_targets)

    def gradients() -> dict[str, float]:
        """Returns the gradients of the first step: Adam's first moment is a tenth of them, clipped."""
        split = [(own, moment.split(list(own.values()))) for own, moment in zip(parts, optimizer.first, strict=True)]
        named = [(name, part) for own, moments in split for name, part in zip(own, moments, strict=True)]
        return norms_by_kind((name, float(part.float().square().sum())) for name, part in named)

    found = timed_steps(step, synchronize, gradients)
    told = losses.tolist()
    attention = {"forward": [], "backward": []} if case.is_toy else _profiled(partial(step, 0))
    tokens = np.stack([np.concatenate([batch["tokens"].cpu().numpy() for batch in batches]) for batches in steps])
    memory = {"peak_bytes": resident_bytes()}
    if not case.is_toy:
        memory = {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return found | memory | {
        "losses": told,
        "tokens": digest(tokens),
        "compile_s": found["first_step_s"] - min(found["step_s"]),
        "attention": attention,
    }  # fmt: skip


def _profiled(step: Callable[[], None]) -> dict[str, list[str]]:
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        synchronize()
    return fused_kernels(event.key for event in profiler.key_averages())


def fused_kernels(kernels: Iterable[str]) -> dict[str, list[str]]:
    """Selects the fused attention kernels of a step: `forward` and `backward`."""
    fused = sorted({re.sub(r"<.*|\(.*", "", name.removeprefix("void "))[:80] for name in kernels if _FUSED.search(name)})
    return {
        "forward": [name for name in fused if not _BACKWARD.search(name)],
        "backward": [name for name in fused if _BACKWARD.search(name)],
    }


def micro_batches(case: Case, step: int, micro_batch: int) -> list[Batch]:
    """Yields a step's batch on the device, some rows at a time; `document_starts` has equal length for equal row counts."""
    batch, found = case.batch(step), []
    starts = [np.flatnonzero(rows == 0) for rows in case.positions.reshape(-1, micro_batch * case.seq_len)]
    length = 1 + max(map(len, starts))
    for number, own in enumerate(starts):
        rows = slice(number * micro_batch, (number + 1) * micro_batch)
        padded = np.pad(own, (0, length - len(own)), constant_values=micro_batch * case.seq_len).astype(np.int32)
        fields = {name: x[rows] for name, x in batch.items()} | {"document_starts": padded}
        found.append({name: torch.from_numpy(x).to(DEVICE) for name, x in fields.items()})
    return found


def ceiling(task: Task) -> dict[str, Any]:
    """Returns the same as in `scripts.bench.jax_ceiling`; also measures products of all tokens at once."""
    case, found = task.case, dict[str, float]()
    for tokens in sorted({case.gemm_tokens, case.tokens}):
        for name, (width, out, _) in case.gemms().items():
            shapes = (tokens, width), (out, width), (tokens, out)
            x, w, d_y = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for shape in shapes)
            calls = (lambda x=x, w=w: x @ w.T, lambda w=w, d_y=d_y: d_y @ w, lambda x=x, d_y=d_y: d_y.T @ x)
            for which, call in zip(PASSES, calls, strict=True):
                own = fastest(call, synchronize) / tokens
                found[f"{name}, {which}"] = min(own, found.get(f"{name}, {which}", own))
    return {"gemms": found} | torch_attention.timed(case, micro_batches(case, 0, case.rows)[0])


def _pretrained(task: Task) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(task.weights, dtype=torch.bfloat16, attn_implementation="sdpa")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("high")
    answer({"hf": hf, "torch_ideal": torch_ideal, "ceiling": ceiling})
