"""The cost of experts' products, against hand counts: rows that come, tiles that they fill, and rounds."""

from typing import Any

import pytest

from llamajax.planning.cost.experts import KERNELS, Loads, expert_loads
from llamajax.planning.cost.kernels import CostModel
from llamajax.planning.cost.network import collective
from llamajax.planning.cost.replay import replay
from llamajax.planning.cost.timeline import CollectiveUse
from tests.estimates.test_experts import mesh_of, run
from tests.planning.modules import MACHINE, SHARE, memory_s, module

EVEN = Loads(mean=(0.8,), busiest=(0.8,), header=0.1)
UNEVEN = Loads(mean=(0.8, 0.0, 0.0), busiest=(1.0, 1.0, 0.4), header=0.1)
TRITON = 'custom_call_target="__gpu$xla.gpu.triton", backend_config={grid_x = 8 : i32, name = "%s", num_stages = 3 : i32}'
ROWS, E, K, N = 40960, 8, 2048, 1536


PER_ROW = {
    "grouped_rows": 2 * (K + N),
    "grouped_rows_gated": 2 * (K + N + N // 2) + 4,
    "grouped_rows_gradient": 2 * (K + 2 * N + N + 2 * N) + 4 + 4 * (N // 64),
    "grouped_weights": 2 * (K + N),
}
"""Bytes that a kernel moves for each row: the row, what the kernel makes of it, and what else it reads, in bfloat16; the
row's weight, and sums for its gradient, in float32."""


def program(kernel: str, op_name: str = ""):
    """A kernel as XLA writes it: a device with 8 experts has 40,960 places, and rows and headers of blocks as `x`."""

    def array(*dims: int, dtype: str = "bf16") -> str:
        order = ",".join(map(str, reversed(range(len(dims)))))
        return f"{dtype}[{','.join(map(str, dims))}]{{{order}}}"

    rows, matrices, weights = array(41200, K), array(E, K, N), array(41200, dtype="f32")
    factors, results = {
        "grouped_rows": ([rows, matrices], [array(ROWS, N)]),
        "grouped_rows_gated": ([rows, matrices, weights], [array(ROWS, N), array(ROWS, N // 2)]),
        "grouped_rows_gradient": (
            [rows, array(E, N, K), array(ROWS, 2 * N), weights],
            [array(ROWS, 2 * N), array(ROWS, N), array(ROWS, N // 64, dtype="f32")],
        ),
        "grouped_weights": ([rows, array(ROWS, N)], [matrices]),
    }[kernel]
    visits = [] if kernel == "grouped_weights" else [array(327, dtype="s32")]
    given = ["f32[1]{0}", *visits, "s32[9]{0}", array(ROWS, dtype="s32"), *factors]
    names = ", ".join(f"%p{number}" for number in range(len(given)))
    result = results[0] if len(results) == 1 else f"({', '.join(results)})"
    lines = [
        *(f"%p{number} = {shape} parameter({number})" for number, shape in enumerate(given)),
        f"%o = {result} custom-call({names}), {TRITON % kernel},"
        f' metadata={{op_name="jit(train_step)/{op_name}multiply/{kernel}/pallas_call"}}',
    ]
    return module("\n".join(lines))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("loads", [EVEN, UNEVEN])
def test_rows_that_come_take_time_in_whole_tiles(kernel, loads):
    compiled = program(kernel)
    model = CostModel(compiled, MACHINE, loads=loads)
    found = model.cost(compiled.entry.root, compiled.entry)
    computed = loads.busiest[0] * ROWS + E * (63 if kernel == "grouped_weights" else 127)
    assert (found.kind, found.flops) == ("experts", round(0.8 * ROWS) * 2 * K * N)
    assert found.num_bytes == pytest.approx(2 * E * K * N + loads.busiest[0] * ROWS * PER_ROW[kernel])
    work = SHARE.kernel_s + 2 * K * N * computed / (1e15 * SHARE.grouped_efficiency)
    assert found.seconds == pytest.approx(max(work, memory_s(found.num_bytes)))
    assert not model.not_understood


def test_few_rows_take_as_long_as_their_matrices():
    """Each expert gets ten of 80 rows, which is one tile, in less time than all matrices need."""
    compiled = program("grouped_rows")
    load = Loads(mean=(80 / ROWS,), busiest=(80 / ROWS,), header=0.0)
    found = CostModel(compiled, MACHINE, loads=load).cost(compiled.entry.root, compiled.entry)
    assert found.seconds == pytest.approx(memory_s(2 * (E * K * N + 80 * (K + N))))


LOOP = """body:
    %p = (s32[], f32[4000000]{0}) parameter(0)
    %i = s32[] get-tuple-element(%p), index=0
    %x = f32[4000000]{0} get-tuple-element(%p), index=1
    %all = f32[4000000]{0} all-to-all(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
    %t = (s32[], f32[4000000]{0}) tuple(%i, %all)

condition:
    %p = (s32[], f32[4000000]{0}) parameter(0)
    %c = pred[] constant(true)"""


@pytest.mark.parametrize("loads", [EVEN, UNEVEN])
@pytest.mark.parametrize("groups", ["{0,1,2,3},{4,5,6,7}", "{0,1,2,3,4,5,6,7}"])
def test_rounds_are_those_that_the_loads_take(loads, groups):
    """The loop says nowhere how often it runs. All-to-alls within a node and across nodes have lanes of their own."""
    lines = (
        "%i = s32[] constant(1)\n%x = f32[4000000]{0} parameter(0)\n%t = (s32[], f32[4000000]{0}) tuple(%i, %x)\n"
        "%w = (s32[], f32[4000000]{0}) while(%t), body=%body, condition=%condition,"
        ' metadata={op_name="jit(train_step)/layers/mlp/shard_map/further_rounds/while"}\n'
        "%r = f32[4000000]{0} get-tuple-element(%w), index=1"
    )
    several = module(lines, LOOP.replace("{0,1,2,3},{4,5,6,7}", groups))
    axes = {"fsdp": 2, "expert": 4} if "},{" in groups else {"expert": 8}
    timeline = replay(several, MACHINE, axes, None, loads)
    assert not timeline.not_understood
    rounds = loads.further_rounds
    sent = {use.collective.kind: use for use in timeline.collectives}
    if not rounds:
        assert (timeline.step_time_s, sent) == (0, {})
        return
    use: CollectiveUse = sent["all-to-all"]
    assert (use.count, use.collective.axis) == (rounds, "expert")
    assert use.collective.link == ("intra_node" if "},{" in groups else "inter_node")
    assert timeline.step_time_s == pytest.approx(rounds * use.collective.seconds)
    inter = 0 if "},{" in groups else 16e6 / 2
    assert timeline.wire_bytes == {
        "intra_node": rounds * (12e6 if not inter else 16e6 * 3 / 8),
        "inter_node": rounds * inter,
    }


@pytest.mark.parametrize("loads", [EVEN, UNEVEN])
def test_a_ragged_all_to_all_sends_what_is_filled(loads):
    """Headers and tokens, in the time that the busiest device takes; offsets and sizes do not count."""
    operands = "%x = bf16[800,64]{1,0} parameter(0)\n%o = s32[8]{0} parameter(1)\n"

    def sent(name: str, inputs: str) -> Any:
        line = f"%r = bf16[800,64]{{1,0}} {name}({inputs}), replica_groups={{{{0,1,2,3,4,5,6,7}}}}"
        program = module(operands + line)
        return collective(program.entry.root, program.entry, program, MACHINE, {"expert": 8}, loads)

    whole, filled = sent("all-to-all", "%x"), sent("ragged-all-to-all", "%x, %x, %o, %o, %o, %o")
    assert whole.num_bytes == 2 * 800 * 64
    assert filled.num_bytes == pytest.approx((0.1 + 0.9 * 0.8) * whole.num_bytes)
    assert sum(filled.wire_bytes.values()) == pytest.approx(7 / 8 * filled.num_bytes)
    share = 0.1 + 0.9 * loads.busiest[0]
    own = filled.seconds - 270e-6 - 8 * 12e-6
    assert own < whole.seconds if share < 1 else own == pytest.approx(whole.seconds)


def test_a_further_round_computes_what_is_left():
    compiled = program("grouped_rows", "layers/mlp/shard_map/further_rounds/while/body/")
    found = CostModel(compiled, MACHINE, loads=UNEVEN).cost(compiled.entry.root, compiled.entry)
    computed = 0.7 * ROWS + E * 127
    assert found.flops == 0  # of the mean device, which needs none
    assert found.seconds == pytest.approx(SHARE.kernel_s + 2 * K * N * computed / (1e15 * SHARE.grouped_efficiency))


def test_loads_follow_imbalance_and_slots():
    config = run({"expert": 4, "fsdp": 2})
    for imbalance, slots, busiest in (
        (1.0, 1.25, (0.8,)),
        (1.2, 1.25, (0.96,)),
        (2.0, 1.25, (1.0, 0.6)),
        (2.0, 0.0, (0.5,)),
    ):
        changed = config.changed({"hardware.expert_imbalance": imbalance, "parallel.expert_slots": slots})
        found = expert_loads(changed, mesh_of(changed))
        assert found is not None
        assert found.busiest == pytest.approx(busiest)
        assert sum(found.mean) == pytest.approx(sum(busiest) / imbalance)
        assert len(found.mean) == len(busiest)
    assert expert_loads(config.changed({"mesh.expert": 1, "mesh.fsdp": 8, "model.experts.num_experts": 0}), {}) is None
