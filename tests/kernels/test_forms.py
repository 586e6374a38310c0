"""Which form split rows take: by what the configuration says, what can be, and what is computed and sent."""

import re

import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.kernels.forms import sequence_form
from tests.planning.plans import CONFIG

OPEN = {"model.attend_across_documents": True}
PLAIN = {"model.attention_kernel": "plain"}


@pytest.mark.parametrize(
    ("axes", "changes", "form", "reason"),
    [
        ({"fsdp": 16}, {}, "gather", "no row is split"),
        ({"sequence": 4}, PLAIN, "ring", "it computes 56% of the scores that whole rows have, and hides"),
        ({"sequence": 2}, PLAIN, "ring", "it computes 62% of"),
        ({"sequence": 4}, {}, "ulysses", "whole rows can be one fused kernel's"),
        ({"sequence": 4}, OPEN, "ulysses", "whole rows can be one fused kernel's"),
        ({"sequence": 4}, {"model.attention_kernel": "cudnn"}, "ring", "it computes"),
        ({"sequence": 4}, {"parallel.sequence": "gather"}, "gather", "parallel.sequence says so"),
        ({"sequence": 4, "tensor": 4}, OPEN, "ring", r"it computes .*\w by gather, .*\w by ring$"),
        ({"sequence": 8}, PLAIN | {"data.seq_len": 1016}, "ulysses", r"it sends least; .* by gather, .* by ulysses$"),
        ({"sequence": 2}, PLAIN | {"data.seq_len": 1022, "model.num_kv_heads": 1}, "gather", "it sends least"),
        ({"sequence": 4, "tensor": 4}, {"data.seq_len": 1020}, "gather", "it sends least; .* by gather$"),
    ],
)
def test_the_form_and_its_reason(axes, changes, form, reason):
    config = CONFIG.changed({"mesh": MeshConfig(**({"fsdp": -1} | axes))} | changes)
    chosen, why = sequence_form(config, config.mesh.axis_sizes(16))
    assert chosen == form
    assert re.match(reason, why), why
    assert "\n" not in why


def test_emulated_devices_gather():
    config = CONFIG.changed({"mesh": MeshConfig(sequence=2, num_cpu_devices=8)})
    assert sequence_form(config, config.mesh.axis_sizes(8)) == ("gather", "emulated devices hide nothing")
