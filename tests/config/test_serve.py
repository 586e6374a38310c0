"""Settings of a server: names of models, who may reach it, and what is refused in one line."""

import pytest

from llamajax.config.command import parse_args
from llamajax.config.serve import TOKEN_VARIABLE, ServeConfig
from llamajax.errors import ConfigError


def test_models_have_names():
    config = ServeConfig(model=("runs/a/", "b=runs/a", "c=~/x=y", "/models/Llama-3.2-1B"))
    assert ServeConfig(model=("hf://a/b-1@main",)).models == {"b-1": "hf://a/b-1@main"}
    assert config.models == {"a": "runs/a/", "b": "runs/a", "c": "~/x=y", "Llama-3.2-1B": "/models/Llama-3.2-1B"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": ()}, "model: required; "),
        ({"model": ("",)}, "model: must not be empty; "),
        ({"model": ("a=",)}, "model: must not be empty; "),
        ({"model": ("a=hf://b",)}, "model: hf://b must be hf://ORG/NAME"),
        ({"model": ("runs/a", "b/a")}, "model: several models have the name a; "),
        ({"adapter": ("a=",)}, "adapter: must not be empty; "),
        ({"adapter": ("b=hf://b",)}, "adapter: hf://b must be hf://ORG/NAME"),
        ({"adapter": ("b/a",)}, "adapter: several models have the name a; write NAME=DIRECTORY"),
        ({"adapter": ("b=x", "x/b")}, "adapter: several models have the name b; write NAME=DIRECTORY"),
        ({"port": 65536}, "port: 65536 must be a port"),
        ({"slots": 0}, "slots: 0 must be positive or unset"),
        ({"max_seq_len": 1}, "max_seq_len: 1 must be above 1"),
        ({"tokens_per_step": 0}, "tokens_per_step: 0 must be positive"),
        ({"max_body_bytes": 0}, "max_body_bytes: 0 must be positive"),
        ({"max_tokens": 0}, "max_tokens: 0 must be positive or unset"),
        ({"max_queue": -1}, "max_queue: -1 must not be negative"),
        ({"max_time_s": 0.0}, "max_time_s: 0.0 must be positive"),
        ({"drain_s": 0.0}, "drain_s: 0.0 must be positive"),
    ],
)
def test_what_breaks_a_rule_is_named(changes, line):
    with pytest.raises(ConfigError) as refused:
        ServeConfig(**({"model": ("runs/a",)} | changes))
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_what_the_machine_lacks_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    (problem,) = ServeConfig(model=(str(tmp_path),), host="0.0.0.0").problems_here()
    assert problem.startswith("host: 0.0.0.0 is reached from other machines, so a token is needed; set LLAMAJAX_API_KEY")
    assert not ServeConfig(model=(str(tmp_path),), host="127.0.0.2").problems_here()
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert not ServeConfig(model=(str(tmp_path),), host="0.0.0.0").problems_here()
    with pytest.raises(SystemExit) as ended:
        parse_args(
            ["--model", "nowhere", "--model", "b=there", "--adapter", "c=gone", "--chat_template", "none.jinja"],
            prog="python -m llamajax.serve", root=ServeConfig, check=ServeConfig.problems_here,
        )  # fmt: skip
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("; ")[0] for line in lines] == [
        "--model: there is no directory nowhere",
        "--model: there is no directory there",
        "--adapter: there is no directory gone",
        "--chat_template: no file none.jinja",
    ]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'llamajax[serve]'" in ServeConfig(model=(str(tmp_path),)).problems_here()[0]
