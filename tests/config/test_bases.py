"""Configurations by name, with bases and presets: places stay those of each file, and mistakes are one line."""

from pathlib import Path

import pytest
from front_door import MINIMAL, refuse

from llamajax.config import shipped
from llamajax.config.command import parse_args
from llamajax.config.data import SourceConfig
from llamajax.config.file import dump_config, load_config
from llamajax.config.run import Config
from llamajax.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(**texts: str) -> None:
    for name, text in texts.items():
        path = Path(name.replace("__", "/")).with_suffix(".yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_sections_merge_and_lists_and_values_replace():
    write(
        below=MINIMAL, my="base: below.yaml\nseed: 3\ndata: {sources: [{kind: text, paths: [a]}]}\nmodel: {num_layers: 9}\n"
    )
    expected = load_config("below.yaml").changed(
        {"seed": 3, "model.num_layers": 9, "data.sources": (SourceConfig(kind="text", paths=("a",)),)}
    )
    assert load_config("my.yaml") == expected
    assert load_config("my.yaml", ["seed=4"]) == expected.changed({"seed": 4})


def test_later_bases_win_and_bases_have_bases_beside_themselves(capsys):
    write(
        sub__deep=MINIMAL,
        sub__one="base: deep.yaml\nseed: 1\ntrain: {num_steps: 11}\n",
        two="seed: 2\n",
        my="base: [sub/one.yaml, two.yaml]\nmodel:\n",
    )
    expected = load_config("sub/deep.yaml").changed({"seed": 2, "train.num_steps": 11})
    assert load_config("my.yaml") == expected
    with pytest.raises(SystemExit):
        parse_args(["--config", "my.yaml", "--print_config"], prog="x", root=Config)
    write(printed=capsys.readouterr().out)
    assert "\nbase:" not in Path("printed.yaml").read_text()
    assert load_config("printed.yaml") == expected


def test_mistakes_are_told_with_the_line_of_the_file_that_has_them(capsys):
    below = MINIMAL.replace("num_layers: 2", "num_layer: 2\n  tie_embeddings: yes") + "  learning_rate: 1\nzzz: 1\n"
    write(sub__below=below)
    lines = refuse(capsys, "base: sub/below.yaml\ntrain:\n  num_steps: 0\nmodel: {head_dim: 7}\n", "--seed", "x")
    assert lines == [
        "sub/below.yaml:6: unknown key 'model.num_layer'; did you mean 'model.num_layers'?",
        "sub/below.yaml:7: model.tie_embeddings: must be true or false, not yes",
        "sub/below.yaml:20: duplicate key 'learning_rate', also at sub/below.yaml:19; keep one",
        f"sub/below.yaml:21: unknown key 'zzz'; a configuration has {', '.join(Config.__dataclass_fields__)}",
        "my.yaml:3: train.num_steps: 0 must be positive; set it, or num_epochs",
        "--seed: must be a whole number, not x",
    ]
    write(sub__below=MINIMAL)
    assert refuse(capsys, "base: sub/below.yaml\nmodel: {num_heads: 6}\n") == [
        "sub/below.yaml:8: model.num_kv_heads: 4 must divide num_heads=6"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\nbase: below.yml\n", "my.yaml:2: base: no file below.yml in . or among the shipped configurations; did you mean"
         " below.yaml?"),
        ("base: models/llama3_1_8B.yaml\n", "my.yaml:1: base: no file models/llama3_1_8B.yaml in . or among the shipped"
         " configurations; did you mean models/llama3_1_8b.yaml?"),
        ("base: sub/x.yaml\n", "sub/y.yaml:1: base: bases form a cycle: my.yaml -> sub/x.yaml -> sub/y.yaml -> sub/x.yaml;"
         " remove one of them"),
        ("base: my.yaml\n", "my.yaml:1: base: bases form a cycle: my.yaml -> my.yaml; remove one of them"),
        ("base: list.yaml\n", "list.yaml:1: must hold sections with keys, not a list"),
        ("base: [below.yaml, 3, {a: b}]\n", "my.yaml:1: base: must be a file or a list of files, not keys and values"),
        ("base:\n", "my.yaml:1: base: must be a file or a list of files, not nothing"),
        ("model: {base: below.yaml}\nbase: below.yaml\n", "my.yaml:1: unknown key 'model.base'; did you mean"),
    ],
)  # fmt: skip
def test_a_base_that_cannot_be_read_is_one_line(capsys, text, line):
    write(below=MINIMAL, list="- a\n", sub__x="base: y.yaml\n", sub__y="base: x.yaml\n")
    (told,) = refuse(capsys, text)
    assert told.startswith(line)


def test_many_files_end_one_day(capsys):
    write(**{f"f{i}": f"base: [f{i + 1}.yaml, f{i + 1}.yaml]\n" for i in range(20)}, f20=MINIMAL)
    (line,) = refuse(capsys, "base: f0.yaml\n")
    assert line.endswith(": base: more than 50 files; merge some of them")


def test_shipped_configurations_are_found_by_name_and_files_of_that_name_win(capsys):
    assert load_config("quickstart") == load_config(ROOT / "configs/quickstart.yaml")
    assert load_config("configs/quickstart.yaml") == load_config("quickstart"), "as where a wheel is installed"
    write(my="base: quickstart\nseed: 5\n")
    assert load_config("my.yaml") == load_config("quickstart", ["seed=5"])
    (line,) = refuse(capsys, None, "--config", "quikstart")
    names = [path.stem for path in sorted((ROOT / "configs").glob("*.yaml"))]
    rule = "no such file or shipped configuration; did you mean quickstart? Shipped configurations: "
    assert line == f"quikstart: {rule}{', '.join(names)}"
    Path("quickstart").write_text(MINIMAL)
    assert load_config("quickstart").run_dir == "runs/tiny"


def test_mistakes_over_a_shipped_configuration_are_told_in_it_from_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=r"^configs/quickstart.yaml:\d+: model.num_kv_heads: 2 must divide num_heads=3$"):
        load_config("quickstart", ["model.num_heads=3"])


@pytest.mark.parametrize("path", sorted((ROOT / "configs/models").glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_hold_a_model_alone_and_are_used(path):
    text = MINIMAL[: MINIMAL.index("model:")] + MINIMAL[MINIMAL.index("data:") :]
    write(my=f"base: models/{path.name}\n{text}")
    config = load_config("my.yaml")
    assert config == load_config("my.yaml").changed({"model": config.model})
    assert set(path.read_text().splitlines()[1:]) & {"model:"}
    assert all(line.startswith(("#", "model:", "  ")) for line in path.read_text().splitlines())
    assert path.stem.replace("_", "")[:-1].endswith(tuple("0123456789"))


def test_files_that_come_with_llamajax_are_found_from_anywhere():
    template = "configs/chat_templates/llama3.jinja"
    assert Path(shipped.find_file(template)).read_text() == (ROOT / template).read_text()
    assert load_config("llama3_1_8b_sft_8xh100").data.chat_template == template, "so that a stored configuration can move"
    problems = load_config("llama3_1_8b_sft_8xh100", ["hardware.calibration=configs/calibrations/none.yaml"]).file_problems()
    assert not [problem for problem in problems if "chat_template" in problem]
    assert "hardware.calibration: no file matches configs/calibrations/none.yaml" in str(problems)
    Path("configs/chat_templates").mkdir(parents=True)
    Path(template).write_text("mine")
    assert shipped.find_file(template) == template


def test_the_stored_configuration_of_an_earlier_version_can_be_read():
    """A run's own config.yaml alone: anywhere else, a key that is gone is refused."""
    write(my=MINIMAL)
    old = dump_config(load_config("my.yaml")).replace("allow_changes: []", "allow_config_change: true")
    assert "allow_config_change" in old
    write(run__config=old, elsewhere=old)
    remedy = "it is now a list of the settings that may change: checkpoint.allow_changes: \\[train.num_steps\\]"
    for path in ("run/config.yaml", "elsewhere.yaml"):
        with pytest.raises(ConfigError, match=rf"{path}:\d+: unknown key 'checkpoint.allow_config_change'; {remedy}"):
            load_config(path)
    Path("run/checkpoints").mkdir()
    assert load_config("run/config.yaml") == load_config("my.yaml")
