"""An audit that could not ask is never taken for one that found nothing."""

import urllib.error

from scripts import audit

SKIPPED = {"name": "numpy", "skip_reason": "Dependency not found on PyPI and could not be audited: numpy (2.4.6)"}
CLEAN = {"name": "jax", "version": "0.10.2", "vulns": []}
BAD = {"name": "jinja2", "version": "3.1.5", "vulns": [{"id": "CVE-1", "fix_versions": ["3.1.6"]}]}


def run(monkeypatch, packages: object, *arguments: str) -> int:
    """The exit code where pip-audit finds `packages` in each lock, or the database raises them as an error."""
    monkeypatch.setattr("sys.argv", ["audit.py", *arguments])
    monkeypatch.setattr(audit.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(audit.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(audit, "audit", lambda lock, tool: packages)

    def ask() -> None:
        if isinstance(packages, OSError):
            raise packages

    monkeypatch.setattr(audit, "ask_database", ask)
    return audit.main()


def test_a_vulnerability_fails(monkeypatch, capsys):
    assert run(monkeypatch, [CLEAN, BAD]) == 1
    assert "requirements.lock: jinja2 3.1.5: CVE-1; fixed in 3.1.6" in capsys.readouterr().err


def test_no_vulnerability_passes(monkeypatch, capsys):
    assert run(monkeypatch, [CLEAN], "--required") == 0
    assert capsys.readouterr().out == "audit: no known vulnerability in 2 packages\n"


def test_packages_that_were_not_audited_are_told_and_fail_where_all_are_required(monkeypatch, capsys):
    for packages in ([SKIPPED], urllib.error.URLError("no network")):
        assert run(monkeypatch, packages) == 0
        assert "NOTHING WAS AUDITED" in capsys.readouterr().err
        assert run(monkeypatch, packages, "--required") == 1
    assert run(monkeypatch, [CLEAN, SKIPPED], "--required") == 1
    assert "2 of 4 packages were audited" in capsys.readouterr().err
