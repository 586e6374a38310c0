"""The figures, the text and the page of a verification, made from small sides."""

import json
import re

import numpy as np

from llamajax.config.parallel import AXES, MeshConfig
from llamajax.verification import text
from llamajax.verification.figures import figures, form_figures
from llamajax.verification.page import page
from llamajax.verification.reference_run import Side
from llamajax.verification.variants import Trial
from tests.html_tags import check_tags
from tests.tiny import tiny_config
from tests.verification.sides import only, side

CONFIG = tiny_config("runs/<tiny>", mesh=MeshConfig(fsdp=2, tensor=4, num_cpu_devices=8))
VERIFIED = CONFIG.changed({"model.num_layers": 1, "optimizer.eps": 0.03})
TRIALS = [Trial("mesh.fsdp", 1, True), Trial("mesh.tensor", 1, False)]
BROKEN = side(only(1, "gradient", ("head",), lambda value: value * np.nan), tokens=200)


def told(ours: Side | None = None, truth: Side | None = None) -> dict:
    ours, truth = ours or side(), truth or side()
    rows = [form_figures("trained", None, side(), truth), form_figures("parallel.<a>: b", None, ours, truth)]
    clues, trials = (["a <clue>", "another"], TRIALS) if ours is BROKEN else ([], [])
    return figures(CONFIG, VERIFIED, rows, ours, truth, clues, trials, 12.0)


def test_figures_say_what_was_verified_and_what_came_out():
    found = told()
    assert found["equal"]
    assert found["form"] == "trained"
    assert found["largest_difference"] == 0
    assert (found["mesh"], found["num_devices"]) == (dict(zip(AXES, (1, 1, 2, 1, 1, 4), strict=True)), 8)
    assert found["changes"] == {
        "model.num_layers": {"configured": 2, "verified": 1},
        "optimizer.eps": {"configured": 1e-8, "verified": 0.03},
    }
    assert [tensor["name"] for tensor in found["tensors"]] == ["embedding", "layers.mlp.w_down", "head"]
    assert found["tensors"][2]["shape"] == [8, 4]
    assert found["steps"][0]["tokens"] == 100
    assert found["first_difference"] is None


def test_figures_of_a_difference_are_json_without_infinities():
    found = told(BROKEN)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert not found["equal"]
    assert found["form"] == "parallel.<a>: b"
    assert [row["equal"] for row in found["forms"]] == [True, False]
    assert found["first_difference"] == {"step": 1, "kind": "tokens", "name": "", "shape": [], "difference": 1.0}
    assert [tensor["equal"] for tensor in found["tensors"]] == [True, True, False]
    assert found["tensors"][2]["gradient"] is None
    assert found["trials"][0] == {"key": "mesh.fsdp", "value": 1, "cured": True}


def test_tensors_are_told_up_to_the_step_that_differs_first():
    ours = side(
        lambda step, kind, name, value: -value if step == 2 or (step, kind, name) == (1, "weight", "head") else value
    )
    assert [tensor["equal"] for tensor in told(ours)["tensors"]] == [True, True, False]
    before = side(only(0, "weight", ("head",), np.negative))
    assert [tensor["weight"] for tensor in told(before)["tensors"]] == [0, 0, 2]


def test_the_text_ends_with_the_verdict(capsys):
    text.print_verification(told())
    out = capsys.readouterr().out
    assert (
        "verdict    equal: loss, gradients, moments and weights of 2 steps on 8 devices match one device within 1e-05" in out
    )
    assert "differs" not in out
    text.print_verification(told(BROKEN))
    out = capsys.readouterr().out
    assert (
        "verdict    different: 2 steps on 8 devices with parallel.<a>: b do not match one device; step 1: tokens differs"
        in out
    )
    assert "cause      a <clue>\n           another\n" in out
    assert "tried      it goes away with mesh.fsdp: 1; it stays with mesh.tensor: 1" in out
    assert re.search(r"head +8 x 4 +not finite +0 +0 +0 +differs", out)


def test_an_array_that_the_optimizer_does_not_keep_is_not_told(capsys):
    truth = side()
    for step in truth.steps:
        step.arrays["second moment"].pop("head")  # pyright: ignore[reportAttributeAccessIssue] (a dict here)
    found = told(side(), truth)
    assert found["kinds"] == ["gradient", "first_moment", "second_moment", "weight"]
    assert ["second_moment" in tensor for tensor in found["tensors"]] == [True, True, False]
    text.print_verification(found)
    assert re.search(r"head +8 x 4 +0 +0 + 0 +ok", capsys.readouterr().out)
    assert page(found).count("<circle") == 4 * 3 - 1


def test_trials_that_all_fail_are_told_too():
    found = told(BROKEN)
    assert text.trials({"trials": found["trials"][1:]}) == "none of these makes it go away: mesh.tensor: 1"
    assert text.trials({"trials": found["trials"][:1]}) == "it goes away with mesh.fsdp: 1"
    assert text.trials({"trials": []}) == ""


def test_a_page_has_everything_and_loads_nothing():
    for found in (told(), told(BROKEN)):
        content = page(found)
        assert not re.findall(r"""(?:src|href|url|@import|<script)\s*[=(>]""", content)
        assert "default-src 'none'" in content
        assert "<h1>&lt;tiny&gt;</h1>" in content
        assert content.count("<circle") == 4 * 3
        assert ("a &lt;clue&gt;" in content) is (not found["equal"])
        assert "parallel.&lt;a&gt;: b" in content
        check_tags(content)


def test_what_differs_lies_beyond_the_line():
    content = page(told(BROKEN))
    limit = float(re.findall(r'class="limit" x1="([\d.]+)"', content)[0])
    at = [float(x) for x in re.findall(r'<circle class="gradient" cx="([\d.]+)"', content)]
    assert [x > limit for x in at] == [False, False, True]
