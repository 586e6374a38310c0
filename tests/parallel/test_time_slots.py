"""Parts of a batch take turns: each passes every stage, barriers close the slots, and rows come back in their order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.time_slots import in_time_slots, joined_rows, part_sizes, split_rows


def stages(log: list[tuple[int, int]]):
    """Three stages, which note their number and the part."""

    def stage(number: int):
        def run(moving: jax.Array, part: int) -> tuple[jax.Array, int]:
            log.append((number, part))
            return (number + 2) * moving + part, part

        return run

    return [stage(number) for number in range(3)]


def test_every_part_passes_all_stages_one_slot_after_the_one_before():
    log: list[tuple[int, int]] = []
    parts = [(jnp.float32(part), part) for part in range(4)]
    found = in_time_slots(stages(log), parts, held=2)
    assert [part for _, part in found] == [0, 1, 2, 3]
    for part, (moving, _) in enumerate(found):
        assert moving == ((2 * part + part) * 3 + part) * 4 + part
    slots = [[(number, slot - number) for number in range(3) if 0 <= slot - number < 4] for slot in range(6)]
    assert log == [turn for slot in slots for turn in slot]


def test_barriers_hold_what_moves_and_no_result():
    def run(*parts: jax.Array) -> Any:
        return [moving for moving, _ in in_time_slots(stages([]), [(x, number) for number, x in enumerate(parts)], held=2)]

    program = jax.make_jaxpr(run)(*[jnp.float32(0)] * 3)
    sizes = [len(eqn.invars) for eqn in program.eqns if eqn.primitive.name == "optimization_barrier"]
    # What has been through one stage, or two, and the next part; the last slot has nothing to hold back.
    assert sizes == [2, 3, 2, 1]
    barriers = {var for eqn in program.eqns if eqn.primitive.name == "optimization_barrier" for var in eqn.outvars}
    assert not barriers & set(program.jaxpr.outvars)


@pytest.mark.parametrize(
    ("rows", "count", "sizes"),
    [(2, 2, (1, 1)), (4, 2, (3, 1)), (8, 4, (3, 2, 2, 1)), (16, 4, (5, 5, 4, 2)), (3, 3, (1, 1, 1)), (5, 1, (5,))],
)
def test_the_last_part_is_the_smallest(rows, count, sizes):
    assert part_sizes(rows, count) == sizes


def test_parts_are_rows_of_every_device():
    mesh = make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2))
    jax.set_mesh(mesh)
    x = jax.device_put(np.arange(8 * 4).reshape(8, 4), spec("batch", "seq"))
    tree = {"x": x, "z": jax.device_put(np.arange(3), jax.P())}
    parts = jax.jit(lambda tree: split_rows(tree, 2))(tree)
    np.testing.assert_array_equal(parts[0]["x"], np.asarray(x)[[0, 1, 2, 4, 5, 6]])
    np.testing.assert_array_equal(parts[1]["x"], np.asarray(x)[[3, 7]])
    np.testing.assert_array_equal(parts[1]["z"], np.arange(3))
    whole = jax.jit(lambda parts: joined_rows([part["x"] for part in parts]))(parts)
    np.testing.assert_array_equal(whole, x)
    assert whole.sharding.is_equivalent_to(x.sharding, 2)
