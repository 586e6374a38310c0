"""The table of verbs, and `llamajax` itself."""

import importlib.util
import re
import subprocess
import sys

import pytest

import llamajax
from llamajax import __main__
from llamajax.commands import verbs
from scripts.manual import commands as manual
from tests.runs import ROOT


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The exit code and the output of `llamajax WORDS`."""
    monkeypatch.setattr(sys, "argv", ["llamajax", *words])
    code = __main__.main()
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_the_list_has_a_line_for_each_verb(words, monkeypatch, capsys):
    code, out, err = said(monkeypatch, capsys, *words)
    assert (code, err) == (0, "")
    lines = re.findall(r"^  (\S+(?: \S+)?)  +(\S.*)$", out, re.MULTILINE)
    assert [name for name, _ in lines] == list(verbs.verbs())
    assert all(about[0].isupper() and "`" not in about for _, about in lines)


def test_each_command_is_a_verb_and_has_a_reference():
    """A file of a command without a row would not be found, and one without a reference could not be completed."""
    commands = {path.stem for path in (ROOT / "llamajax").glob("*.py") if "def main(" in path.read_text()} - {"__main__"}
    modules = {verb.module for verb in verbs.verbs().values()}
    assert modules == {f"llamajax.{name}" for name in commands} | {
        "converters.hf",
        "converters.tokenizer",
        "converters.megatron",
    }
    assert modules == {f"llamajax.{name}" for name in manual.COMMANDS} | set(manual.PARSERS)
    assert all(verb.example.startswith(f"python -m {verb.module} ") for verb in verbs.verbs().values())


def test_a_verb_without_its_module_does_not_exist(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llamajax.report" else find_spec(name))
    assert "report" not in verbs.verbs()
    code, out, err = said(monkeypatch, capsys, "report", "runs/x")
    assert (code, out) == (2, "")
    assert err.startswith("report: is not a verb; ")


def test_the_version(monkeypatch, capsys):
    assert said(monkeypatch, capsys, "--version") == (0, f"llamajax {llamajax.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], "trian: is not a verb; did you mean train?"),
        (["TRAIN"], "TRAIN: is not a verb; did you mean train?"),
        (["train.py"], "train.py: is not a verb; did you mean train?"),
        (["conver"], "conver: is not a verb; did you mean convert?"),
        (["convert", "tokeniser"], "tokeniser: is not a verb of convert; did you mean tokenizer?"),
        (["convert", "x"], "x: is not a verb of convert; choose one of hf, tokenizer, megatron"),
        (["--config", "x"], "--config: comes before the verb; write llamajax VERB --config, or llamajax for the verbs"),
        (["a\nb"], "'a\\nb': is not a verb; choose one of "),
        ([""], ": is not a verb; choose one of "),
    ],
)
def test_an_unknown_verb_is_one_line(words, line, monkeypatch, capsys):
    code, out, err = said(monkeypatch, capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_a_group_lists_its_verbs(monkeypatch, capsys):
    for words in (["convert"], ["convert", "--help"]):
        code, out, _ = said(monkeypatch, capsys, *words)
        assert code == 0
        assert re.findall(r"^  convert (\w+) ", out, re.MULTILINE) == ["hf", "tokenizer", "megatron"]


def test_a_verb_gets_the_rest_of_the_line(monkeypatch, capsys):
    code, out, err = said(monkeypatch, capsys, "report", "nowhere", "--json")
    assert code == 2
    assert out == ""
    assert err.startswith("nowhere")
    with pytest.raises(SystemExit) as ended:
        said(monkeypatch, capsys, "convert", "hf", "export", "--help")
    assert ended.value.code == 0


def test_the_list_imports_no_jax():
    code = "import sys; sys.argv = ['llamajax']; from llamajax.__main__ import main; main(); print('jax' in sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert outcome.stdout.endswith("\nFalse\n")
