"""The faults of scripts/faults.py can still be seeded, and their tests are there."""

import re
from collections import Counter

import pytest

from scripts.faults import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_has_its_place_and_its_tests(fault: Fault):
    right = (ROOT / "llamajax" / fault.file).read_text()
    assert right.count(fault.old) == 1
    compile(right.replace(fault.old, fault.new), fault.file, "exec")
    assert (ROOT / "tests" / f"{fault.tests}.py").is_file()


def test_what_came_of_each_is_told():
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
    told = re.findall(r"^\| (.+?) \| `", (ROOT / "docs" / "faults.md").read_text(), flags=re.MULTILINE)
    assert told == [fault.name for fault in FAULTS]
    assert f"| {len(FAULTS)} of {len(FAULTS)} | [tested](docs/faults.md) |" in (ROOT / "README.md").read_text()
