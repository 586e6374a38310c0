"""Costs of single instructions, against bytes and floating-point operations counted by hand."""

import dataclasses
from typing import Any

import pytest

from llamajax.estimates.formulas import flops_per_token, num_matmul_params
from llamajax.planning.cost.attention import Grid, Scores, busy_share
from llamajax.planning.cost.kernels import Cost, CostModel, Dot, compiled_attention, dot_seconds
from tests.planning.modules import MACHINE, SHARE, memory_s, module
from tests.tiny import tiny_config

PEAK = 1e15 * SHARE.matmul_efficiency


def cost(lines: str, computations: str = "") -> Cost:
    """Cost of the last line."""
    model, found = cost_and_model(lines, computations)
    assert not model.not_understood
    return found


def cost_and_model(lines: str, computations: str = "") -> tuple[CostModel, Cost]:
    program = module(lines, computations)
    model = CostModel(program, MACHINE)
    return model, model.cost(program.entry.root, program.entry)


X = "%x = f32[1000,100]{1,0} parameter(0)\n"


def about(seconds: float) -> Any:
    """`pytest.approx`, where a float is asked for."""
    return pytest.approx(seconds)


def memory(num_bytes: int) -> Cost:
    return Cost("memory", about(memory_s(num_bytes)), 0, num_bytes)


@pytest.mark.parametrize(
    ("line", "num_bytes"),
    [
        ("%r = f32[1000,100]{1,0} add(%x, %x)", 3 * 400_000),
        ("%r = bf16[1000,100]{1,0} convert(%x)", 400_000 + 200_000),
        ("%r = f32[1000,100]{0,1} copy(%x)", 2 * 400_000),
        ("%r = f32[1000]{0} reduce(%x, %x), dimensions={1}", 2 * 400_000 + 4_000),
        ("%r = f32[100,100]{1,0} slice(%x), slice={[0:100], [0:100]}", 2 * 40_000),
        ("%r = f32[2000,100]{1,0} concatenate(%x, %x), dimensions={0}", 2 * 800_000),
        ("%r = f32[1000,100]{1,0} iota(), iota_dimension=0", 400_000),
    ],
)
def test_kernels_outside_of_fusions_move_their_bytes(line, num_bytes):
    assert cost(X + line) == memory(num_bytes)


@pytest.mark.parametrize(
    "line",
    [
        "%r = f32[100000]{0} bitcast(%x)",
        "%r = (f32[1000,100]{1,0}) tuple(%x)",
        '%r = f32[1000,100]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"',
    ],
)
def test_renaming_is_free(line):
    assert cost(X + line).seconds == 0


FUSIONS = {
    # A scan's stack of ten weights, of which one iteration reads one.
    "slice": (
        "f32[100]{0} fusion(%stack, %i)",
        """%p = f32[10,100]{1,0} parameter(0)
        %b = f32[10,10,10]{2,1,0} bitcast(%p)
        %n = s32[] parameter(1)
        %z = s32[] constant(0)
        %s = f32[1,10,10]{2,1,0} dynamic-slice(%b, %n, %z, %z), dynamic_slice_sizes={1,10,10}
        %c = bf16[1,10,10]{2,1,0} convert(%s)
        %r = bf16[100]{0} bitcast(%c)""",
        400 + 4 + 200,
    ),
    # And into which it writes one: the rest of the stack stays where it is.
    "update": (
        "f32[10,100]{1,0} fusion(%stack, %i, %x)",
        """%p = f32[10,100]{1,0} parameter(0)
        %n = s32[] parameter(1)
        %u = f32[1,100]{1,0} parameter(2)
        %z = s32[] constant(0)
        %r = f32[10,100]{1,0} dynamic-update-slice(%p, %u, %n, %z)""",
        4 + 400 + 400,
    ),
    # Into something made inside the fusion it cannot be written in place.
    "update of a value": (
        "f32[10,100]{1,0} fusion(%stack, %i, %x)",
        """%p = f32[10,100]{1,0} parameter(0)
        %n = s32[] parameter(1)
        %u = f32[1,100]{1,0} parameter(2)
        %z = s32[] constant(0)
        %d = f32[10,100]{1,0} negate(%p)
        %r = f32[10,100]{1,0} dynamic-update-slice(%d, %u, %n, %z)""",
        3600 + 4 + 400 + 4000,
    ),
    "two results": (
        "(f32[100]{0}, f32[10,100]{1,0}) fusion(%stack)",
        """%p = f32[10,100]{1,0} parameter(0)
        %z = f32[] constant(0)
        %m = f32[100]{0} reduce(%p, %z), dimensions={0}
        %n = f32[10,100]{1,0} negate(%p)
        %r = (f32[100]{0}, f32[10,100]{1,0}) tuple(%m, %n)""",
        4000 + 400 + 4000,
    ),
    "two slices": (
        "f32[2,100]{1,0} fusion(%stack)",
        """%p = f32[10,100]{1,0} parameter(0)
        %a = f32[1,100]{1,0} slice(%p), slice={[0:1], [0:100]}
        %b = f32[1,100]{1,0} slice(%p), slice={[5:6], [0:100]}
        %r = f32[2,100]{1,0} concatenate(%a, %b), dimensions={0}""",
        800 + 800,
    ),
    "row repeated": (
        "f32[10,100]{1,0} fusion(%x)",
        """%p = f32[1,100]{1,0} parameter(0)
        %r = f32[10,100]{1,0} broadcast(%p), dimensions={0,1}""",
        400 + 4000,
    ),
    # An embedding: 5 rows of 10, and their 5 indices.
    "gather": (
        "f32[5,100]{1,0} fusion(%stack, %ids)",
        """%p = f32[10,100]{1,0} parameter(0)
        %n = s32[5]{0} parameter(1)
        %r = f32[5,100]{1,0} gather(%p, %n), offset_dims={1}, slice_sizes={1,100}""",
        2000 + 20 + 2000,
    ),
    # Its gradient: the rows that are added to are read and written.
    "scatter": (
        "f32[10,100]{1,0} fusion(%stack, %ids, %x5)",
        """%p = f32[10,100]{1,0} parameter(0)
        %n = s32[5]{0} parameter(1)
        %u = f32[5,100]{1,0} parameter(2)
        %r = f32[10,100]{1,0} scatter(%p, %n, %u), to_apply=%add""",
        2000 + 20 + 2000 + 2000,
    ),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_fusions_move_what_they_need(name):
    result, body, num_bytes = FUSIONS[name]
    parameters = """%stack = f32[10,100]{1,0} parameter(0)
    %i = s32[] parameter(1)
    %x = f32[1,100]{1,0} parameter(2)
    %ids = s32[5]{0} parameter(3)
    %x5 = f32[5,100]{1,0} parameter(4)
    """
    sum_of_two = "add:\n%a = f32[] parameter(0)\n%b = f32[] parameter(1)\n%s = f32[] add(%a, %b)"
    assert cost(f"{parameters}%f = {result}, calls=%fused", f"{sum_of_two}\n\nfused:\n{body}") == memory(num_bytes)


def test_a_nested_fusion_reads_what_its_parameters_need():
    inner = """inner:
    %p = f32[10,100]{1,0} parameter(0)
    %r = f32[1,100]{1,0} slice(%p), slice={[0:1], [0:100]}"""
    outer = """outer:
    %q = f32[10,100]{1,0} parameter(0)
    %r = f32[1,100]{1,0} fusion(%q), kind=kLoop, calls=%inner"""
    line = "%x = f32[10,100]{1,0} parameter(0)\n%f = f32[1,100]{1,0} fusion(%x), kind=kLoop, calls=%outer"
    assert cost(line, f"{inner}\n\n{outer}") == memory(400 + 400)


DOT = "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"
OPERANDS = "%a = bf16[3,512,256]{2,1,0} parameter(0)\n%b = bf16[3,256,128]{2,1,0} parameter(1)\n"


@pytest.mark.parametrize("fused", [False, True])
def test_matrix_products_count_their_contracted_dims(fused):
    line = f"%d = f32[3,512,128]{{2,1,0}} dot(%a, %b), {DOT}"
    found = cost(
        f"{OPERANDS}%f = f32[3,512,128]{{2,1,0}} fusion(%a, %b), kind=kCustom, calls=%gemm" if fused else OPERANDS + line,
        f"gemm:\n{OPERANDS}{line}" if fused else "",
    )
    assert (found.kind, found.flops) == ("matmul", 2 * 3 * 512 * 256 * 128)
    assert found.num_bytes == 3 * (2 * 512 * 256 + 2 * 256 * 128 + 4 * 512 * 128)


def test_a_large_product_waits_for_the_tensor_cores():
    lines = "%a = bf16[8192,8192]{1,0} parameter(0)\n%d = bf16[8192,8192]{1,0} dot(%a, %a), "
    found = cost(f"{lines}lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}")
    start = SHARE.kernel_s + SHARE.matmul_start_s
    assert found.seconds == pytest.approx(start + dot_seconds(Dot(1, 8192, 8192, 8192, "bf16"), MACHINE))


def test_a_thin_product_waits_for_memory():
    lines = "%a = bf16[8,65536]{1,0} parameter(0)\n%b = bf16[65536,4096]{1,0} parameter(1)\n"
    found = cost(f"{lines}%d = bf16[8,4096]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}")
    assert found.seconds == pytest.approx(SHARE.matmul_start_s + memory_s(2 * (8 * 65536 + 65536 * 4096 + 8 * 4096)))


def test_cublas_calls_are_matrix_products():
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":'
        '["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}'
    )
    result = "(bf16[3,512,128]{2,1,0}, s8[4096]{0})"
    call = f"%d = {result} custom-call(%a, %b), backend_config={config}, custom_call_target="
    found = cost(f'{OPERANDS}{call}"__cublas$lt$matmul"')
    assert (found.kind, found.flops) == ("matmul", 2 * 3 * 512 * 256 * 128)
    in_float8 = OPERANDS.replace("bf16", "f8e4m3fn")
    assert cost(f'{in_float8}{call}"__cublas$lt$matmul$f8"').flops == found.flops


@pytest.mark.parametrize(
    ("target", "mask", "window", "products", "efficiency"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 0, 2, SHARE.attention_efficiency),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 0, 1, SHARE.attention_efficiency),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 8192, 1, SHARE.attention_efficiency),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 2048, 2 * (1 / 2 - 1 / 8), SHARE.attention_efficiency),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 0, 2.5, SHARE.attention_backward_efficiency),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 1024, 5 * (1 / 4 - 1 / 32), SHARE.attention_backward_efficiency),
    ],
)
def test_fused_attention(target, mask, window, products, efficiency):
    config = (
        f'{{"cudnn_fmha_backend_config":{{"mask_type":"{mask}","sliding_window_length":{window},'
        '"intermediate_tensor_shape":{"dimensions":["2","16","4096","4096"]}}}'
    )
    qkv = "".join(f"%{name} = bf16[2,4096,16,128]{{3,2,1,0}} parameter({i})\n" for i, name in enumerate("qkv"))
    line = f'%o = (bf16[2,16,4096,128]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %v), custom_call_target="{target}"'
    found = cost(f"{qkv}{line}, backend_config={config}")
    flops = products * 2 * 2 * 16 * 4096 * 4096 * 128
    assert (found.kind, found.flops) == ("attention", flops)
    assert found.seconds == pytest.approx(SHARE.kernel_s + flops / (1e15 * efficiency))


@pytest.mark.parametrize("window", [None, 4096, 4095, 1, 65536])
def test_a_window_costs_what_the_formula_counts(window):
    """Forward and backward are 7 products; the formula has 6."""
    model = tiny_config().model
    model = dataclasses.replace(model, num_heads=1, num_kv_heads=1, head_dim=128, num_layers=1, sliding_window=window)
    formula = flops_per_token(model, 32768) - 6 * num_matmul_params(model)
    q, flops = "%q = bf16[1,32768,1,128]{3,2,1,0} parameter(0)", 0
    for direction in ("", "Backward"):
        line = '%o = (bf16[1,1,32768,128]{3,1,2,0}, u8[0]{0}) custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax'
        config = (
            f'{{"cudnn_fmha_backend_config":{{"mask_type":"CAUSAL","sliding_window_length":{window or 0},'
            '"intermediate_tensor_shape":{"dimensions":["1","1","32768","32768"]}}}'
        )
        flops += cost(f'{q}\n{line}{direction}", backend_config={config}').flops
    assert flops == pytest.approx(formula / 6 * 7 * 32768, rel=1e-3)


@pytest.mark.parametrize(
    ("ir", "language"), [("ML\\EFR{\\22", "pallas"), ("module {\\0A tt.func public @a() {\\0A}", "triton")]
)
@pytest.mark.parametrize(
    ("kernel", "products", "scores", "efficiency"),
    [
        ("attention_forward", 2, 2000.0, SHARE.pallas_efficiency),
        ("attention_backward_queries", 3, 2000.0, SHARE.pallas_backward_efficiency),
        ("attention_backward_keys", 4, 1600.0, SHARE.pallas_backward_efficiency),
    ],
)
def test_own_attention_kernels_take_the_tiles_that_they_compute(kernel, products, scores, efficiency, ir, language):
    lines = [
        "%tiles = s32[2,32,4]{2,1,0} parameter(0)",
        "%offset = s32[1]{0} parameter(1)",
        "%q = bf16[2,4096,16,128]{3,2,1,0} parameter(2)",
        *(f"%{name} = bf16[2,4096,4,128]{{3,2,1,0}} parameter({i})" for i, name in enumerate("kv", 3)),
        "%o = bf16[2,4096,16,128]{3,2,1,0} custom-call(%tiles, %offset, %q, %k, %v),"
        ' custom_call_target="__gpu$xla.gpu.triton",'
        f' backend_config={{grid_x = 32 : i32, ir = "{ir}", name = "{kernel}", num_stages = 3 : i32}}',
    ]
    program = module("\n".join(lines))
    model = CostModel(program, MACHINE, Scores(by_queries=2000.0, by_keys=1600.0))
    found = model.cost(program.entry.root, program.entry)
    flops = products * 2 * 2 * 4096 * 16 * 128 * scores
    assert (found.kind, found.flops) == ("attention", flops)
    tiles = 64 if kernel == "attention_backward_keys" else 32
    busy = busy_share(Grid(16, tiles, 2), scores, 4096, MACHINE.gpu.cores)
    assert 0.9 < busy < 1
    assert found.seconds == pytest.approx(SHARE.kernel_s + flops / (1e15 * efficiency * busy))
    assert compiled_attention(program) == language
    assert not model.not_understood


def test_the_own_kernel_of_swiglu_reads_and_writes_its_arrays():
    lines = [
        "%gate_up = bf16[4096,2,1024]{2,1,0} parameter(0)",
        "%d = bf16[4096,1024]{1,0} parameter(1)",
        "%o = (bf16[4096,1024]{1,0}, bf16[4096,2,1024]{2,1,0}) custom-call(%gate_up, %d),"
        ' custom_call_target="__gpu$xla.gpu.triton",'
        ' backend_config={grid_x = 512 : i32, ir = "ML", name = "swiglu_gradient", num_stages = 1 : i32}',
    ]
    program = module("\n".join(lines))
    model = CostModel(program, MACHINE)
    assert model.cost(program.entry.root, program.entry) == memory(6 * 4096 * 1024 * 2)
    assert compiled_attention(program) == "plain"
    assert not model.not_understood


@pytest.mark.parametrize(
    ("results", "products", "scores", "efficiency"),
    [
        (("bf16[2,4096,16,128]", "f32[2,16,4096]", "f32[2,16,4096]"), 2, 2000.0, SHARE.tokamax_efficiency),
        (("bf16[2,4096,16,128]",), 3, 2112.0, SHARE.tokamax_backward_efficiency),
        (("bf16[2,4096,4,128]", "bf16[2,4096,4,128]"), 4, 2112.0, SHARE.tokamax_backward_efficiency),
    ],
    ids=("forward", "queries", "keys"),
)
def test_tokamax_skips_documents_forward_only(results, products, scores, efficiency):
    lines = [
        "%q = bf16[2,4096,16,128]{3,2,1,0} parameter(0)",
        *(f"%{name} = bf16[2,4096,4,128]{{3,2,1,0}} parameter({i})" for i, name in enumerate("kv", 1)),
        f"%o = {results[0] if len(results) == 1 else '(' + ', '.join(results) + ')'} custom-call(%q, %k, %v),"
        ' custom_call_target="mosaic_gpu_v2", api_version=API_VERSION_TYPED_FFI, backend_config={module = "ML\\EFR{\\22"}',
    ]
    program = module("\n".join(lines))
    model = CostModel(program, MACHINE, Scores(by_queries=2000.0, by_keys=2112.0))
    found = model.cost(program.entry.root, program.entry)
    flops = products * 2 * 2 * 4096 * 16 * 128 * scores
    assert (found.kind, found.flops) == ("attention", flops)
    assert found.seconds == pytest.approx(SHARE.kernel_s + flops / (1e15 * efficiency))
    assert compiled_attention(program) == "tokamax"
    assert not model.not_understood


def test_copies_to_the_host_take_the_bus():
    found = cost("%x = f32[1000000]{0} parameter(0)\n%c = f32[1000000]{0:S(5)} copy(%x)")
    assert found == Cost("copy", about(SHARE.kernel_s + 4e6 / SHARE.host_bandwidth), 0, 4_000_000)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('%r = f32[1000,100]{1,0} custom-call(%x), custom_call_target="my_kernel"', "custom-call my_kernel"),
        ("%r = f32[1000,100]{1,0} brand-new-op(%x)", "brand-new-op"),
        ("%r = f32[1000,100]{1,0} fusion(%x), kind=kCustom, calls=%strange", "brand-new-op"),
    ],
)
def test_what_is_not_understood_is_listed_and_guessed_by_its_bytes(line, name):
    strange = "strange:\n%p = f32[1000,100]{1,0} parameter(0)\n%q = f32[1000,100]{1,0} brand-new-op(%p)"
    model, found = cost_and_model(X + line, strange)
    assert model.not_understood == {name: 1}
    assert found == memory(800_000)


def test_one_tile_takes_one_core():
    """100 cores, and one product of 256 x 128 outputs: the other 99 wait, unless the contraction is split up."""
    alone = dot_seconds(Dot(1, 256, 128, 128, "bf16"), MACHINE)
    assert alone == pytest.approx(2 * 64 * 64 * (128 + 128) * 100 / (PEAK * 0.7))  # eight small tiles at once
    assert dot_seconds(Dot(1, 256, 128, 128 * 16, "bf16"), MACHINE) < 16 * alone


def test_a_last_wave_costs_as_much_as_a_full_one():
    """25,600 rows are exactly one wave of 100 tiles; one row more is a second wave, or smaller tiles."""
    full = dot_seconds(Dot(1, 25_600, 128, 8192, "bf16"), MACHINE)
    assert full == pytest.approx(2 * 25_600 * 128 * (8192 + 128) / PEAK)
    assert dot_seconds(Dot(1, 25_601, 128, 8192, "bf16"), MACHINE) > 1.2 * full


@pytest.mark.parametrize(("dtype", "times"), [("f16", 1), ("f32", 2), ("f8e4m3fn", 0.5 / SHARE.float8_share), ("s8", 0.5)])
def test_narrower_types_are_faster(dtype, times):
    product = Dot(1, 8192, 8192, 8192, "bf16")
    assert dot_seconds(dataclasses.replace(product, dtype=dtype), MACHINE) == pytest.approx(
        times * dot_seconds(product, MACHINE)
    )


def test_large_products_come_close_to_the_machines_best():
    product = Dot(1, 8192, 8192, 8192, "bf16")
    assert 0.93 < product.flops / dot_seconds(product, MACHINE) / PEAK < 1
