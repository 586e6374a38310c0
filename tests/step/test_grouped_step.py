"""A step in programs of groups of layers, with saved values in files, gives the state of one program."""

import dataclasses
import errno
import os
import time
import weakref
from typing import Any

import jax
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.config.training import TrainConfig
from llamajax.errors import ConfigError, DiskError
from llamajax.parallel import block_file
from llamajax.parallel.activation_files import ActivationFiles
from llamajax.parallel.host_memory import KIND
from llamajax.parallel.mesh import make_mesh
from llamajax.step.grouped_step import GroupedStep, GroupPrograms, compile_grouped
from llamajax.step.layer_groups import IN_FLIGHT, Group
from llamajax.step.state import abstract_state, init_state
from llamajax.step.step import train_step
from tests.step.test_offload import EXPERTS, MESHES, SAVED
from tests.tiny import random_rows, resolved, single_device_mesh, tiny_config, to_device

LAYERS = 3


def run_config(mesh: str, remat: str, steps: int, changes: dict[str, Any]):
    train = TrainConfig(num_steps=10, global_batch_size=16, grad_accum_steps=steps)
    base = tiny_config(train=train, mesh=MESHES[mesh])
    # Adam with an eps of 1e-8 makes a step of what gradients near zero are rounded by.
    common = {"model.num_layers": LAYERS, "parallel.stack": "prefetch", "optimizer.eps": 1e-5}
    return base.changed({"model.remat": remat} | common | changes)


def arrays(state):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}


def same(found, expected):
    for name, own in found.items():
        like = expected[name]
        np.testing.assert_allclose(own, like, rtol=1e-6, atol=1e-6 * np.abs(like).max(initial=0), err_msg=name)


def check(folder, mesh, remat, steps, changes) -> tuple[GroupedStep, Any]:
    """Three steps, of which the second one counts no token; returns the step, and the run."""
    config = run_config(mesh, remat, steps, changes)
    jax.set_mesh(make_mesh(config.mesh))
    grouped = config.changed({"offload.activations": SAVED[remat], "offload.tiers.nvme_dir": str(folder)})
    batches = [to_device(config, random_rows(config, number)) for number in range(3)]
    batches[1] = batches[1] | {"targets": jax.tree.map(lambda x: 0 * x - 1, batches[1]["targets"])}
    step, _ = compile_grouped(resolved(grouped), abstract_state(grouped), size=1)
    state, like = init_state(grouped), init_state(config)
    start = arrays(like.model)
    for batch in batches:
        state, metrics = step(state, batch)
        like, expected = train_step(resolved(config), like, batch)
        same(arrays(metrics), arrays(expected))
    found, expected = (arrays((own.model, own.opt_state, own.step, own.skipped_steps)) for own in (state, like))
    same(found, expected)
    assert int(state.skipped_steps) == 1
    assert any(
        np.abs(own - begun).max() > 0 for own, begun in zip(arrays(state.model).values(), start.values(), strict=True)
    )
    assert not list(folder.iterdir())
    return step, grouped


@pytest.mark.slow
def test_the_state_is_that_of_one_program(tmp_path):
    """With micro-batches, frozen weights and clipping."""
    changes = {
        "train.frozen": ("embedding", "layers.mlp."), "train.z_loss_weight": 1e-3, "optimizer.grad_clip_norm": 0.1,
    }  # fmt: skip
    step, config = check(tmp_path, "mixed", "save_attention", 2, changes)
    model = config.model
    # Of two layers, for eight devices: two rows of 16 tokens, half of them or of the heads on each device of `tensor`.
    per_token = (2 * model.embed_dim + model.num_heads * model.head_dim) // 2
    each_step = (LAYERS - 1) * 2 * 8 * 32 * 4 * per_token
    assert step.files.bytes_written + step.files.forwarded * 8 * 32 * 64 * 4 >= 3 * each_step
    assert step.files.bytes_written <= 3 * each_step
    assert step.files.bytes_read <= step.files.bytes_written
    assert step.files.bytes_read > each_step / 2


FORMS = [
    pytest.param("rows", "none", 1, {"parallel.sequence": "ring", "parallel.tensor": "ring"}, marks=pytest.mark.long),
    pytest.param("rows", "full", 2, {"model.tie_embeddings": True, "parallel.zero": 1}, marks=pytest.mark.long),
    ("fsdp", "save_attention_qkv_mlp", 1, {"mesh.fsdp": 2, "mesh.expert": 4, "parallel.expert_parts": 2}
     | {f"model.experts.{name}": x for name, x in EXPERTS.items()}),
    ("mixed", "save_attention_qkv_mlp", 2, {"parallel.zero": 2, "parallel.grad_reduce": "step",
                                            "train.frozen": ("layers.attention.",)}),
    pytest.param(
        "mixed", "save_attention_qkv", 2, {"parallel.zero_data": 1, "model.matmul_dtype": "float8"}, marks=pytest.mark.long
    ),
    pytest.param("fsdp", "save_attention", 1, {
        "model.layer_types": ("sliding_attention", "full_attention", "full_attention"), "model.sliding_window": 4,
        "offload.optimizer": 1.0,
    }, marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "remat", "steps", "changes"), FORMS)
def test_the_state_is_that_of_one_program_in_every_form(tmp_path, mesh, remat, steps, changes):
    check(tmp_path, mesh, remat, steps, changes)


class Scene:
    """Groups whose programs add up numbers, keep an array on the host for each, and note how many exist there."""

    def __init__(self, files: ActivationFiles, groups: int, micro_batches: int, staying: int = 1):
        self.most, self.shape = 0, (8 * 4096,)
        lies = jax.NamedSharding(jax.sharding.get_mesh(), jax.P("fsdp"), memory_kind=KIND)
        self.lies = [lies if place < groups - staying else lies.with_memory_kind("device") for place in range(groups)]
        made = [
            GroupPrograms(Group(place, 1, place < groups - staying), self.forward, self.backward) for place in range(groups)
        ]
        rest: Any = {"begin": None, "end": None, "embed_back": lambda w, b, n, dx, total: [*total, dx]}
        self.step = GroupedStep(
            embed=lambda w, b, n: 100 * n, groups=made, head=lambda w, b, n, x, total: (x, total), files=files,
            micro_batches=micro_batches, **rest,
        )  # fmt: skip

    def values(self, number, start):
        return np.full(8 * 4096, 10 * int(number) + int(start), np.uint8)

    def note(self):
        self.most = max(self.most, sum(x.sharding.memory_kind == KIND and x.shape == self.shape for x in jax.live_arrays()))

    def forward(self, weights, batch, number, start, x):
        kept = jax.device_put(self.values(number, start), self.lies[start])
        self.note()
        return x + 1, [[kept], {"kept": kept, "start": jax.device_put(start)}]

    def backward(self, weights, batch, number, start, kept, dx, total):
        self.note()
        (first,), last = kept
        np.testing.assert_array_equal(first, self.values(number, start))
        np.testing.assert_array_equal(last["kept"], first)
        assert first.sharding == self.lies[start]
        assert last["kept"].sharding.memory_kind == "device"
        assert int(last["start"]) == start
        return dx + 10, total

    def totals(self):
        total: Any = []
        given: Any = None
        for number in range(self.step.micro_batches):
            total = self.step.accumulate(given, given, np.int32(number), total)
        return total


@pytest.fixture
def files(tmp_path):
    opened = ActivationFiles(str(tmp_path), jax.local_devices())
    yield opened
    opened.close()


def test_every_group_gets_back_what_it_saved_and_memory_holds_few(files):
    scene = Scene(files, 8, 2)
    assert scene.totals() == [88, 188]
    assert scene.most <= IN_FLIGHT + 1
    assert files.bytes_read + files.forwarded * 8 * 4096 == 2 * 7 * 8 * 4096  # two values are one array
    assert files.bytes_read >= 2 * (7 - IN_FLIGHT - 1) * 8 * 4096


def test_a_slow_disk_makes_the_step_wait_and_takes_no_memory(files, monkeypatch):
    write = os.pwrite

    def throttled(*given):
        time.sleep(0.01)
        return write(*given)

    monkeypatch.setattr(block_file.os, "pwrite", throttled)
    scene = Scene(files, 8, 1)
    assert scene.totals() == [88]
    assert scene.most <= IN_FLIGHT + 1
    assert files.forwarded > 0  # the last ones are not written yet


def test_groups_that_stay_are_not_written(files):
    scene = Scene(files, 4, 1, staying=4)
    assert scene.totals() == [44]
    assert (files.bytes_written, files.forwarded, scene.most) == (0, 0, 0)


def test_a_full_disk_ends_the_step(files, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(block_file.os, "pwrite", full)
    with pytest.raises(DiskError, match="No space left on device; free space there"):
        Scene(files, 8, 1).totals()


def on_host():
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == KIND)


class Watched:
    """Programs of a step that note the saved values on the card: what is kept, and what is on its way."""

    def __init__(self, step: GroupedStep):
        self.on_card = list[Any]()
        self.peak, self.total, self.largest, self.host_peak, self.above, self.before = 0, 0, 0, 0, 0, on_host()
        groups = [
            GroupPrograms(own.group, self.forward(own.forward), self.backward(own.backward, own.group))
            for own in step.groups
        ]
        self.step = dataclasses.replace(step, groups=groups)

    def forward(self, program):
        def run(*given):
            result = program(*given)
            leaves = jax.tree.leaves(result[1])
            size = sum(x.nbytes for x in leaves)
            self.total, self.largest = self.total + size, max(self.largest, size)
            self.peak = max(self.peak, self.live() + sum(x.nbytes for x in leaves if x.sharding.memory_kind == KIND))
            self.on_card += [weakref.ref(x) for x in leaves if x.sharding.memory_kind != KIND]
            return result

        return run

    def backward(self, program, group):
        def run(*given):
            leaves = jax.tree.leaves(given[4])
            here = {id(held()) for held in self.on_card}
            size = sum(x.nbytes for x in leaves if id(x) not in here)
            # Its values came while the program above still had its own.
            self.peak = max(self.peak, self.live() + size + self.above)
            self.above = sum(x.nbytes for x in leaves) if group.is_away else 0
            return program(*given)

        return run

    def live(self):
        self.host_peak = max(self.host_peak, on_host() - self.before)
        return sum(x.nbytes for x in (held() for held in self.on_card) if x is not None)


@pytest.mark.parametrize(
    ("width", "layers"),
    [(128, 4), pytest.param(192, 3, marks=pytest.mark.slow), pytest.param(256, 2, marks=pytest.mark.slow)],
)
def test_the_peak_of_saved_values_falls_by_28_percent(tmp_path, width, layers):
    """Shapes of SSDTrain's measurements, at a 64th of their width."""
    jax.set_mesh(single_device_mesh())
    config = tiny_config(mesh=MeshConfig(num_cpu_devices=1), train=TrainConfig(num_steps=10, global_batch_size=2)).changed(
        {
            "model.embed_dim": width, "model.mlp_dim": 2 * width, "model.num_layers": layers, "model.num_heads": 4,
            "model.num_kv_heads": 4, "model.head_dim": width // 4, "offload.activations": SAVED["none"],
            "offload.tiers.nvme_dir": str(tmp_path),
        }
    )  # fmt: skip
    step, _ = compile_grouped(resolved(config), abstract_state(config), lambda config, *results: results, size=1)
    watched = Watched(step)
    watched.step(init_state(config), to_device(config, random_rows(config, 0)))
    assert watched.total > layers * 2 * 16 * 4 * 10 * width
    assert watched.peak <= 0.72 * watched.total
    assert watched.host_peak <= (IN_FLIGHT + 1) * watched.largest


def test_weights_on_the_host_are_refused(tmp_path):
    config = run_config("fsdp", "full", 1, {"offload.activations": ("input",), "offload.tiers.nvme_dir": str(tmp_path)})
    jax.set_mesh(make_mesh(config.mesh))
    run = resolved(config)
    offload = dataclasses.replace(run.config.offload, optimizer=1.0, parameters="all")
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, offload=offload))
    with pytest.raises(ConfigError, match=r"^offload.tiers.nvme_dir: .*; remove it, or set offload.parameters: none"):
        compile_grouped(run, abstract_state(config))
