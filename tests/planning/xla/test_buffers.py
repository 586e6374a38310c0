"""XLA's buffer assignment, read back: sizes against what XLA says itself, and the fullest moment replayed."""

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from llamajax.estimates.formulas import mesh_sizes
from llamajax.estimates.machine import planned_machine
from llamajax.planning.cost.replay import replay
from llamajax.planning.cost.timeline import Event, Loop
from llamajax.planning.xla.buffers import Buffer, read_buffer_assignment
from llamajax.planning.xla.compile import planned_mesh
from llamajax.planning.xla.parse import parse
from tests.planning.plans import CONFIG


def field(number: int, value: int | bytes) -> bytes:
    """One field in protobuf's wire format."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def instruction(number: int, name: bytes, *, op_name: bytes = b"", operands: bytes = b"", opcode: bytes = b"add") -> bytes:
    shape = field(2, 11) + field(3, varint(number))  # f32[number]
    return b"".join(
        [
            field(1, name), field(2, opcode), field(3, shape), field(7, field(2, op_name)), field(35, number),
            field(36, operands),
        ]
    )  # fmt: skip


def hlo_proto(instructions: list[bytes], sizes: dict[int, int], events: list[tuple[int, ...]]) -> bytes:
    """An HloProto whose logical buffer n is the result of instruction n; all of them share one allocation of 1,000 bytes."""
    computation = b"".join([field(2, text) for text in instructions] + [field(5, 1), field(6, 1)])
    logical = [field(1, n) + field(2, size) + field(3, field(4, n)) for n, size in sizes.items()]
    allocation = field(2, 1000) + b"".join(field(9, field(1, n)) for n in sizes)
    trace = b"".join(field(1, b"".join(field(key, value) for key, value in zip((1, 2, 5), e, strict=False))) for e in events)
    assignment = b"".join([field(1, text) for text in logical] + [field(3, allocation), field(4, trace)])
    return field(1, field(3, computation)) + field(3, assignment)


ALLOC, FREE, SHARE = 0, 1, 2


def test_the_fullest_moment_is_found():
    instructions = [instruction(n, b"i%d" % n, op_name=b"jit(f)/op%d" % n) for n in (1, 2, 3)]
    events = [(ALLOC, 1), (ALLOC, 2), (FREE, 1), (ALLOC, 3), (FREE, 2), (FREE, 3)]
    assignment = read_buffer_assignment(hlo_proto(instructions, {1: 500, 2: 300, 3: 100}, events))
    assert [buffer.instruction for buffer in assignment.peak] == ["i1", "i2"]
    assert (assignment.arena_bytes, assignment.gap_bytes, assignment.argument_bytes) == (1000, 200, 0)
    assert assignment.peak[0] == Buffer(
        instruction="i1", opcode="add", op_name="jit(f)/op1", dtype="f32", shape=(1,), size=500
    )


def test_a_shared_place_counts_once_and_until_its_last_user_is_done():
    instructions = [instruction(n, b"i%d" % n) for n in (1, 2, 3)]
    # 2 takes over the place of 1, so that 1 and 3 are alive together although 1 itself is freed.
    events = [(ALLOC, 1), (SHARE, 2, 1), (FREE, 1), (ALLOC, 3), (FREE, 2), (FREE, 3)]
    assignment = read_buffer_assignment(hlo_proto(instructions, {1: 500, 2: 500, 3: 400}, events))
    assert sum(buffer.size for buffer in assignment.peak) == 900


def test_what_xla_made_up_is_named_after_its_user():
    instructions = [
        instruction(1, b"broadcast"),
        instruction(2, b"tuple", operands=varint(1), opcode=b"tuple"),
        instruction(3, b"while", operands=varint(2), op_name=b"jit(f)/while", opcode=b"while"),
    ]
    assignment = read_buffer_assignment(hlo_proto(instructions, {1: 8}, [(ALLOC, 1), (FREE, 1)]))
    assert assignment.peak[0].op_name == "jit(f)/while"


@pytest.mark.parametrize("donate", [(), (0,)])
def test_agrees_with_xlas_own_sums(tmp_path, donate):
    def program(state, x):
        y = jnp.tanh(x @ x)
        return {"a": state["a"] + jnp.sum(jax.lax.map(lambda row: row * 2, y)), "b": state["b"]}

    matrix = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    state = {"a": jax.ShapeDtypeStruct((1000,), jnp.float32), "b": jax.ShapeDtypeStruct((7,), jnp.int32)}
    with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:1], "x")):
        lowered = jax.jit(program, donate_argnums=donate).lower(state, matrix)
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True})
    (proto,) = tmp_path.glob("*after_optimizations.hlo.pb")
    assignment = read_buffer_assignment(proto.read_bytes())
    stats = compiled.memory_analysis()
    assert stats is not None
    assert assignment.argument_bytes == stats.argument_size_in_bytes == 4 * (1000 + 7 + 64 * 64)
    assert assignment.arena_bytes == stats.temp_size_in_bytes
    assert assignment.host_bytes == 0
    assert {argument.op_name for argument in assignment.arguments} == {"state['a']", "state['b']", "x"}


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_what_lies_in_the_hosts_memory_is_counted_apart(tmp_path):
    """Eight layers' activations of 512 x 1,024 bfloat16 per device, offloaded by the forward pass: 8 MiB, out and back."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device", offload_dst="pinned_host"
    )

    def layer(x, w):
        x = checkpoint_name(x, "x")
        return jnp.tanh(x @ w), None

    def loss(w, x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0].astype(jnp.float32))

    with jax.set_mesh(planned_mesh(CONFIG)):
        rows = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P(("data", "fsdp", "tensor")))
        x = jax.ShapeDtypeStruct((16 * 512, 1024), jnp.bfloat16, sharding=rows)
        w = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.bfloat16)
        lowered = jax.jit(jax.grad(loss)).lower(w, x)
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True})
    (proto,) = tmp_path.glob("*after_optimizations.hlo.pb")
    assert read_buffer_assignment(proto.read_bytes()).host_bytes == 8 * 512 * 1024 * 2
    hlo = compiled.as_text()
    assert hlo is not None
    timeline = replay(parse(hlo), planned_machine(CONFIG), mesh_sizes(CONFIG))
    assert not timeline.not_understood

    def copies(events: Iterable[Event | Loop]) -> Iterator[float]:
        for event in events:
            if isinstance(event, Loop):
                for times, _, inner in event.iterations:
                    yield from [times * seconds for seconds in copies(inner)]
            elif event.kind == "copy":
                yield event.seconds

    there_and_back = 2 * 8 * 512 * 1024 * 2
    assert sum(copies(timeline.events)) == pytest.approx(there_and_back / 50e9, rel=0.1)
