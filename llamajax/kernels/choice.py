"""Chooses the kernels that compute attention, from the device, the shape and the mask, and experts; and says why."""

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
from jax.extend.backend import get_default_device

from llamajax.config.experts import ExpertKernel
from llamajax.config.model import AttentionKernel, ModelConfig
from llamajax.config.parallel import SequenceForm, num_parts
from llamajax.errors import ConfigError

Kernel = Literal["pallas", "triton", "cudnn", "tokamax", "plain"]
GroupedKernel = Literal["pallas", "tokamax", "plain"]
GPU_PLATFORMS = ("gpu", "cuda")


def is_on_gpu() -> bool:
    """Returns whether the current mesh consists of GPUs, real or described."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform in GPU_PLATFORMS


def compute_capability() -> tuple[int, ...] | None:
    """Returns the CUDA compute capability of the target GPU, real or described; None: the target is no GPU."""
    device = get_default_device()
    if device.platform not in GPU_PLATFORMS:
        return None
    return tuple(int(number) for number in device.compute_capability.split("."))


class Site(NamedTuple):
    """Properties of the attention to compute and of its device that decide which kernels can run."""

    is_gpu: bool
    dtype: str
    head_dim: int
    closes_documents: bool
    form: SequenceForm
    """Form of attention to rows that are split."""
    splits_rows: bool
    with_lse: bool = False
    """Whether the log-sum-exp is requested too."""
    capability: tuple[int, ...] | None = None
    """CUDA compute capability of the GPUs; None: unknown."""

    @staticmethod
    def of(
        model: ModelConfig,
        axes: Mapping[str, int],
        form: SequenceForm,
        *,
        is_gpu: bool,
        capability: tuple[int, ...] | None = None,
    ) -> "Site":
        """Returns the site of training `model` on mesh axes of these sizes."""
        closes_documents, splits_rows = not model.attend_across_documents, num_parts("seq", axes) > 1
        dtype, head_dim = model.compute_dtype, model.head_dim
        return Site(is_gpu, dtype, head_dim, closes_documents, form, splits_rows, capability=capability)


def choose(asked: AttentionKernel, site: Site) -> tuple[Kernel, str]:
    """Returns the requested kernel, or the kernel that `auto` resolves to, and the reason in one line.

    Raises:
        ConfigError: the requested kernel cannot compute this attention.
    """
    if asked != "auto":
        if reason := obstacle(asked, site):
            raise ConfigError(f"model.attention_kernel: {asked} cannot be used: {reason}; or set auto")
        interpreted = asked in ("pallas", "triton") and not site.is_gpu
        return asked, "interpreted, which is slow: there is no GPU" if interpreted else "model.attention_kernel says so"
    if not site.is_gpu:
        return "plain", "there is no GPU"
    if not (of_cudnn := obstacle("cudnn", site)):
        return "cudnn", "the fastest kernel that supports these rows"
    if not (of_pallas := obstacle("pallas", site)):
        return "pallas", f"cudnn cannot be used: {of_cudnn}"
    return "plain", f"cudnn cannot be used: {of_cudnn}; pallas cannot be used: {of_pallas}"


def obstacle(kernel: Kernel, site: Site) -> str | None:
    """Returns why a kernel cannot compute this attention; None if it can."""
    match kernel:
        case "plain":
            return None
        case "pallas":
            return _of_pallas(site)
        case "triton":
            return _of_pallas(site) or _of_interpreter(site) or _not_installed("triton", TRITON)
        case "cudnn":
            return _of_cudnn(site)
        case "tokamax":
            return _of_tokamax(site) or _missing()


def can_fuse(model: ModelConfig, axes: Mapping[str, int], form: SequenceForm) -> bool:
    """Returns whether some fused kernel computes attention in this form on GPUs."""
    asked = model.attention_kernel
    kernels: tuple[Kernel, ...] = ("cudnn", "pallas") if asked == "auto" else (asked,)
    site = Site.of(model, axes, form, is_gpu=True)
    return any(kernel != "plain" and obstacle(kernel, site) is None for kernel in kernels)


MAX_PALLAS_HEAD_DIM = 256
"""Widest head with tiles and gradients that fit into a core's registers and shared memory."""


WIDE_CAPABILITIES = ((8, 0), (9, 0))
"""CUDA compute capabilities of A100 and Hopper, which hold the tiles of heads up to `MAX_PALLAS_HEAD_DIM`. Other GPUs hold
heads up to `NARROW`: 8.6, 8.9 and 12.0 have 99 KiB of shared memory per block, and wider heads need 104 or more; 10.0 has
512 columns of tensor memory, and wider heads need 528."""
NARROW = 128


def _of_pallas(site: Site) -> str | None:
    """Returns the obstacle for the Pallas kernels, which also holds for the same kernels in Triton's own language."""
    if site.head_dim > MAX_PALLAS_HEAD_DIM:
        return f"model.head_dim is {site.head_dim}, and the kernel supports up to {MAX_PALLAS_HEAD_DIM}"
    if site.head_dim > NARROW and site.capability not in (None, *WIDE_CAPABILITIES):
        own = ".".join(map(str, site.capability))
        return f"model.head_dim is {site.head_dim}, and compute capability {own} holds tiles of at most {NARROW}"
    if site.is_gpu and site.dtype not in ("bfloat16", "float16"):
        return f"model.compute_dtype is {site.dtype}, and on GPUs the kernel supports bfloat16 and float16"
    return None


TRITON = "3.7"
"""Triton version with kernel IR that XLA accepts and with the private modules that we use; the same as in pyproject.toml."""


def _of_interpreter(site: Site) -> str | None:
    """Returns the obstacle in Triton's mode: it reads TRITON_INTERPRET at its first import and then compiles or
    interprets."""
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    if site.is_gpu and interprets:
        return "TRITON_INTERPRET=1 is in the environment, so Triton compiles nothing; unset it"
    if not site.is_gpu and not interprets:
        return "it needs NVIDIA GPUs, or TRITON_INTERPRET=1 in the environment to interpret it, slowly"
    return None


MAX_CUDNN_HEAD_DIM = 128
"""Widest head that cuDNN supports on every GPU with bfloat16; on Hopper it supports up to 256."""


def _of_cudnn(site: Site) -> str | None:
    if not site.is_gpu:
        return "it needs NVIDIA GPUs"
    if site.with_lse:
        return "jax returns its log-sum-exp in 16 bits and without a gradient"
    if site.dtype not in ("bfloat16", "float16"):
        return f"model.compute_dtype is {site.dtype}, and the kernel supports bfloat16 and float16"
    if site.head_dim % 8 or site.head_dim > MAX_CUDNN_HEAD_DIM:
        return f"model.head_dim is {site.head_dim}, and the kernel supports multiples of 8 up to {MAX_CUDNN_HEAD_DIM}"
    if site.closes_documents:
        return "queries may not attend across documents; model.attend_across_documents: true allows it"
    if site.splits_rows and site.form != "ulysses":
        return "mesh.sequence splits the rows, and the kernel needs whole rows; parallel.sequence: ulysses provides them"
    return None


MAX_TOKAMAX_HEAD_DIM = 128
"""Widest head for which the sums of both gradients of a tile of keys fit into a core's registers."""
TOKAMAX = "0.0.17"
"""Version with the private modules that `tokamax_kernel` uses; the same as in pyproject.toml."""
HOPPER = 9
"""Major version of the compute capability of H100 and H200."""


def _of_tokamax(site: Site) -> str | None:
    if not site.is_gpu:
        return "it needs NVIDIA GPUs"
    if site.capability is not None and site.capability[0] != HOPPER:
        own = ".".join(map(str, site.capability))
        return f"it needs GPUs of compute capability {HOPPER}.0, such as H100, and these have {own}"
    if site.with_lse:
        return "its backward pass supports no gradient of the log-sum-exp"
    if site.dtype not in ("bfloat16", "float16"):
        return f"model.compute_dtype is {site.dtype}, and the kernel supports bfloat16 and float16"
    if site.head_dim > MAX_TOKAMAX_HEAD_DIM:
        return f"model.head_dim is {site.head_dim}, and the kernel supports up to {MAX_TOKAMAX_HEAD_DIM}"
    if site.splits_rows and site.form != "ulysses":
        return "mesh.sequence splits the rows, and the kernel needs whole rows; parallel.sequence: ulysses provides them"
    return None


class GroupedSite(NamedTuple):
    """Properties of the products with experts' matrices and of their device that decide which kernels can run."""

    is_gpu: bool
    dtype: str
    is_float8: bool
    """Whether any of the matrices is in float8."""
    capability: tuple[int, ...] | None
    """CUDA compute capability of the GPUs; None: unknown."""

    @staticmethod
    def of(model: ModelConfig, *, is_gpu: bool, capability: tuple[int, ...] | None) -> "GroupedSite":
        """Returns the site of training `model`."""
        is_float8 = not {"w_gate_up", "w_down"}.isdisjoint(model.float8_weights)
        return GroupedSite(is_gpu, model.compute_dtype, is_float8, capability)


def choose_grouped(asked: ExpertKernel, site: GroupedSite) -> tuple[GroupedKernel, str]:
    """Returns the requested kernel for products with experts' matrices, or the kernel that `auto` resolves to, and the
    reason in one line.

    Raises:
        ConfigError: the kernel cannot compute these products.
    """
    kernel = asked if asked != "auto" else "pallas" if site.is_gpu else "plain"
    if reason := grouped_obstacle(kernel, site):
        remedy = "; or set auto" if asked != "auto" else ""
        raise ConfigError(f"model.experts.kernel: {kernel} cannot be used: {reason}{remedy}")
    if not site.is_gpu:
        return kernel, "there is no GPU" if asked == "auto" else _INTERPRETED if asked == "pallas" else _ASKED
    reason = "reads and writes the experts' tokens where they are" if asked == "auto" else _ASKED
    as_float16 = site.is_float8 and site.capability is not None and site.capability[0] == HOPPER
    return kernel, f"{reason}; float8 is multiplied as float16 on these GPUs" if as_float16 else reason


_ASKED, _INTERPRETED = "model.experts.kernel says so", "interpreted, which is slow: there is no GPU"


LEAST_PALLAS = 8, 0
"""CUDA compute capability of the first GPUs that jax compiles Pallas for."""


def grouped_obstacle(kernel: GroupedKernel, site: GroupedSite) -> str | None:
    """Returns why a kernel cannot compute products with experts' matrices; None if it can."""
    own = ".".join(map(str, site.capability or ()))
    if kernel == "plain":
        return "it multiplies one tile of tokens after the other, which leaves a GPU idle" if site.is_gpu else None
    if kernel == "pallas":
        too_old = site.is_gpu and site.capability is not None and site.capability < LEAST_PALLAS
        return f"it needs GPUs of compute capability 8.0 or newer, and these have {own}" if too_old else None
    if not site.is_gpu:
        return "it needs NVIDIA GPUs"
    if site.capability is not None and site.capability[0] != HOPPER:
        return f"it needs GPUs of compute capability {HOPPER}.0, such as H100, and these have {own}"
    if site.is_float8:
        return "model.matmul_dtype rounds experts' matrices to float8, and it multiplies bfloat16 and float16"
    if site.dtype not in ("bfloat16", "float16"):
        return f"model.compute_dtype is {site.dtype}, and the kernel supports bfloat16 and float16"
    return _missing()


def _missing() -> str | None:
    """Returns what tokamax lacks on this machine; None: nothing."""
    python, own_jax = sys.version_info[:2], jax.__version_info__[:3]
    if python < (3, 12):
        return f"it needs Python 3.12 or newer, and this is {python[0]}.{python[1]}"
    if own_jax < (0, 11, 1):
        return f"it needs jax 0.11.1 or newer, and this is {jax.__version__}"
    return _not_installed("tokamax", TOKAMAX)


def _not_installed(package: str, version: str) -> str | None:
    """Returns why a package, which has an extra of the same name, is missing or has another version; None: it fits."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"the package is not installed; pip install 'llamajax[{package}]'"
    if found != version and not found.startswith(f"{version}."):
        return f"its version is {found}, and only {version} is supported; pip install 'llamajax[{package}]'"
    return None
