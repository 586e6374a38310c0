"""Compiled programs on disk: in a folder of the user's alone, loaded when they are whole, and never a reason to stop."""

import os
import pathlib
import resource
import signal
import stat
import subprocess
import sys
import time
import warnings
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from llamajax.parallel import compilation_cache
from tests import runs


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch):
    """No cache, whatever this test's environment and the test before it say; every program is kept, however small."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], None)
    jax.config.update(names[1], 0.0)
    jax_cache.reset_cache()
    with warnings.catch_warnings():
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def compile_again() -> tuple[bool, float]:
    """Whether a program, of which this process has forgotten that it knows it, is loaded; and what it computes."""
    jax.clear_caches()
    x = jnp.arange(64.0)
    lowered = jax.jit(lambda x: (jnp.sin(x) * 3).sum()).lower(x)
    with compilation_cache.loaded() as loaded:
        compiled = lowered.compile()
    return bool(loaded), float(compiled(x))


def mode(path: pathlib.Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_was_compiled_is_loaded(tmp_path):
    told = []
    compilation_cache.start(str(tmp_path / "programs"), told.append)
    (first, by_compiled), (second, by_loaded) = compile_again(), compile_again()
    assert (first, second) == (False, True)
    assert by_compiled == by_loaded
    assert told == []


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_folder_and_those_it_needs_are_made_for_the_user_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        assert compilation_cache.make_private(tmp_path / "cache" / "llamajax" / "compiled") is None
    finally:
        os.umask(before)
    for path in ("cache", "cache/llamajax", "cache/llamajax/compiled"):
        assert mode(tmp_path / path) == 0o700


@pytest.mark.parametrize(("bits", "is_trusted"), [(0o700, True), (0o755, True), (0o770, False), (0o702, False)])
def test_programs_that_others_could_have_written_are_not_run(tmp_path, bits, is_trusted):
    told = []
    own = tmp_path / "llamajax-programs"
    own.mkdir()
    own.chmod(bits)
    compilation_cache.start(str(tmp_path), told.append)
    assert (jax.config.values["jax_compilation_cache_dir"] is not None) == is_trusted
    if not is_trusted:
        (line,) = told
        assert line.startswith(f"xla.compilation_cache: {own} can be written by others, ")
        assert "chmod 700" in line
        assert "\n" not in line
    assert mode(own) == (0o700 if is_trusted else bits)


@pytest.mark.parametrize(("bits", "is_trusted"), [(0o755, True), (0o1777, True), (0o775, False), (0o777, False)])
def test_where_others_could_replace_the_folder_it_is_not_used(tmp_path, bits, is_trusted):
    told = []
    tmp_path.chmod(bits)
    compilation_cache.start(str(tmp_path), told.append)
    assert (jax.config.values["jax_compilation_cache_dir"] is not None) == is_trusted
    assert ["is in a directory that others can write to" in line for line in told] == [True] * (not is_trusted)
    assert mode(tmp_path) == bits


def test_what_lies_beside_the_programs_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation_cache, "MOST_BYTES", 10)
    own = tmp_path / "llamajax-programs"
    own.mkdir(mode=0o700)
    (tmp_path / "mine").mkdir()
    files = [tmp_path / "weights", tmp_path / "mine" / "jit_step-cache", own / "jit_step-cache"]
    for path in files:
        path.write_bytes(bytes(100))
        os.utime(path, (0, 0))
    compilation_cache.start(str(tmp_path), print)
    assert [path.exists() for path in files] == [True, True, False]


def test_another_users_folder_is_not_used(tmp_path):
    folder = pathlib.Path("/usr")
    if os.geteuid() == 0:
        folder = tmp_path / "programs"
        folder.mkdir(mode=0o700)
        os.chown(folder, 12345, -1)
    assert "belongs to another user" in str(compilation_cache.make_private(folder))


def test_where_no_folder_can_be_made_nothing_is_kept(tmp_path):
    (tmp_path / "file").touch()
    told = []
    compilation_cache.start(str(tmp_path / "file" / "programs"), told.append)
    assert jax.config.values["jax_compilation_cache_dir"] is None
    (line,) = told
    assert "cannot be created" in line
    assert line.endswith("every start compiles")


def test_by_default_it_is_the_users_cache_and_on_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compilation_cache.users_folder() == tmp_path / "llamajax" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG specification
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compilation_cache.users_folder() == tmp_path / "home" / ".cache" / "llamajax" / "compiled"
    told = []
    for place in ("auto", None):
        compilation_cache.start(place, told.append)
        assert jax.config.values["jax_compilation_cache_dir"] is None
    assert not any(tmp_path.iterdir())
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "environment"))
    compilation_cache.start(str(tmp_path / "programs"), told.append)
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "environment")
    assert told == []


def other_bit(whole: bytes, at: float) -> bytes:
    """One bit of a program is another: from `at`, between 0 and 1, the first without which it is not the same."""
    for index in range(int(at * (len(whole) - 1)), len(whole)):
        damaged = whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :]
        try:
            if zlib.decompress(damaged) != zlib.decompress(whole):
                return damaged
        except zlib.error:
            return damaged
    raise AssertionError("the last bit is of the checksum")


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"",
        lambda whole: b"x" * 999,
        *(partial(other_bit, at=at) for at in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)),
    ],
)
def test_a_damaged_program_is_compiled_and_kept_anew(tmp_path, damage):
    told = []
    compilation_cache.start(str(tmp_path), told.append)
    _, expected = compile_again()
    (path,) = tmp_path.rglob("jit__lambda*-cache")
    path.write_bytes(damage(path.read_bytes()))
    assert compile_again() == (False, expected)
    (line,) = told
    assert line.startswith(f"{tmp_path}/llamajax-programs: jit__lambda")
    assert "reading failed: " in line
    assert "\n" not in line
    assert compile_again() == (True, expected)
    assert len(told) == 1


def test_a_disk_that_takes_no_more_costs_a_line_and_leaves_nothing_torn(tmp_path):
    told = []
    compilation_cache.start(str(tmp_path), told.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        assert not compile_again()[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert any("jit__lambda" in line and "writing failed: " in line for line in told)
    assert not any(tmp_path.rglob("jit__lambda*"))
    told.clear()
    assert [compile_again()[0] for _ in range(2)] == [False, True]
    assert told == []


def test_other_warnings_are_shown_as_ever(tmp_path):
    shown = []
    warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
    told = []
    compilation_cache.start(str(tmp_path), told.append)
    warnings.filterwarnings("default", message="something else")
    warnings.warn_explicit("something else", UserWarning, "file.py", 1, registry={})
    assert (shown, told) == (["something else"], [])


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    now = time.time()
    (tmp_path / "run").mkdir()
    for age, name in enumerate(["newest", "run/new", "old", "run/oldest"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (now - age, now - age))
    os.utime(tmp_path / "old", (now + 1, now - 2))  # read since
    compilation_cache.prune(tmp_path, 300)
    assert {path.name for path in tmp_path.rglob("*")} == {"newest", "run", "new", "old"}
    compilation_cache.prune(tmp_path, 299)
    assert {path.name for path in tmp_path.rglob("*")} == {"newest", "run", "old"}


TOGETHER = """
import sys, jax, jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache as jax_cache
from llamajax.config.parallel import DistributedConfig, MeshConfig
from llamajax.parallel import compilation_cache, startup
from llamajax.processes import peers
from llamajax.parallel.mesh import make_mesh
address, rank, folder, *names = sys.argv[1:]
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
startup.connect(MeshConfig(num_cpu_devices=1), DistributedConfig(
    enabled=True, coordinator_address=address, num_processes=2, process_id=int(rank)))
x = jax.ShapeDtypeStruct((8,), "float32", sharding=jax.NamedSharding(make_mesh(MeshConfig()), jax.P("fsdp")))
for name in names:
    jax.clear_caches()
    jax_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", folder if name == "all" or name == f"only {rank}" else None)
    compilation_cache.start(folder, print, run=name or None)
    with compilation_cache.loaded() as loaded:
        jax.jit(lambda x: jnp.sin(x).sum()).lower(x).compile()
    print(len(loaded), jax.config.values["jax_compilation_cache_dir"])
    peers.everyones("compiled")
"""


def together(names: list[str], *folders: pathlib.Path) -> list[list[str]]:
    """Returns the output of two processes as runs of these names, one after the other; they share a folder, or have one
    each."""
    address = runs.free_address()
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, address, str(rank), str(folders[rank % len(folders)]), *names],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=runs.ROOT,
        )
        for rank in range(2)
    ]  # fmt: skip
    return [runs.finish(process).splitlines() for process in processes]


def test_processes_share_a_folder_of_their_run(tmp_path):
    first, second = ([line.split() for line in lines] for lines in together(["one", "one", "two", ""], tmp_path))
    numbers, folders = zip(*first, strict=True)
    assert numbers == ("0", "1", "0", "0")
    assert tuple(folder for _, folder in second) == folders  # but loads nothing: jax knows programs of CPUs by their process
    assert folders[0] == folders[1] != folders[2]
    assert folders[3] == "None"
    for folder in map(pathlib.Path, folders[:3]):
        assert folder.parent == tmp_path / "llamajax-programs"
        assert mode(folder) == 0o700


@pytest.mark.slow
def test_processes_that_see_different_folders_keep_nothing(tmp_path):
    """The first would load what the second compiles."""
    for lines in together(["one"], tmp_path / "a", tmp_path / "b"):
        assert lines[-1] == "0 None"
        assert "(process 1) is not what process 0 sees" in lines[0]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_environment_of_one_process_is_told_by_all_and_the_next_run_meets(tmp_path):
    for lines in together(["only 1", "all", "one"], tmp_path):
        assert lines[0].startswith("JAX_COMPILATION_CACHE_DIR is set in process 1 only; ")
        assert lines[1:3] == ["0 None", f"0 {tmp_path}"]
        assert lines[3].startswith(f"0 {tmp_path}/llamajax-programs/")
