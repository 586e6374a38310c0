"""The Dockerfile: hadolint checks its form, these tests what it says about the checkout."""

import re
import shutil
import subprocess
import tomllib

import pytest

import llamajax
from tests.runs import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
LINES = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
STEPS = [(word, rest) for word, _, rest in (line.partition(" ") for line in LINES if line)]
FINAL = STEPS[max(number for number, (word, _) in enumerate(STEPS) if word == "FROM") :]


def test_hadolint_finds_nothing():
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed: it comes with the extra `dev`")
    outcome = subprocess.run(["hadolint", "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stdout + outcome.stderr) == (0, "")


def test_stages_have_one_base_of_one_version():
    bases = {rest.partition(" AS ")[0] for word, rest in STEPS if word == "FROM"}
    (base,) = bases
    assert re.fullmatch(r"nvidia/cuda:13\.\d+\.\d+-base-ubuntu24\.04(@sha256:[0-9a-f]{64})?", base)


def test_everything_that_is_copied_exists_and_reaches_the_build():
    """Docker leaves out what .dockerignore does not allow, and the package needs what its links point to."""
    allowed = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    copied = {name for word, rest in STEPS if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]}
    assert copied == allowed
    assert not [name for name in copied if not (ROOT / name).exists()]
    links = [path for name in copied if (ROOT / name).is_dir() for path in (ROOT / name).iterdir() if path.is_symlink()]
    assert links
    assert {path.resolve().relative_to(ROOT).parts[0] for path in links} <= copied
    readme = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    assert readme in copied


def test_packages_are_installed_by_hash():
    installs = [part for word, rest in STEPS if word == "RUN" for part in rest.split("&&") if "pip install" in part]
    *locked, own = installs
    assert all("--require-hashes --only-binary :all:" in part for part in locked)
    assert "-r requirements.cuda13.lock" in locked[0]
    assert "--no-deps --no-build-isolation --no-index" in own
    (version,) = re.findall(r'"setuptools==(\S+) --hash=sha256:[0-9a-f]{64}"', TEXT)
    assert f"\nsetuptools=={version}\n" in (ROOT / "requirements.lock").read_text()


def test_the_image_has_no_root_and_no_installers():
    words = dict(FINAL)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", words["USER"])
    packages = re.findall(r"apt-get install (?:-\S+ )*([^&]+?) *&&", words["RUN"])
    assert packages == ["python3.12"]
    assert words["ENTRYPOINT"] == '["llamajax"]'
    assert f'image.version="{llamajax.__version__}"' in words["LABEL"]
