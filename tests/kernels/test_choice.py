"""Which kernels compute attention and experts, and why: from what is to be computed alone."""

import re
from typing import Any

import pytest

from llamajax.config.experts import ExpertKernel, ExpertsConfig
from llamajax.config.model import AttentionKernel
from llamajax.errors import ConfigError
from llamajax.kernels import choice
from llamajax.kernels.choice import GroupedSite, Kernel, Site, choose, choose_grouped, obstacle
from tests.tiny import tiny_config

OPEN = Site(is_gpu=True, dtype="bfloat16", head_dim=128, closes_documents=False, form="gather", splits_rows=False)


@pytest.mark.parametrize(
    ("changes", "kernel", "reason"),
    [
        ({}, "cudnn", "the fastest kernel that supports these rows"),
        ({"dtype": "float16", "head_dim": 64}, "cudnn", "the fastest"),
        ({"closes_documents": True}, "pallas", "cudnn cannot be used: queries may not .*attend_across_documents"),
        ({"head_dim": 100}, "pallas", "cudnn cannot be used: model.head_dim is 100"),
        ({"head_dim": 256}, "pallas", "cudnn cannot be used: model.head_dim is 256"),
        ({"splits_rows": True}, "pallas", "cudnn cannot be used: mesh.sequence splits the rows"),
        ({"splits_rows": True, "form": "ring"}, "pallas", "cudnn cannot be used: mesh.sequence splits the rows"),
        ({"splits_rows": True, "form": "ulysses"}, "cudnn", "the fastest"),
        ({"with_lse": True}, "pallas", "cudnn cannot be used: jax returns its log-sum-exp in 16 bits"),
        ({"dtype": "float32"}, "plain", "compute_dtype is float32.*; pallas cannot be used: model.compute_dtype is float32"),
        ({"head_dim": 264}, "plain", "; pallas cannot be used: model.head_dim is 264, and the kernel supports up to 256"),
        ({"head_dim": 256, "capability": (9, 0)}, "pallas", "cudnn cannot be used: model.head_dim is 256"),
        (
            {"head_dim": 128, "closes_documents": True, "capability": (8, 6)},
            "pallas",
            "cudnn cannot be used: queries may not attend",
        ),
        (
            {"head_dim": 192, "capability": (8, 9)},
            "plain",
            "pallas cannot be used: .* is 192, and .* 8.9 holds .* 128$",
        ),
        (
            {"head_dim": 256, "capability": (10, 0)},
            "plain",
            "; pallas cannot be used: .* compute capability 10.0 holds tiles of",
        ),
        ({"is_gpu": False, "dtype": "float32"}, "plain", "there is no GPU"),
    ],
)
def test_auto_is_the_first_that_can(changes: dict[str, Any], kernel: Kernel, reason: str):
    found, why = choose("auto", OPEN._replace(**changes))
    assert found == kernel
    assert re.search(reason, why), why
    assert "\n" not in why


@pytest.mark.parametrize(
    ("asked", "changes", "reason"),
    [
        ("cudnn", {"closes_documents": True}, "queries may not attend across documents"),
        ("cudnn", {"is_gpu": False}, "it needs NVIDIA GPUs"),
        ("pallas", {"dtype": "float32"}, "compute_dtype is float32"),
        ("pallas", {"head_dim": 512, "is_gpu": False}, "head_dim is 512"),
        ("pallas", {"head_dim": 256, "capability": (12, 0)}, "compute capability 12.0 holds tiles of at most 128"),
    ],
)
def test_a_kernel_that_is_asked_for_and_cannot_is_an_error(asked: AttentionKernel, changes: dict[str, Any], reason: str):
    message = rf"^model.attention_kernel: {asked} cannot be used: .*{reason}.*; or set auto$"
    with pytest.raises(ConfigError, match=message):
        choose(asked, OPEN._replace(**changes))


@pytest.mark.parametrize("asked", ["pallas", "cudnn", "plain"])
def test_a_kernel_that_is_asked_for_and_can_is_taken(asked: Kernel):
    assert choose(asked, OPEN) == (asked, "model.attention_kernel says so")


def test_without_a_gpu_pallas_is_interpreted():
    assert choose("pallas", OPEN._replace(is_gpu=False, dtype="float32")) == (
        "pallas",
        "interpreted, which is slow: there is no GPU",
    )


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("sequence", [1, 2])
def test_the_site_of_a_configuration(is_open, sequence):
    model = tiny_config().changed({"model.attend_across_documents": is_open, "model.compute_dtype": "bfloat16"}).model
    site = Site.of(model, {"data": 1, "fsdp": 2, "sequence": sequence, "tensor": 1}, "ulysses", is_gpu=True)
    assert site == Site(True, "bfloat16", model.head_dim, not is_open, "ulysses", sequence > 1)
    assert obstacle("plain", site) is None


GROUPED = GroupedSite(is_gpu=True, dtype="bfloat16", is_float8=False, capability=(9, 0))
ON_CPU = {"is_gpu": False, "dtype": "float32", "capability": None}


@pytest.mark.parametrize(
    ("asked", "changes", "told"),
    [
        ("auto", {}, "pallas: reads and writes the experts' tokens where they are"),
        ("auto", {"dtype": "float32", "capability": (8, 0)}, "pallas: reads and writes the experts' tokens where they are"),
        ("auto", ON_CPU, "plain: there is no GPU"),
        ("pallas", {}, "pallas: model.experts.kernel says so"),
        (
            "pallas",
            {"is_float8": True},
            "pallas: model.experts.kernel says so; float8 is multiplied as float16 on these GPUs",
        ),
        ("pallas", {"is_float8": True, "capability": (8, 9)}, "pallas: model.experts.kernel says so"),
        ("pallas", ON_CPU, "pallas: interpreted, which is slow: there is no GPU"),
        ("plain", ON_CPU, "plain: model.experts.kernel says so"),
        ("tokamax", {}, "tokamax: model.experts.kernel says so"),
    ],
)
def test_the_kernel_of_experts_is_chosen_with_a_reason(monkeypatch, asked: ExpertKernel, changes: dict[str, Any], told: str):
    monkeypatch.setattr(choice, "_missing", lambda: None)
    assert ": ".join(choose_grouped(asked, GROUPED._replace(**changes))) == told


@pytest.mark.parametrize(
    ("asked", "changes", "reason"),
    [
        ("plain", {}, "it multiplies one tile of tokens after the other, which leaves a GPU idle; or set auto"),
        ("auto", {"capability": (7, 5)}, "it needs GPUs of compute capability 8.0 or newer, and these have 7.5"),
        ("tokamax", ON_CPU, "it needs NVIDIA GPUs; or set auto"),
        ("tokamax", {"capability": (8, 0)}, "it needs GPUs of compute capability 9.0, .*, and these have 8.0; or set auto"),
        ("tokamax", {"is_float8": True}, "model.matmul_dtype rounds experts' matrices to float8, .*; or set auto"),
        ("tokamax", {"dtype": "float32"}, "model.compute_dtype is float32, .*; or set auto"),
    ],
)
def test_a_kernel_of_experts_that_cannot_run_is_an_error(asked: ExpertKernel, changes: dict[str, Any], reason: str):
    kernel = "pallas" if asked == "auto" else asked
    with pytest.raises(ConfigError, match=f"^model.experts.kernel: {kernel} cannot be used: {reason}$"):
        choose_grouped(asked, GROUPED._replace(**changes))


def test_the_site_of_experts():
    """Experts are in float8 where one of their matrices is."""
    exempt = {"model.matmul_dtype": "float8", "model.float8_exempt": ("w_down",)}
    model = tiny_config().changed({"model.experts": ExpertsConfig(num_experts=4), "model.compute_dtype": "bfloat16"}).model
    assert GroupedSite.of(model, is_gpu=True, capability=(9, 0)) == GROUPED
    rounded = tiny_config().changed(exempt).model
    assert GroupedSite.of(rounded, is_gpu=True, capability=None).is_float8
