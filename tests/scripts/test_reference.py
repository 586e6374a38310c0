"""The generated reference of the manual is that of the code."""

import pytest

from llamajax.config.keys import REMOVED
from scripts.reference import FILES, FOLDER, ROOT


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path):
    assert path.read_text() == FILES[path](), "run python scripts/reference.py"


def test_removed_settings_are_told_with_what_to_write_instead():
    """Where users look for them: the promise of stability, and the changelog."""
    for page in (FOLDER / "stability.md", ROOT / "CHANGELOG.md"):
        assert not [key for key in REMOVED if f"`{key}`" not in page.read_text()], page
