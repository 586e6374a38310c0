"""Programs of torch's rows, as far as a CPU shows."""

import pytest

from scripts.bench.case import TOY, Case

torch = pytest.importorskip("torch")
from scripts.bench import torch_attention  # noqa: E402  (these need torch)
from scripts.bench.torch_rows import fused_kernels, micro_batches  # noqa: E402


def test_torch_knows_where_documents_start():
    case = Case(model=TOY, seq_len=128, packed=True)
    for batch in micro_batches(case, 0, 2):
        starts = batch["document_starts"].tolist()
        assert starts == sorted(starts)
        begins = torch.nonzero(batch["positions"].flatten() == 0)[:, 0].tolist()
        assert [start for start in starts if start < 2 * 128] == begins


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_torchs_forms_of_attention_agree(monkeypatch):
    """Uncompiled, on the CPU; what torch has no kernel for here is tried on a GPU."""
    monkeypatch.setattr(torch_attention, "compiled", lambda function: function)
    case = Case(model="1b", seq_len=2048, packed=True)
    toy = Case(model=TOY, seq_len=128, packed=True)
    q, k, v = (torch.randn((2, 128, n, 16)) for n in (4, 2, 2))
    plain, flex = torch_attention.forms(toy)["sdpa"], torch_attention.forms(case)["flex"]
    for batch in micro_batches(toy, 0, 2):
        mask = plain.prepare(batch)
        true = plain.attend(q, k, v, mask)
        torch.testing.assert_close(flex.attend(q, k, v, flex.prepare(batch)), true)
        torch.testing.assert_close(torch_attention._sdpa_repeated(q, k, v, mask), true)


def test_fused_attention_is_found_among_torchs_kernels():
    names = [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_31", "triton_poi_fused_add_0",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(Flash_bwd_params)",
        "triton_tem_fused_flex_attention_backward_2", "triton_tem_fused_flex_attention_1",
    ]  # fmt: skip
    found = fused_kernels(names)
    assert len(found["forward"]) == 2
    assert "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel" in found["backward"]
    assert fused_kernels(["triton_poi_fused_add_0", "softmax_warp_forward"]) == {"forward": [], "backward": []}
