"""Pages that CI runs and a reader follows: every block is run or says why not, every key of YAML exists, no link leaves.

Nothing is executed here: `.ci/docs.py` runs the blocks, and `mkdocs build --strict` checks links and anchors.
"""

import dataclasses
import os
import pathlib
import re
import runpy
from typing import Any

import yaml

from llamajax.config.evaluate import EvaluateConfig
from llamajax.config.file import load_config
from llamajax.config.generate import GenerateConfig
from llamajax.config.keys import item_type
from llamajax.config.launch import LaunchConfig
from llamajax.config.run import Config
from llamajax.config.serve import ServeConfig

ROOT = pathlib.Path(__file__).parent.parent
RUNNER = runpy.run_path(str(ROOT / ".ci" / "docs.py"))
PAGES = [ROOT / "README.md", *RUNNER["pages"]()]
BLOCKS = {page: RUNNER["blocks"](page) for page in PAGES}
LANGUAGES = {"sh", "python", "yaml", "text", "json", "jinja", "html", "diff"}
"""Languages of blocks. `bash` or `py` would hide a block from the runner."""
ROOTS = (Config, LaunchConfig, GenerateConfig, ServeConfig, EvaluateConfig)


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, the tags of which name Python objects."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def _blocks(*languages: str) -> list[Any]:
    return [block for blocks in BLOCKS.values() for block in blocks if block.language in languages]


def test_every_block_names_a_language_and_ends():
    assert not [
        block.place for blocks in BLOCKS.values() for block in blocks if block.language not in LANGUAGES or block.text == ""
    ]
    for page in PAGES:
        assert len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) % 2 == 0, page


def test_every_block_that_is_left_out_says_why():
    """`<!-- not run: REASON -->` is for commands, `<!-- not checked: REASON -->` for YAML, on the line before the block."""
    for page, blocks in BLOCKS.items():
        text = page.read_text()
        reasons = re.findall(r"^ *<!-- not (run|checked):(.*)-->$", text, re.MULTILINE)
        assert len(reasons) == text.count("<!-- not "), f"{page}: a reason is a line of its own"
        assert all(reason.strip() for _, reason in reasons), page
        runs = sum(block.reason is not None and block.language in RUNNER["RUNNABLE"] for block in blocks)
        checks = sum(block.reason is not None and block.language == "yaml" for block in blocks)
        assert (runs, checks) == tuple(sum(kind == word for kind, _ in reasons) for word in ("run", "checked")), page


def test_commands_use_the_environment_that_they_run_in():
    """Another `python` would import other code than the page describes."""
    assert not [
        f"{block.place}: {line}"
        for block in _blocks("sh")
        if block.reason is None
        for line in block.text.splitlines()
        if re.match(r"\s*(python3?|pip|pytest|torchrun) ", line) and not re.match(r"\s*python3 -m venv ", line)
    ]


def _unknown_keys(tree: Any, kind: Any, above: str = "") -> list[str]:
    """The keys of a fragment that a section of type `kind` does not have."""
    if isinstance(tree, dict) and dataclasses.is_dataclass(kind):
        fields = {field.name: field.type for field in dataclasses.fields(kind)}
        return [
            bad
            for name, value in tree.items()
            for bad in (
                _unknown_keys(value, fields[name], f"{above}{name}.") if name in fields else [f"{above}{name}: unknown"]
            )
        ]
    if isinstance(tree, list):
        return [bad for i, item in enumerate(tree) for bad in _unknown_keys(item, item_type(kind), f"{above}{i}.")]
    return []


def test_yaml_blocks_have_keys_that_exist(tmp_path):
    """A complete run is read as a run's file is; of a fragment every key exists in one command's settings."""
    for block in _blocks("yaml"):
        if block.reason is not None:
            continue
        tree = yaml.safe_load(block.text)
        assert isinstance(tree, dict), block.place
        if {"run_dir", "train"} <= tree.keys():
            path = tmp_path / "run.yaml"
            path.write_text(block.text)
            load_config(path)
            continue
        tree.pop("base", None)
        unknown = [_unknown_keys(tree, root) for root in ROOTS]
        assert [] in unknown, f"{block.place}: {unknown[0]}"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_ci_runs_the_default_tests():
    """A block of the README runs the default suite; `.ci/run` itself runs the slow tests only."""
    assert any(".venv/bin/pytest" in block.text and block.reason is None for block in BLOCKS[ROOT / "README.md"])


def _files(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [file for part in (nav.values() if isinstance(nav, dict) else nav) for file in _files(part)]


def test_every_page_is_in_the_navigation():
    files = _files(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"])
    assert len(files) == len(set(files))
    assert set(files) == {page.relative_to(ROOT / "docs").as_posix() for page in RUNNER["pages"]()}


LINK = re.compile(r"\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")


def _prose(page: pathlib.Path) -> str:
    return re.sub(r"^( *)```.*?^\1```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_links_stay_in_the_manual():
    """Pages are also read from an installed wheel, which has no other files of the checkout."""
    wrong = []
    for page in PAGES[1:]:
        for found in LINK.finditer(_prose(page)):
            link = (found[1] or found[2]).partition("#")[0]
            target = pathlib.Path(os.path.normpath(page.parent / link))  # a link to a link, as of the changelog, stays
            if link and not re.match(r"https?:|mailto:", link):
                wrong += [f"{page.name}: {link}"] * (not target.is_relative_to(ROOT / "docs") or not target.is_file())
    assert not wrong


def test_lists_and_tables_follow_an_empty_line():
    """GitHub needs none, but the site runs such a list or table into the paragraph before it."""
    item = re.compile(r"([-*]|\d+\.) ")
    wrong = []
    for page in PAGES[1:]:
        for paragraph in re.split(r"\n\s*\n", _prose(page)):
            first, *others = [line for line in paragraph.splitlines() if not line.startswith(("<!--", "#"))] or [""]
            begins = [line for line in others if (item.match(line) and not item.match(first)) or line.startswith("|")]
            wrong += [f"{page.name}: {line}" for line in begins[:1] if not first.startswith(("|", " "))]
    assert not wrong
