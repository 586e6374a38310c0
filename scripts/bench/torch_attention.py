"""The forms in which torch computes attention, for `torch_ideal` to take the fastest of and for the ceiling to time."""

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

# At toy size Python is traced, and no code generated: that takes longer than a toy runs.
compiled = functools.partial(torch.compile, backend="inductor" if torch.cuda.is_available() else "eager")
_KNOWN = inspect.signature(varlen_attn).parameters
# torch 2.10 calls it is_causal, later versions a window without keys ahead, and the last of them know grouped heads.
_VARLEN: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _KNOWN else {"is_causal": True}
_VARLEN |= {"enable_gqa": True} if "enable_gqa" in _KNOWN else {}
Batch = dict[str, torch.Tensor]
"""A micro-batch: the fields of a batch [B, T], and `document_starts` [n + 1], where each document begins if all rows are one
after the other, and then their end."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to compute attention."""

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
    """Attention of queries [B, T, N, H], keys and values [B, T, K, H] and what `prepare` made of the batch: [B, T, N, H]."""
    prepare: Callable[[Batch], Any] = lambda batch: None
    """Prepares the input that `attend` needs for a micro-batch, once for all layers."""
    backend: SDPBackend | None = None
    """The only one that `scaled_dot_product_attention` may take."""


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
    """Makes the block mask of a micro-batch. One function and one buffer for all of them, or each would be compiled anew."""

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
    """Those that can be tried, by name."""
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
    """In which `scaled_dot_product_attention` takes no other backend than the form's."""
    with contextlib.nullcontext() if form.backend is None else sdpa_kernel(form.backend):
        yield


def timed(case: Case, batch: Batch) -> dict[str, dict[str, Any]]:
    """As `scripts.bench.jax_ceiling` tells it: `attention` of every form, on a micro-batch, and what is `unavailable`."""
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
        except Exception as error:  # each form has its own way to say that it cannot
            found["unavailable"][name] = repr(error).partition("\n")[0][:200]
    return found


def synchronize(_: Any = None) -> None:
    """Waits for the device, where it does not run with the host."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
