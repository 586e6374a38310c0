"""The command line: mistakes are told one per line, overrides, help, and how a process ends."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from front_door import MINIMAL, TRAIN_OPTIONS, changed, refuse

import llamajax
from llamajax import plan, preprocess, train, verify
from llamajax.config import command as cli
from llamajax.config.data import SourceConfig
from llamajax.config.file import load_config
from llamajax.config.generate import GenerateConfig
from llamajax.config.help import COMMON, help_text, settings
from llamajax.config.keys import keys
from llamajax.config.model import RopeScalingConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.rules import Settings
from llamajax.config.run import Config
from llamajax.config.training import OptimizerConfig
from llamajax.errors import ConfigError


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


ARGUMENTS = [
    (["--model.num_layer", "3"], "--model.num_layer: unknown key 'model.num_layer'; did you mean 'model.num_layers'?"),
    (["--modle.num_layers", "3"], "--modle.num_layers: unknown key 'modle'; did you mean 'model'?"),
    (["--base", "quickstart"], "--base: unknown key 'base'; a file names its base: write base: FILE at the top of one"),
    (["--learning_rate", "3"], "--learning_rate: unknown key 'learning_rate'; did you mean 'optimizer.learning_rate'?"),
    (["--model.", "3"], "--model.: unknown key 'model.'; model has"),
    (["--", "3"], "--: unknown key ''; a configuration has"),
    (["--model.num_layers.x", "3"], "--model.num_layers.x: no such key; model.num_layers has no keys"),
    (["--data.sources.weight", "3"], "--data.sources.weight: no such key; data.sources has 1 item(s), counted from 0"),
    (["--data.sources.1.weight", "3"], "--data.sources.1.weight: no such key; data.sources has 1 item(s), counted from 0"),
    (["--data.sources.0.wieght=3"], "--data.sources.0.wieght: unknown key 'data.sources.0.wieght'; did you mean"),
    (["--model.num_layers"], "--model.num_layers: needs a value; write --model.num_layers VALUE or"),
    (["--model.num_layers", "--dry_run"], "--model.num_layers: needs a value"),
    (["--model.num_layers="], "--model.num_layers: must be a whole number, not"),
    (["--model.num_layers", "three"], "--model.num_layers: must be a whole number, not three"),
    (["--model.num_layers=-3"], "--model.num_layers: -3 must be positive"),
    (["--model.num_layers", "null"], "--model.num_layers: must be a whole number, not null"),
    (["--model.tie_embeddings", "True"], "--model.tie_embeddings: must be true or false, not True"),
    (["--optimizer.learning_rate", "nan"], "--optimizer.learning_rate: must be a number (finite"),
    (["--train.num_steps", "1", "--train.num_steps", "2"], "--train.num_steps: given twice; keep one"),
    (["--mesh.data", "2", "--mesh", "{tensor: 2}"], "--mesh: replaces --mesh.data, given before it; leave one of them out"),
    (["--data.sources", "stdlib"], "--data.sources: must be a list, not stdlib; write [stdlib]"),
    (["--data.sources", "[{kind: stdlib, wieght: 1}]"], "--data.sources: unknown key 'data.sources.0.wieght'; did you mean"),
    (["--data.sources", "[{kind: stdlib}"], "--data.sources: not valid YAML: while parsing a flow sequence"),
    (["--data.sources", "[&a {kind: stdlib}, *a]"], "--data.sources: anchors and aliases are not supported"),
    (["--data.sources", "[{kind: stdlib, kind: text}]"], "--data.sources: duplicate key 'kind', also at"),
    (["--run_dir", "\udcff"], "--run_dir: must be text, but '\\udcff' contains an invalid character"),
    (["--sample.prompt", "\ud800\n"], "--sample.prompt: must be text, but '\\ud800\\n' contains"),
    (["--data.seq_len", "8192"], "--data.seq_len: 8192 is above model.max_seq_len=4096"),
    (["--mesh.num_cpu_devices=16", "--mesh.tensor=16"], "my.yaml:8: model.num_kv_heads: 4 must be divisible by mesh."),
    (["--data.tokenizer.path", "no.json"], "--data.tokenizer.path: no file matches no.json; relative paths start at"),
    (["--config", "other.yaml"], "--config: given more than once; write --config FILE"),
    (["--config"], "--config: needs a value; write --config FILE"),
    (["--dry_run=yes"], "--dry_run: takes no value"),
    (["--dry-run"], "--dry-run: is not an option; did you mean --dry_run?"),
    (["--print-config"], "--print-config: is not an option; did you mean --print_config?"),
    (["other.yaml"], "other.yaml: is not an option; write --config FILE, and settings as --key VALUE"),
    (["-v"], "-v: is not an option; write --config FILE, and settings as --key VALUE"),
    (["--" + "x" * 5000, "1"], "--xxxxx"),
    (["--a\nb", "1"], "'--a\\nb"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_a_mistake_on_the_command_line_is_one_line(capsys, arguments, expected):
    (line,) = refuse(capsys, MINIMAL, *arguments)
    assert line.startswith(expected)
    assert len(line) < 400


def test_overrides_take_text_as_it_is_and_lists_and_sections_as_yaml():
    Path("my.yaml").write_text(MINIMAL)
    arguments = cli.parse_args(
        [
            "--model.num_layers", "3", "--optimizer.learning_rate=1e-3", "--dry_run", "--config=my.yaml",
            "--mesh.fsdp", "-1", "--run_dir", "2024", "--sample.prompt=--no: [x=1", "--checkpoint.save_every", "null",
            "--model.rope_scaling", "{kind: linear, factor: 2}", "--model.rope_scaling.factor", "4",
            "--data.sources", "[{kind: stdlib}, {kind: text, paths: ['*.yaml']}]", "--data.sources.1.weight", "0.5",
            "--metrics.wandb_project=", "--optimizer.no_weight_decay=[]",
        ],
        prog="llamajax",
        root=Config,
        options=TRAIN_OPTIONS,
    )  # fmt: skip
    changes = {
        "run_dir": "2024",
        "model.num_layers": 3,
        "model.rope_scaling": RopeScalingConfig(kind="linear", factor=4.0),
        "data.sources": (SourceConfig(kind="stdlib"), SourceConfig(kind="text", paths=("*.yaml",), weight=0.5)),
        "optimizer.learning_rate": 1e-3,
        "optimizer.no_weight_decay": (),
        "sample.prompt": "--no: [x=1",
        "checkpoint.save_every": None,
        "metrics.wandb_project": "",
    }
    expected = load_config("my.yaml").changed(changes)
    assert arguments == cli.Arguments(expected, {"--dry_run": ""})


def test_overrides_can_give_what_the_file_lacks():
    Path("my.yaml").write_text(changed("  learning_rate: 3e-4\n", "  b1: 0.5\n").replace("  seq_len: 128\n", ""))
    config = load_config("my.yaml", ["optimizer.learning_rate=1", "data.seq_len=64", "mesh.tensor=2", "sample.prompt=a=b"])
    assert config.optimizer == OptimizerConfig(learning_rate=1.0, b1=0.5)
    assert config.data.seq_len == 64
    assert config.mesh == MeshConfig(tensor=2)
    assert config.sample.prompt == "a=b"
    with pytest.raises(ConfigError, match=r"^--sample: needs a value"):
        load_config("my.yaml", ["optimizer.learning_rate=1", "data.seq_len=64", "sample"])


def test_print_config_is_a_file_that_gives_the_same_run(capsys):
    Path("my.yaml").write_text(MINIMAL)
    overrides = ["--data.tokenizer.path", "on/another/machine.json", "--optimizer.eps", "1e-12"]
    with pytest.raises(SystemExit) as exit_info:
        cli.parse_args(["--config", "my.yaml", "--print_config", *overrides], prog="llamajax", root=Config)
    assert exit_info.value.code == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    expected = load_config(
        "my.yaml", [f"{key[2:]}={value}" for key, value in zip(overrides[::2], overrides[1::2], strict=True)]
    )
    assert load_config("printed.yaml") == expected


def helped(capsys, *arguments: str, prog: str = "python -m llamajax.train", root: type = Config) -> str:
    with pytest.raises(SystemExit) as exit_info:
        cli.parse_args([*arguments], prog=prog, root=root, options=TRAIN_OPTIONS)
    captured = capsys.readouterr()
    assert (exit_info.value.code, captured.err) == (0, "")
    return captured.out


def test_help_all_shows_every_setting_with_its_type_default_and_meaning(capsys):
    text = helped(capsys, "--model.num_layers", "--help", "all")
    assert text.startswith("usage: python -m llamajax.train --config FILE")
    for key, _, field in keys(Config):
        assert dataclasses.is_dataclass(field.type) or f"\n  --{key} " in text
    assert "--model.vocab_size INT  (required)\n      Rows of the embedding table;" in text
    assert "--optimizer.grad_clip_norm FLOAT|null  (default: 1.0)" in text
    assert "--optimizer.schedule constant|linear|cosine|wsd  (default: cosine)" in text
    assert '--optimizer.no_weight_decay [TEXT, ...]  (default: ["norm", "bias"])' in text
    assert "--data.tokenizer.path TEXT|null  (default: null)" in text


def test_help_is_short_and_names_the_sections_and_the_manual(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for module in (train, plan, verify, preprocess):
        options = getattr(module, "OPTIONS", TRAIN_OPTIONS)
        text = help_text(f"python -m {module.__name__}", Config, options)
        lines = text.splitlines()
        assert len(lines) <= 120
        assert max(map(len, lines[2:-1])) <= 80
        assert not [key for key in COMMON if f"\n  --{key} " not in text]
        assert not [option for option in options if f"\n  {option}" not in text]
        assert not [field.name for field in dataclasses.fields(Config) if f"\n    {field.name} " not in text and
                    dataclasses.is_dataclass(field.type)]  # fmt: skip
        assert lines[-1] == f"manual: {Path(llamajax.__file__).parents[1] / 'docs/index.md'}"
    assert (
        helped(capsys, "--help")
        == helped(capsys, "-h")
        == f"{help_text('python -m llamajax.train', Config, TRAIN_OPTIONS)}\n"
    )
    assert len(helped(capsys, "--help", prog="python -m llamajax.generate", root=GenerateConfig).splitlines()) <= 80


def test_help_on_a_narrow_terminal_puts_meanings_below(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = help_text("python -m llamajax.train", Config, TRAIN_OPTIONS)
    assert "\n  --train.num_steps INT\n      Number of optimizer steps;" in text


def test_the_settings_of_the_short_help_exist_and_their_first_sentences_are_short():
    known = {setting.key: setting for setting in settings(Config)}
    assert not [key for key in COMMON if key not in known]
    assert len(set(COMMON)) == len(COMMON)


def test_help_shows_one_section_or_one_setting(capsys):
    text = helped(capsys, "--help", "data")
    assert text.startswith("data: Documents, and how they become training rows.\n")
    assert "\n  --data.seq_len INT  (required)\n" in text
    assert "\n    data.cleaning " in text
    assert "\n    data.sources " in text
    assert "data.cleaning.filters" not in text
    assert "optimizer" not in text
    text = helped(capsys, "--help=data.sources")
    assert "\n  --data.sources.0.max_epochs FLOAT|null  (default: null)\n" in text
    assert helped(capsys, "--help", "data.sources.3.kind") == helped(capsys, "-h", "data.sources.kind")
    text = helped(capsys, "--help", "train.num_steps", "--seed", "1")
    assert text.startswith("  --train.num_steps INT  (default: 0)\n      Number of optimizer steps; 0: as many as")


@pytest.mark.parametrize(
    ("topic", "remedy"),
    [
        ("dta", "did you mean data?"),
        ("num_steps", "did you mean train.num_steps or profile.num_steps?"),
        ("data.source", "did you mean data.sources?"),
        ("xyzzy", "sections are model, data, train, optimizer, adapters, objective, mesh, parallel, offload,"),
    ],
)
def test_help_on_something_unknown_is_one_line(capsys, topic, remedy):
    (line,) = refuse(capsys, MINIMAL, "--help", topic)
    assert line.startswith(f"--help: no section or setting is called {topic}; {remedy}")


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("optimizer.nmae", "did you mean 'optimizer.name'?"),
        ("train.name", "did you mean 'optimizer.name'?"),
        ("metrics.name", "did you mean 'metrics.wandb_name'?"),
        ("opt.name", "did you mean 'optimizer'?"),
        ("optimizer.steps", "did you mean 'optimizer.warmup_steps' or 'optimizer.decay_steps'?"),
        ("optimizer.num_steps", "did you mean 'train.num_steps' or 'profile.num_steps'?"),
        ("sample.kind", "did you mean 'model.rope_scaling.kind' or 'adapters.kind' or 'objective.kind'?"),
        ("checkpoint.roles", "checkpoint has save_every, "),
        ("data.path", "did you mean 'data.tokenizer.path'?"),
        ("data.sources.0.nmae", "did you mean 'optimizer.name'?"),
        ("data.sources.0.from_step", "data.sources.0 has kind, paths, "),
        ("data.weight", "did you mean 'data.sources.0.weight'?"),
        ("checkpoint.allow_config_change", "it is now a list of the settings that may change: checkpoint.allow_changes: ["),
    ],
)
def test_keys_of_list_items_are_proposed_only_in_the_section_of_the_list(capsys, key, remedy):
    (line,) = refuse(capsys, MINIMAL, f"--{key}", "1")
    assert f"; {remedy}" in line


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolConfig(Settings):
    """Settings of a tool."""

    model: str
    """What to look at."""
    prompt: tuple[str, ...] = dataclasses.field(default=(), metadata={"repeatable": True})
    """Texts."""
    chat: bool = False
    """Talk."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Devices."""

    def broken_rules(self) -> Iterator[str]:
        if not self.prompt:
            yield "prompt: must not be empty"


def parse_tool_args(*arguments: str) -> cli.Arguments[ToolConfig]:
    return cli.parse_args(arguments, prog="tool", root=ToolConfig, options={"--json FILE": "Where to write."})


def test_any_dataclass_is_a_command_line(capsys):
    arguments = parse_tool_args(
        "--prompt", "[INST] 1", "--chat", "--model=m", "--prompt", "null", "--mesh.tensor", "2", "--json", "out"
    )
    expected = ToolConfig(model="m", prompt=("[INST] 1", "null"), chat=True, mesh=MeshConfig(tensor=2))
    assert arguments == cli.Arguments(expected, {"--json": "out"})

    Path("tool.yaml").write_text("model: m\nprompt: [from file]\n")
    assert parse_tool_args("--config", "tool.yaml").config.prompt == ("from file",)
    assert parse_tool_args("--config", "tool.yaml", "--prompt", "b").config.prompt == ("b",)

    with pytest.raises(SystemExit) as exit_info:
        parse_tool_args("--help", "all")
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: tool [--config FILE] [--KEY VALUE ...] [--print_config] [--help]\n")
    assert "\n  --json FILE\n      Where to write.\n" in text
    assert "\n  --prompt [TEXT, ...]  (may be given several times)\n      Texts.\n" in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--prompt", "a"), "command line: model: required, but missing"),
        (("--model", "m"), "command line: prompt: must not be empty"),
        (("--model", "m", "--prompt", "a", "--json"), "--json: needs a value; write --json FILE"),
        (("--model", "m", "--prompt", "a", "--json=x", "--json=y"), "--json: given twice; keep one"),
        (("--model", "m", "--prompt", "a", "--jsn", "x"), "--jsn: is not an option; did you mean --json?"),
        (("--model", "m", "--model", "n", "--prompt", "a"), "--model: given twice; keep one"),
        (("--model", "m", "--prompt"), "--prompt: needs a value; write --prompt VALUE or --prompt=VALUE"),
    ],
)
def test_a_mistake_on_the_command_line_of_a_tool_is_one_line(capsys, arguments, line):
    with pytest.raises(SystemExit) as exit_info:
        parse_tool_args(*arguments)
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == line + "\n"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own that parses its command line, and says at its end whether that has cost an import of jax."""
    program = (
        "import atexit, sys; atexit.register(lambda: print('jax' in sys.modules, file=sys.stderr))\n"
        "from llamajax.config import command as cli; from llamajax.config.run import Config\n"
        "print(cli.parse_args(prog='llamajax', root=Config).config.train.num_steps)"
    )
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def test_a_process_ends_as_its_command_line_deserves_and_without_jax():
    Path("my.yaml").write_text(MINIMAL)
    shown = run("--help")
    assert (shown.returncode, shown.stderr) == (0, "False\n")
    assert "--train.num_steps INT" in shown.stdout
    good = run("--config", "my.yaml", "--train.num_steps", "7")
    assert (good.returncode, good.stdout, good.stderr) == (0, "7\n", "False\n")
    bad = run("--config", "my.yaml", "--train.num_steps", "0", "--model.num_layer=1")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.splitlines() == [
        "--train.num_steps: 0 must be positive; set it, or num_epochs",
        "--model.num_layer: unknown key 'model.num_layer'; did you mean 'model.num_layers'?",
        "False",
    ]
