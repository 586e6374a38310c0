"""Which kernel computes attention: told by the device, the shape and what queries see, with the reason."""

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
from jax.extend.backend import get_default_device

from llamajax.config.model import AttentionKernel, ModelConfig
from llamajax.config.parallel import SequenceForm, num_parts
from llamajax.errors import ConfigError

Kernel = Literal["pallas", "triton", "cudnn", "tokamax", "plain"]
GPU_PLATFORMS = ("gpu", "cuda")


def is_on_gpu() -> bool:
    """Whether the current mesh is of GPUs, here or described ones."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform in GPU_PLATFORMS


def compute_capability() -> tuple[int, ...] | None:
    """CUDA's version of the architecture of the GPU that is compiled for, here or described; None: it is none."""
    device = get_default_device()
    if device.platform not in GPU_PLATFORMS:
        return None
    return tuple(int(number) for number in device.compute_capability.split("."))


class Site(NamedTuple):
    """What attention is to be computed, and on what."""

    is_gpu: bool
    dtype: str
    head_dim: int
    closes_documents: bool
    form: SequenceForm
    """How rows that are split are seen."""
    splits_rows: bool
    with_lse: bool = False
    """Whether the log-sum-exp is asked for too."""
    capability: tuple[int, ...] | None = None
    """CUDA's version of the GPUs' architecture; None: not known."""

    @staticmethod
    def of(
        model: ModelConfig,
        axes: Mapping[str, int],
        form: SequenceForm,
        *,
        is_gpu: bool,
        capability: tuple[int, ...] | None = None,
    ) -> "Site":
        """Of training `model` on mesh axes of these sizes."""
        closes_documents, splits_rows = not model.attend_across_documents, num_parts("seq", axes) > 1
        dtype, head_dim = model.compute_dtype, model.head_dim
        return Site(is_gpu, dtype, head_dim, closes_documents, form, splits_rows, capability=capability)


def choose(asked: AttentionKernel, site: Site) -> tuple[Kernel, str]:
    """The kernel that is asked for, or that `auto` comes to, and why, in one line.

    Raises:
        ConfigError: the one that is asked for cannot.
    """
    if asked != "auto":
        if reason := obstacle(asked, site):
            raise ConfigError(f"model.attention_kernel: {asked} cannot be used: {reason}; or set auto")
        interpreted = asked in ("pallas", "triton") and not site.is_gpu
        return asked, "interpreted, which is slow: there is no GPU" if interpreted else "model.attention_kernel says so"
    if not site.is_gpu:
        return "plain", "there is no GPU"
    if not (of_cudnn := obstacle("cudnn", site)):
        return "cudnn", "the fastest that takes such rows"
    if not (of_pallas := obstacle("pallas", site)):
        return "pallas", f"cudnn cannot be used: {of_cudnn}"
    return "plain", f"cudnn cannot be used: {of_cudnn}; nor can pallas: {of_pallas}"


def obstacle(kernel: Kernel, site: Site) -> str | None:
    """Why a kernel cannot compute it; None if it can."""
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
    """Whether some fused kernel computes attention in this form on GPUs."""
    asked = model.attention_kernel
    kernels: tuple[Kernel, ...] = ("cudnn", "pallas") if asked == "auto" else (asked,)
    site = Site.of(model, axes, form, is_gpu=True)
    return any(kernel != "plain" and obstacle(kernel, site) is None for kernel in kernels)


MAX_PALLAS_HEAD_DIM = 256
"""Of which a tile and its gradients keep to a core's registers and shared memory."""


WIDE_CAPABILITIES = ((8, 0), (9, 0))
"""CUDA's versions of A100 and Hopper, which hold the tiles of heads up to `MAX_PALLAS_HEAD_DIM`. Others hold heads up to
`NARROW`: 8.6, 8.9 and 12.0 have 99 KiB of shared memory per block, where wider heads take 104 and more, and 10.0 has 512
columns of tensor memory, where they take 528."""
NARROW = 128


def _of_pallas(site: Site) -> str | None:
    """And of the same kernels in Triton's own language."""
    if site.head_dim > MAX_PALLAS_HEAD_DIM:
        return f"model.head_dim is {site.head_dim}, and it takes up to {MAX_PALLAS_HEAD_DIM}"
    if site.head_dim > NARROW and site.capability not in (None, *WIDE_CAPABILITIES):
        own = ".".join(map(str, site.capability))
        return f"model.head_dim is {site.head_dim}, and a core of compute capability {own} holds its tiles up to {NARROW}"
    if site.is_gpu and site.dtype not in ("bfloat16", "float16"):
        return f"model.compute_dtype is {site.dtype}, and on GPUs it takes bfloat16 and float16"
    return None


TRITON = "3.7"
"""Versions whose first form of kernels XLA is seen to take, and whose private modules make it; as in pyproject.toml."""


def _of_interpreter(site: Site) -> str | None:
    """Triton is told before its first import whether it compiles or interprets."""
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    if site.is_gpu and interprets:
        return "TRITON_INTERPRET=1 is in the environment, by which Triton compiles nothing"
    if not site.is_gpu and not interprets:
        return "it needs NVIDIA GPUs, or TRITON_INTERPRET=1 in the environment, by which Triton interprets it, slowly"
    return None


MAX_CUDNN_HEAD_DIM = 128
"""Widest head that cuDNN takes on every GPU with bfloat16; Hopper's would go to 256."""


def _of_cudnn(site: Site) -> str | None:
    if not site.is_gpu:
        return "it needs NVIDIA GPUs"
    if site.with_lse:
        return "jax gives its log-sum-exp in 16 bits and without a gradient"
    if site.dtype not in ("bfloat16", "float16"):
        return f"model.compute_dtype is {site.dtype}, and it takes bfloat16 and float16"
    if site.head_dim % 8 or site.head_dim > MAX_CUDNN_HEAD_DIM:
        return f"model.head_dim is {site.head_dim}, and it takes multiples of 8 up to {MAX_CUDNN_HEAD_DIM}"
    if site.closes_documents:
        return "documents of one row are closed to each other; model.attend_across_documents opens them"
    if site.splits_rows and site.form != "ulysses":
        return "mesh.sequence splits the rows, and its causal mask begins with the row; parallel.sequence: ulysses would not"
    return None


MAX_TOKAMAX_HEAD_DIM = 128
"""Widest head of which the sums of both gradients of a tile of keys keep to a core's registers."""
TOKAMAX = "0.0.17"
"""The version whose private modules `tokamax_kernel` takes; as in pyproject.toml."""
HOPPER = 9
"""Major version of the compute capability of H100 and H200."""


def _of_tokamax(site: Site) -> str | None:
    if not site.is_gpu:
        return "it needs NVIDIA GPUs"
    if site.capability is not None and site.capability[0] != HOPPER:
        own = ".".join(map(str, site.capability))
        return f"it is for GPUs of compute capability {HOPPER}.0, such as H100, and these have {own}"
    if site.with_lse:
        return "its backward pass takes no gradient of the log-sum-exp"
    if site.dtype not in ("bfloat16", "float16"):
        return f"model.compute_dtype is {site.dtype}, and it takes bfloat16 and float16"
    if site.head_dim > MAX_TOKAMAX_HEAD_DIM:
        return f"model.head_dim is {site.head_dim}, and it takes up to {MAX_TOKAMAX_HEAD_DIM}"
    if site.splits_rows and site.form != "ulysses":
        return "mesh.sequence splits the rows, and its causal mask begins with the row; parallel.sequence: ulysses would not"
    return None


def _missing() -> str | None:
    """What tokamax lacks on this machine."""
    python, own_jax = sys.version_info[:2], jax.__version_info__[:3]
    if python < (3, 12):
        return f"it needs Python 3.12 or newer, and this is {python[0]}.{python[1]}"
    if own_jax < (0, 11, 1):
        return f"it needs jax 0.11.1 or newer, and this is {jax.__version__}"
    return _not_installed("tokamax", TOKAMAX)


def _not_installed(package: str, version: str) -> str | None:
    """Told of a package that has an extra of its own name."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"the package is not installed; pip install 'llamajax[{package}]'"
    if found != version and not found.startswith(f"{version}."):
        return f"it is version {found}, and only {version} is taken; pip install 'llamajax[{package}]'"
    return None
