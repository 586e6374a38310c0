"""What a plan says about host memory."""

import io

from rich.console import Console

from llamajax.planning.report import host_memory
from llamajax.planning.report.text import _table

GIB = 2**30
TOLD = {
    "bytes": 230 * GIB,
    "bytes_per_node": 8 * 230 * GIB,
    "node_memory_bytes": 2048 * GIB,
    "bandwidth": 50e9,
    "gpus_per_link": 1,
    "copies": {"to_host": 460 * GIB, "from_host": 460.0 * GIB},
    "exposed_copy_s": 0.25,
    "choices": [
        {"state": 0.0, "values": [], "fraction": None, "card_bytes": 335 * GIB, "host_bytes": 0, "copy_s": 0.0,
         "layers_s": 0.272, "fits": False, "is_chosen": False},
        {"state": 1.0, "values": ["input", "qkv"], "fraction": 0.705, "card_bytes": 35 * GIB, "host_bytes": 230 * GIB,
         "copy_s": 0.0396, "layers_s": 0.289, "fits": True, "is_chosen": True},
    ],
    "forward_s": 0.0893,
    "copy_bandwidth": 50e9,
    "disk": None,
    "card_room_bytes": 36 * GIB,
    "host_room_bytes": 230 * GIB,
}  # fmt: skip


def test_one_line_has_memory_and_copies():
    assert host_memory.summary(TOLD, 82.44, 8) == (
        "230 GiB per GPU, 1.80 TiB of 2.00 TiB per node of 8; a GPU copies 460 GiB there and 460 GiB back per step, at"
        " 50 GB/s each way for 9.88 of 82.44 s, and waits for 0.25 s"
    )
    shared = TOLD | {"gpus_per_link": 2, "node_memory_bytes": None}
    assert "1.80 TiB per node of 8;" in host_memory.summary(shared, 82.44, 8)
    assert "each way, shared by 2 GPUs" in host_memory.summary(shared, 82.44, 8)


def test_a_lack_of_host_memory_is_told_and_nothing_else():
    assert host_memory.lack(3 * GIB, 2 * GIB) == "3.00 GiB of host memory per GPU, where 2.00 GiB may be used; "
    assert host_memory.lack(2 * GIB, 2 * GIB) == host_memory.lack(3 * GIB, None) == ""


def test_the_choices_are_a_table():
    out = io.StringIO()
    Console(file=out, width=160).print(host_memory.table(TOLD, _table))
    head, none, chosen, *_ = (line.split() for line in out.getvalue().splitlines())
    assert head[:4] == ["what", "waits", "in", "host"]
    assert none == ["none", "335.0", "GiB", "0.0", "GiB", "0", "ms", "272", "ms", "does", "not", "fit"]
    assert chosen[:9] == ["100%", "of", "weights", "and", "moments", "input,", "qkv", "70.5%", "35.0"]
    assert chosen[-1] == "chosen"


def test_the_rule_for_the_share_of_tokens_is_told_with_its_numbers():
    line = host_memory.closed_form(TOLD)
    assert "min(B T - W, M / (n - s) - W) / V" in line
    assert "B = 50 GB/s, T = 89.3 ms" in line
    assert "with 230 GiB of host memory per GPU" in line
    assert "host memory per GPU" not in host_memory.closed_form(TOLD | {"host_room_bytes": None})


def test_the_needs_of_a_disk_are_one_line():
    """10 GiB in steps of 2 s: all of it within one second, and 15.8 million steps in a year."""
    disk = {"bytes": 5 * GIB, "written_bytes": 10 * GIB, "layers": 31, "bandwidth": 3.8e9}
    line = host_memory.disk_line(disk, 2.0, 8)
    assert line.startswith(
        "files of 5.00 GiB per GPU, 40.0 GiB per node, hold the values of the first 31 layers; a GPU writes 10.0 GiB per"
        " step, hidden at 10.7 GB/s or more (the disks write 3.8), and 169 PB in a year"
    )
    assert "hidden at 10.7 GB/s or more, and" in host_memory.disk_line(disk | {"bandwidth": None}, 2.0, 8)
