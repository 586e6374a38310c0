"""The drawing: every value in its place, whatever the values are."""

import re
import warnings

import numpy as np
import pytest

from llamajax.watch.chart import HEIGHT, WIDTH, Line, line_chart


def line(values, steps=None, **settings):
    values = np.asarray(values, np.float64)
    return Line(name="y", steps=np.arange(1, len(values) + 1) if steps is None else steps, values=values, **settings)


def draw(*lines, **settings):
    return line_chart("title", lines, text=lambda value: f"{value:.4g}", **settings)


def points(svg, css_class="c0"):
    """Coordinates of the first path of the class; None where the pen is lifted."""
    path = re.search(rf'<path class="{css_class}" d="([^"]*)"', svg)
    assert path
    return [[tuple(map(float, point.split())) for point in stroke.split("L")] for stroke in path[1].split("M")[1:]]


def test_values_are_drawn_in_proportion():
    (stroke,) = points(draw(line([0, 5, 10]), from_zero=True))
    (x0, y0), (x1, y1), (x2, y2) = stroke
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(y1 - y2)
    assert 0 < y2 < y1 < y0 < HEIGHT
    assert 0 < x0 < x2 < WIDTH


def test_round_ticks_lie_where_their_values_do():
    svg = draw(line(np.linspace(0, 10, 11)), from_zero=True)
    assert re.findall(r'<text class="y"[^>]*>([^<]*)<', svg) == ["0", "2.5", "5", "7.5", "10"]
    assert re.findall(r'<text class="x"[^>]*>([^<]*)<', svg) == ["2", "4", "6", "8", "10", "step"]
    heights = [float(y) for y in re.findall(r'<line class="grid"[^>]*y1="([^"]*)"', svg)]
    (stroke,) = points(svg)
    assert heights[-1] == pytest.approx(stroke[-1][1], abs=0.11)


def test_a_gap_where_the_value_is_not_finite():
    svg = draw(line([1, 2, np.nan, 3, np.inf, 4]))
    assert [len(stroke) for stroke in points(svg)] == [2, 1, 1]
    assert "2 not finite" in svg


def test_a_thinned_out_curve_keeps_every_spike():
    values = np.ones(100_000)
    values[[777, 55_555]] = 2.0, 0.0
    values[300] = np.nan
    svg = draw(line(values))
    (stroke,) = points(svg)
    assert len(stroke) < 2 * WIDTH
    heights = [y for _, y in stroke]
    usual = float(np.median(heights))
    assert min(heights) < usual < max(heights)
    assert usual - min(heights) == pytest.approx(max(heights) - usual, abs=0.2)


def test_a_far_outlier_does_not_flatten_the_rest():
    values = np.append(np.linspace(1, 2, 500), 1000.0)
    svg = draw(line(values), from_zero=True)
    assert "1 above the top" in svg
    heights = [y for stroke in points(svg) for _, y in stroke]
    assert max(heights[:-1]) - min(heights[:-1]) > HEIGHT / 5


def test_noise_is_drawn_faintly_under_its_medians():
    rng = np.random.default_rng(0)
    svg = draw(line(5 + rng.normal(0, 1, 1000), noisy=True))
    (noise,), (medians,) = points(svg, "c0 faint"), points(svg)
    assert len(noise) == 1000
    assert len(medians) == 200
    assert np.std([y for _, y in medians]) < np.std([y for _, y in noise]) / 1.5


@pytest.mark.parametrize(
    "values",
    [[3.0], [0.0], [1.0, 1.0], [np.nan], [np.inf, -np.inf], [-5.0, -4.0], [1e-30, 2e-30], [1e300, 1e-300], [np.nan] * 200],
)
@pytest.mark.parametrize("from_zero", [False, True])
def test_odd_values_draw_without_a_warning(values, from_zero):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = draw(line(values, noisy=True, dots=True), from_zero=from_zero)
    coordinates = re.findall(r'(?:x1|x2|y1|y2|cx|cy|d)="([^"]*)"', svg)
    assert coordinates
    assert "nan" not in " ".join(coordinates)


def test_reads_out_the_newest_value_of_every_curve():
    evals = Line(name="held-out", steps=np.array([5, 10]), values=np.array([8.0, 7.0]), dots=True)
    svg = draw(line(np.arange(12.0)), evals)
    assert "step 4: y 3&quot;" not in svg
    assert '"step 4: y 3"' in svg
    assert '"step 7: y 6, held-out 8 (step 5)"' in svg
    assert "<output>step 12: y 11, held-out 7 (step 10)</output>" in svg
    assert svg.count("<circle") == 2


def test_restarts_are_marked_and_names_are_escaped():
    svg = draw(Line(name="<b>", steps=np.array([1, 2]), values=np.array([1.0, 2.0])), restarts=[1, 2])
    assert svg.count('class="restart"') == 2
    assert "<b>" not in svg.replace("<b>title</b>", "").split("<script")[0]
