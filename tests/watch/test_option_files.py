"""Files that options name: refused before the work, written after it."""

from pathlib import Path

import pytest

from llamajax.errors import ConfigError
from llamajax.watch.option_files import check_outputs, write_output

FILES, PAGES = ("--json", "--page"), ("--page",)


def test_good_names_leave_nothing_behind_until_they_are_written(tmp_path):
    options = {"--json": str(tmp_path / "a.json"), "--page": str(tmp_path / "a.html"), "--devices": "missing/8"}
    check_outputs(options, FILES, PAGES)
    assert list(tmp_path.iterdir()) == []
    write_output(options, "--json", lambda: "content")
    write_output(options, "--absent", lambda: pytest.fail("nobody asked for it"))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "content"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--json": "missing/a"}, "--json: missing/a: there is no directory missing; create it, or name another file"),
        (
            {"--json": "~nosuchuser/a"},
            "--json: ~nosuchuser/a: there is no directory ~nosuchuser; create it, or name another file",
        ),
        ({"--json": "."}, "--json: . cannot be written: Is a directory; name another file"),
        ({"--json": "/proc/a"}, "--json: /proc/a cannot be written: No such file or directory; name another file"),
        ({"--page": "a.png"}, "--page: a.png: the output is an HTML page; name a file that ends with .html"),
        ({"--json": "a.html", "--page": "./a.html"}, "--json: a.html: another option names this file too"),
    ],
)
def test_bad_names_are_refused_with_their_option(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="^" + message.replace(".", r"\.")):
        check_outputs(options, FILES, PAGES)
    assert list(Path().iterdir()) == []


def test_what_cannot_be_written_in_the_end_is_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written: Is a directory; name another file"):
        write_output({"--json": str(tmp_path)}, "--json", lambda: "")
