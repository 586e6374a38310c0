"""The picture of all forms and the manual's table are those of the figures that are kept."""

import json
import xml.etree.ElementTree as ElementTree

from llamajax.config.file import load_config
from llamajax.step.resolve import resolve
from scripts.forms import BASE, FIGURES, FORMS, PICTURE, ROOT, drawn


def test_the_picture_is_drawn_from_the_figures():
    figures = json.loads(FIGURES.read_text())
    assert list(figures) == [form.name for form in FORMS]
    assert PICTURE.read_text() == drawn(figures)
    texts = [text.text for text in ElementTree.fromstring(PICTURE.read_text()).iter("{http://www.w3.org/2000/svg}text")]
    for form in FORMS:
        assert {form.name, form.splits, form.wins} <= set(texts)
    for told in figures.values():
        assert told["compute_s"] + told["slowdown_s"] + told["wait_s"] <= 1.0001 * told["step_time_s"]


def test_the_manual_tells_the_figures():
    figures = json.loads(FIGURES.read_text())
    lines = (ROOT / "docs" / "how-to" / "mesh.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    told = {row[0]: row[2:] for row in rows if row[0] in figures}
    expected = {}
    for form in FORMS:
        of_form = figures[form.name]
        step = f"{of_form['step_time_s']:.2f} s" if of_form["peak_bytes"] <= of_form["budget_bytes"] else "does not fit"
        sent, peak = of_form["wire_bytes"] / 2**30, of_form["peak_bytes"] / 2**30
        expected[form.name] = [step, f"{sent:.0f} GiB", f"{peak:.1f} GiB", form.wins]
    assert told == expected


def test_every_form_is_another_one():
    base = load_config(str(ROOT / "configs" / "llama3_1_8b_8xh200.yaml"))
    configs = [base.changed(BASE | form.changes) for form in FORMS]
    chosen = [resolve(config, config.mesh.axis_sizes(64)).config for config in configs]
    assert len({(config.mesh, config.parallel) for config in chosen}) == len(FORMS)
