"""Nothing runs code of files, tells secrets, or listens to other machines; what this rests on has no known holes."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from llamajax.config.file import load_config
from llamajax.errors import ConfigError, without_passwords
from tests import runs
from tests.faults import inputs

SOURCES = sorted(path for package in ("llamajax", "converters") for path in (runs.ROOT / package).rglob("*.py"))
RUNS_CODE = {
    "eval", "exec", "pickle.load", "pickle.loads", "marshal.loads", "torch.load", "yaml.load", "yaml.unsafe_load",
    "yaml.full_load", "os.system", "os.popen",
}  # fmt: skip
SECRETS = {
    "HF_TOKEN": "hf_qwertyuiopasdfgh", "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "HTTPS_PROXY": "http://somebody:proxypassword@127.0.0.1:9",
}  # fmt: skip


def calls(path: pathlib.Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def test_no_call_runs_what_a_file_holds():
    found = [f"{path.name}: {ast.unparse(call)}" for path in SOURCES for call in calls(path)
             if ast.unparse(call.func) in RUNS_CODE]  # fmt: skip
    assert not found
    loaders = r"^\s*(?:import|from) +(?:[\w., ]+, *)?(?:pickle|dill|cloudpickle|marshal|shelve|runpy)\b"
    assert not [path.name for path in SOURCES if re.search(loaders, path.read_text(), re.MULTILINE)]


def test_no_code_of_a_model_is_trusted_and_no_array_is_a_pickle():
    keywords = [keyword for path in SOURCES for call in calls(path) for keyword in call.keywords]
    trusted = [ast.unparse(keyword.value) for keyword in keywords if keyword.arg == "trust_remote_code"]
    assert trusted
    assert set(trusted) == {"False"}
    assert not [keyword for keyword in keywords if keyword.arg in ("allow_pickle", "shell")]


def test_processes_are_started_by_the_sandbox_the_launcher_and_the_doctor_alone():
    """The doctor starts `nvidia-smi` and programs that tell the time, with words of its own alone."""
    starters = {path for path in SOURCES if re.search(r"^import subprocess|from subprocess", path.read_text(), re.MULTILINE)}
    assert {path.name for path in starters if path.parent.name != "launching"} == {"chat_template.py", "findings.py"}


@pytest.mark.parametrize(
    ("package", "least"), [("transformers", (5, 3)), ("sentencepiece", (0, 2, 1)), ("jinja2", (3, 1, 6))]
)
def test_versions_with_known_holes_are_not_installed(package, least):
    """CVE-2026-4372; CVE-2026-1260; ways out of the sandbox."""
    dependencies = tomllib.loads((runs.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = [match for text in dependencies if (match := re.fullmatch(rf"{package}>=([0-9.]+)(,<.*)?", text))]
    assert tuple(map(int, bound[1].split("."))) >= least
    locked = re.findall(rf"^{package}==([0-9.]+)", (runs.ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert locked
    assert all(tuple(map(int, version.split("."))) >= least for version in locked)


def test_the_lock_for_clusters_has_a_hash_of_every_file_and_the_same_versions():
    plain, hashed = ((runs.ROOT / name).read_text() for name in ("requirements.lock", "requirements.cuda13.lock"))
    entries = re.findall(r"^([a-z0-9-]+)==(\S+).*((?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)+)$", hashed, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^\w", hashed, re.MULTILINE)) > 50
    locked = set(re.findall(r"^([a-z0-9-]+)==(\S+)", plain, re.MULTILINE))
    ours = {(name, version) for name, version, _ in entries if not name.startswith("nvidia-")}  # there they are torch's
    assert not ours - locked
    assert {"jax", "jax-cuda13-plugin", "orbax-checkpoint"} <= {name for name, _ in ours}


def test_passwords_in_addresses_are_not_told():
    assert without_passwords("s3://me:secret@host/x: no; see https://h") == "s3://...@host/x: no; see https://h"
    assert without_passwords("ssh://git@github.com") == "ssh://git@github.com"


@pytest.mark.parametrize("key", ["init_from", "data.cache_dir", "data.sources.0.paths", "seed"])
def test_a_password_in_the_settings_is_refused_and_not_told(key, tmp_path):
    path = runs.write_config(tmp_path)
    value = "https://me:secret@host/x"
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"{key}={[value] if key.endswith('paths') else value}"])
    assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_inputs_that_are_damaged_are_read_or_refused():
    told: list[str] = []
    for kind, count in (("configs", 100), ("data", 100)):
        counts = inputs.run_kind(kind, count, 1, told.append)
        assert sum(counts.values()) == count
        assert counts[inputs.REFUSED] + counts[inputs.READ] == count, told
        assert counts[inputs.REFUSED] > count // 3


@pytest.mark.slow
def test_hostile_directories_run_no_code_and_open_no_door(tmp_path):
    """Import, training, evaluation, export and generation, as Python itself sees them from inside."""
    command = [sys.executable, "-m", "tests.faults.audited", str(tmp_path)]
    process = subprocess.run(
        command, cwd=runs.ROOT, env=os.environ | {"PYTHONPATH": str(runs.ROOT)}, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    control = found.pop("control")
    assert {"exec", "open"} <= {note.split()[0] for note in control}
    assert found == {"noted": [], "codes": [0, 0], "listening": [], "canary": False}


@pytest.mark.slow
def test_what_is_written_or_said_holds_no_secrets_and_is_closed_to_others(tmp_path):
    config = runs.write_config(tmp_path, num_steps=2, eval_every=None, eval_batches=0)
    run_dir, exported, local = tmp_path / "run", tmp_path / "exported", tmp_path / "local"
    own = ["--mesh.num_cpu_devices", "1"]
    one = ["--mesh.fsdp", "1", "--mesh.sequence", "1", "--mesh.tensor", "1", *own]
    kept = ["--xla.compilation_cache", str(tmp_path / "programs"), "--checkpoint.local_dir", str(local)]
    commands = {
        "llamajax.launch": ["-n", "1", "--", "--config", str(config), *one, *kept, "--checkpoint.local_every", "1"],
        "converters.hf": ["export", str(run_dir), str(exported), "--no-verify"],
        "llamajax.generate": ["--model", str(exported), "--prompt", "the", "--max_tokens", "2", *own],
        "llamajax.report": [str(run_dir)],
    }
    failing = [
        "--config",
        str(config),
        *one,
        "--init_from",
        "https://me:urlpassword@host/model",
        "--run_dir",
        str(tmp_path / "x"),
    ]
    environment = os.environ | SECRETS | {"PYTHONPATH": str(runs.ROOT)}
    said = ""
    for module, arguments, code in [*((*item, 0) for item in commands.items()), ("llamajax.train", failing, 2)]:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            umask=0,
        )
        assert done.returncode == code, (module, done.stderr)
        said += done.stdout + done.stderr
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(written) > 20
    for secret in (*SECRETS.values(), "proxypassword", "urlpassword"):
        assert secret not in said
        assert not [path for path, content in written.items() if secret.encode() in content]

    folders = {run_dir: 0o027, exported: 0o027, tmp_path / "cache": 0o077, local: 0o077}
    made = [(path, bits) for folder, bits in folders.items() for path in (folder, *folder.rglob("*"))]
    assert not [path for path, bits in made if path.is_dir() and path.stat().st_mode & bits]
    assert not [path for path, _ in made if path.stat().st_mode & 0o027]
