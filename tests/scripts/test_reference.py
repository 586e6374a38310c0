"""The generated reference of the manual is that of the code."""

import pytest

from llamajax.config.keys import REMOVED
from scripts.reference import FOLDER, PAGES, ROOT


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name):
    assert (FOLDER / name).read_text() == PAGES[name](), "run PYTHONPATH=. python scripts/reference.py"


def test_removed_settings_are_told_with_what_to_write_instead():
    """Where users look for them: the promise of stability, and the changelog."""
    for page in (FOLDER / "stability.md", ROOT / "CHANGELOG.md"):
        assert not [key for key in REMOVED if f"`{key}`" not in page.read_text()], page
