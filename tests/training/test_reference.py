"""A run of DPO computes its reference once, resumes with it, and makes again what is lost."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import llamajax
from llamajax.config.run import Config
from llamajax.errors import CheckpointError, UserError
from tests.test_library import load

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Pairs, a run of ordinary training that DPO starts from, and one of DPO without an interruption."""
    folder = tmp_path_factory.mktemp("dpo")
    colors = ["red", "blue", "green", "black", "white"]
    pairs = [
        {"prompt": f"Is {number} {color}?", "chosen": f"It is {color}.", "rejected": "Who knows?"}
        for number, color in enumerate(colors * 12)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    llamajax.train(load(folder, "first"))
    llamajax.train(dpo(folder, "whole"))
    return folder


def dpo(folder: Path, run: str, **changes: object) -> Config:
    return load(folder, run, **{
        "data.sources": [{"kind": "preference", "paths": [folder / "pairs.jsonl"]}], "objective.kind": "dpo",
        "data.seq_len": 96, "data.chat_template": "configs/chat_templates/plain.jinja", "init_from": folder / "first",
        "model.max_seq_len": 96, "checkpoint.save_every": 2, "train.eval_every": 2, "data.held_out_fraction": 0.2,
        "optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 0,
    } | changes)  # fmt: skip


def losses(config: Config) -> list[float]:
    records = map(json.loads, (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines())
    return [value for record in records for name, value in record.items() if name.endswith("/loss")]


def files(folder: Path, run: str) -> dict[str, Path]:
    return {path.name: path for path in (folder / run / "reference").rglob("*.*32")}


def test_the_reference_is_the_model_at_the_start(folder):
    config = dpo(folder, "whole")
    first, *_ = losses(config)
    assert first == pytest.approx(np.log(2), abs=1e-5)
    assert losses(config)[-1] < 0.6
    values = np.fromfile(files(folder, "whole")["log_probs.f32"], np.float32)
    assert (values <= 0).all()
    assert values.size % 96 == 0
    assert (values.reshape(-1, 96).min(axis=1) < 0).all()


def test_a_run_resumes_with_the_reference_that_it_began_with(folder, capsys):
    """Whether its files are still there or not."""
    for run, is_lost in (("resumed", False), ("lost", True)):
        shutil.copytree(folder / "whole", folder / run)
        shutil.rmtree(folder / run / "checkpoints" / "4")
        if is_lost:
            shutil.rmtree(folder / run / "reference")
        capsys.readouterr()
        llamajax.train(dpo(folder, run))
        out = capsys.readouterr().out
        assert "resuming at step 2" in out
        assert ("reference  computing" in out) == is_lost
        assert losses(dpo(folder, run)) == losses(dpo(folder, "whole"))


def test_damage_is_one_line(folder):
    shutil.copytree(folder / "whole", folder / "damaged")
    shutil.rmtree(folder / "damaged" / "checkpoints")
    path = files(folder, "damaged")["log_probs.f32"]
    content = np.fromfile(path, np.float32)
    content[5::96] += 1
    content.tofile(path)
    with pytest.raises(CheckpointError, match=r"reference/\w+: row \d+ is damaged; remove this folder"):
        llamajax.train(dpo(folder, "damaged"))


def test_a_computation_that_was_killed_goes_on(folder, capsys):
    shutil.copytree(folder / "whole", folder / "killed")
    shutil.rmtree(folder / "killed" / "checkpoints")
    path = files(folder, "killed")["checks.u32"]
    checks = np.fromfile(path, np.uint32)
    made = np.flatnonzero(checks)
    checks[made[::2]] = 0
    checks.tofile(path)
    llamajax.train(dpo(folder, "killed"))
    assert f"reference  computing the log-probabilities of {len(made[::2])} rows" in capsys.readouterr().out
    assert losses(dpo(folder, "killed")) == losses(dpo(folder, "whole"))


def test_labelled_answers_are_for_kto_alone(folder, tmp_path):
    answers = [{"prompt": f"Is {n} red?", "completion": f"It is {n}.", "label": bool(n % 2)} for n in range(60)]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    sources = {"data.sources": [{"kind": "preference", "paths": [tmp_path / "labels.jsonl"]}]}
    with pytest.raises(UserError, match=r"has single answers with a label, but objective\.kind=dpo"):
        llamajax.train(dpo(folder, "labels", **sources))
    llamajax.train(dpo(folder, "kto", **sources, **{"objective.kind": "kto", "train.num_steps": 2}))
    assert losses(dpo(folder, "kto"))[0] == pytest.approx(0.5, abs=1e-4)
