"""The page with the drawings: whole, self-contained, safe, and to scale."""

import dataclasses
import re

import pytest

from llamajax.planning.cost.timeline import Event, Loop, layer_loops
from llamajax.planning.report import figures, picture
from llamajax.planning.scopes import MEMORY_KINDS
from llamajax.planning.search import Sweep
from tests.html_tags import check_tags
from tests.planning import plans


def page(plan=None, **sweep) -> str:
    plan = plan or plans.plan()
    return picture.page(plan, figures.figures(plan, **sweep))


def test_everything_is_on_the_page():
    text = page()
    for word in (
        "One layer forward",
        "One layer backward",
        "Memory of a GPU",
        "the optimizer's moments",
        "all-gather",
        "compute",
    ):
        assert word in text
    assert text.count("<svg ") == 3
    assert "predicted, not measured" in " ".join(text.split())
    assert ">intra-node<" in text
    assert ">inter-node<" in text
    assert "does not fit" not in text


def test_the_page_loads_nothing_runs_nothing_and_its_tags_match():
    text = page()
    assert not re.findall(r"""(?:src|href|url|@import|<script)\s*[=(>]""", text)
    assert "default-src 'none'" in text
    assert "<h1>&lt;tiny&gt;</h1>" in text
    check_tags(text)


def bars(text: str, style: str) -> list[float]:
    return [float(width) for width in re.findall(rf'<rect class="{style}" x="[\d.]+" y="6" width="([\d.]+)"', text)]


def test_every_kind_of_memory_has_a_colour():
    style = page().partition("<style>")[2].partition("</style>")[0]
    assert [
        kind for kind in (*MEMORY_KINDS, "beside", "free") if f".{kind} {{" not in style and f".{kind}," not in style
    ] == []


def test_the_memory_is_to_scale():
    text = page()
    (optimizer,), (parameters,), (free,) = bars(text, "optimizer"), bars(text, "parameters"), bars(text, "free")
    assert optimizer == pytest.approx(2 * parameters, rel=0.01)
    assert parameters + free == pytest.approx(1184 * (84_942_979_072 / plans.GIB - 54.01) / 79.11, rel=0.01)
    over = page(plans.plan(peak_bytes=90 * plans.GIB))
    assert "does not fit" in over
    assert not bars(over, "free")


def test_every_event_of_a_layer_is_drawn_or_joined_to_its_neighbour():
    timeline = plans.plan().chosen.timeline
    loops = layer_loops(timeline)
    assert loops is not None
    text = page()
    for style in ("all-gather", "reduce-scatter", "wait", "matmul"):
        assert f'<rect class="{style}"' in text
    joined = [int(count) for count in re.findall(r"and (\d+) more, ", text)]
    titles = text.count("<title>", text.index("One layer forward"))
    drawn = sum(len(max(loop.iterations, key=lambda i: i[0])[2]) for loop in loops)
    assert titles + sum(joined) == drawn


def test_what_is_too_short_to_see_is_joined():
    """A layer of 5,000 kernels of a microsecond, all alike, and one of another kind at its end."""

    def loop(op_name: str) -> Loop:
        short = [Event("compute", "k", "matmul", op_name, index * 1e-6, 1e-6) for index in range(5000)]
        return Loop("while", "", 0.0, ((4, 6e-3, (*short, Event("compute", "last", "memory", op_name, 5e-3, 1e-3))),))

    made = plans.plan()
    timeline = dataclasses.replace(made.chosen.timeline, events=(loop("jvp()/dot"), loop("transpose(jvp())/dot")))
    text = page(dataclasses.replace(made, informed=dataclasses.replace(made.chosen, timeline=timeline)))
    assert text.count("<title>matmul: k (jvp()/dot) and 4999 more, 5 ms</title>") == 1
    assert text.count("<title>memory: last") == 2
    assert len(text) < 20_000


def test_a_step_without_layers_to_draw_says_so():
    made = plans.plan()
    bare = dataclasses.replace(made.chosen, timeline=dataclasses.replace(made.chosen.timeline, events=()))
    assert "no loop over its layers" in page(dataclasses.replace(made, informed=bare))


def test_a_sweep_becomes_bars():
    made = (plans.plan(), plans.plan(peak_bytes=90 * plans.GIB))
    text = page(sweep=Sweep(key="model.<b>", values=("1", "<2>"), configs=(plans.CONFIG,) * 2), plans=made)
    assert "by model.&lt;b&gt;" in text
    assert "&lt;2&gt;" in text
    assert text.count("efficiency 1.000") == 2
    assert "efficiency 1.000, does not fit" in text
