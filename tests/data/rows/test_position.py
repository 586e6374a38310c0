"""Positions of rows: what a run passes over is left out once, wherever it goes on from."""

from llamajax.data.rows.position import PassedOver, next_row


def window(after_step, first_row, num_rows):
    return PassedOver(after_step=after_step, first_row=first_row, num_rows=num_rows, reason="step 9: bad", time=0.0)


def rows_of(num_steps, passed_over):
    """The rows of so many steps, four each."""
    firsts = (next_row(step, lambda n: 4 * n, passed_over) for step in range(num_steps))
    return [row for first in firsts for row in range(first, first + 4)]


def test_without_bad_steps_the_rows_are_in_order():
    assert rows_of(5, ()) == list(range(20))


def test_rows_passed_over_are_never_taken_and_all_others_once():
    windows = [window(2, 8, 12), window(5, 32, 4)]
    assert rows_of(8, windows) == [*range(8), *range(20, 32), *range(36, 48)]
    assert rows_of(2, windows) == rows_of(2, ())


def test_who_goes_further_back_passes_over_all_that_was_tried_since():
    """The newer checkpoint was damaged: the second window holds the first, and what lies between them."""
    windows = [window(6, 24, 8), window(2, 8, 28)]
    assert rows_of(8, windows) == [*range(8), *range(36, 60)]
