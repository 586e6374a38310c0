"""Forms of attention in torch: `torch_ideal` uses the fastest, and the ceiling times all."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from scripts.bench.case import Case
from scripts.bench.child import fastest

# At toy size, torch.compile only traces: generating code would take longer than the toy runs.
compiled = functools.partial(torch.compile, backend="inductor" if torch.cuda.is_available() else "eager")
_KNOWN = inspect.signature(varlen_attn).parameters
# torch 2.10 calls it is_causal, later versions use a window without keys ahead, and the latest support grouped heads.
_VARLEN: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _KNOWN else {"is_causal": True}
_VARLEN |= {"enable_gqa": True} if "enable_gqa" in _KNOWN else {}
Batch = dict[str, torch.Tensor]
"""Micro-batch: the fields of a batch [B, T], and `document_starts` [n + 1], the start of each document in the concatenation
of all rows, followed by its end."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Way to compute attention."""

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
    """Returns attention [B, T, N, H] of queries [B, T, N, H], keys and values [B, T, K, H], and the result of `prepare`."""
    prepare: Callable[[Batch], Any] = lambda batch: None
    """Prepares the input that `attend` needs for a micro-batch, once for all layers."""
    backend: SDPBackend | None = None
    """Only backend that `scaled_dot_product_attention` may use."""


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2)


def _sdpa_repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    return _sdpa(q, k, v, mask)


def _mask(batch: Batch) -> torch.Tensor:
    ids = batch["segment_ids"]
    same = ids[:, None, :, None] == ids[:, None, None, :]
    return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=ids.device).tril()


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out: Any = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


class _Blocks:
    """Creates the block masks of micro-batches with one function and one buffer, so that they compile only once."""

    def __init__(self) -> None:
        self._make: Any = None

    def __call__(self, batch: Batch) -> Any:
        if self._make is None:
            ids = self._ids = batch["segment_ids"].clone()

            def visible(b: torch.Tensor, _: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
                return (t >= s) & (ids[b, t] == ids[b, s])

            B, T = ids.shape
            make: Any = compiled(create_block_mask)
            self._make = functools.partial(make, visible, B, None, T, T, device=ids.device)
        self._ids.copy_(batch["segment_ids"])
        return self._make()


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    if not _VARLEN.get("enable_gqa"):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    flat, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out: Any = varlen_attn(flat, k, v, starts, starts, q.shape[1], q.shape[1], **_VARLEN)
    return out.view(q.shape)


def forms(case: Case) -> dict[str, Form]:
    """Returns the forms to try, by name."""
    if case.is_toy:
        return {"sdpa": Form(attend=_sdpa, prepare=_mask)}
    if case.packed:
        return {
            "flex": Form(attend=_flex, prepare=_Blocks()),
            "varlen": Form(attend=_varlen, prepare=lambda batch: batch["document_starts"]),
        }
    return {
        "cudnn": Form(attend=_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
        "cudnn, keys repeated": Form(attend=_sdpa_repeated, backend=SDPBackend.CUDNN_ATTENTION),
        "flash": Form(attend=_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    }


@contextlib.contextmanager
def only(form: Form) -> Iterator[None]:
    """Returns a context in which `scaled_dot_product_attention` uses only the form's backend."""
    with contextlib.nullcontext() if form.backend is None else sdpa_kernel(form.backend):
        yield


def timed(case: Case, batch: Batch) -> dict[str, dict[str, Any]]:
    """Returns `attention` of each form on a micro-batch, and `unavailable`, in the form of `scripts.bench.jax_ceiling`."""
    model, device = case.network, batch["tokens"].device
    B, T = batch["tokens"].shape
    shapes = [(B, T, n, model.head_dim) for n in (model.num_heads, model.num_kv_heads, model.num_kv_heads)]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for shape in shapes)
    grad = torch.randn_like(q)
    found: dict[str, dict[str, Any]] = {"attention": {}, "unavailable": {}}
    for name, form in forms(case).items():
        try:
            with only(form):
                prepared, attend = form.prepare(batch), compiled(form.attend)

                def both(attend: Any = attend, prepared: Any = prepared) -> Any:
                    return torch.autograd.grad(attend(q, k, v, prepared), (q, k, v), grad)

                found["attention"][name] = fastest(both, synchronize) / B
        except Exception as error:  # each form reports in its own way that it cannot run
            found["unavailable"][name] = repr(error).partition("\n")[0][:200]
    return found


def synchronize(_: Any = None) -> None:
    """Waits for the device if it runs asynchronously."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
