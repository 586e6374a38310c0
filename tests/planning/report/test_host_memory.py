"""A plan says what a disk must write, and for how long it must last."""

from llamajax.planning.report.host_memory import disk_line


def test_the_needs_of_a_disk_are_one_line():
    """10 GiB in steps of 2 s: all of it within one second, and 15.8 million steps in a year."""
    line = disk_line(10 * 2**30, 2.0)
    assert line.startswith(
        "a GPU writes 10.0 GiB of saved values per step, hidden at 10.7 GB/s or more, and 169 PB in a year"
    )
    assert "\n" not in line
