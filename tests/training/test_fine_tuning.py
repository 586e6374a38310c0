"""From nothing to a chat model and out: pretrain, fine-tune on conversations, export, and talk in both programs."""

import hashlib
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from converters import convert
from converters.arguments import hf_arguments
from llamajax.checkpoint.steps import latest_step
from llamajax.config.file import load_config
from llamajax.data.chat.chat_template import load_chat_template
from llamajax.data.tokenizers.tokenizer import load_tokenizer
from llamajax.training import run as train
from tests import runs
from tests.data.chat.chat_from_docs import questions_and_answers, write_chat_jsonl

TEMPLATE = pathlib.Path(__file__).parents[2] / "configs/chat_templates/plain.jinja"


def pretrain(directory: pathlib.Path) -> str:
    """A model that has read half of the help texts; returns its run directory."""
    path = runs.write_config(directory, num_steps=60, global_batch_size=8, grad_accum_steps=1, eval_every=None)
    texts = [f"{question} {answer}" for question, answer in questions_and_answers()[::2]]
    (directory / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = ["vocab_size=512", "embed_dim=64", "mlp_dim=128", "max_seq_len=256"]
    config = load_config(path, [f"model.{size}" for size in sizes] + ["data.seq_len=256", "checkpoint.save_every=null"])
    train.run(config)
    return config.run_dir


def evaluations(run_dir: pathlib.Path) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["eval/loss"] for record in records if "eval/loss" in record]


@pytest.mark.slow
def test_a_model_learns_to_answer_and_answers_alike_in_transformers(tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    base = pretrain(tmp_path)
    write_chat_jsonl(tmp_path / "chat.jsonl", 400)
    run_dir = tmp_path / "sft"
    config = load_config(
        pathlib.Path(base) / "config.yaml",
        [
            f"run_dir={run_dir}", f"init_from={base}", f"data.chat_template={TEMPLATE}",
            f"data.sources=[{{kind: chat, paths: ['{tmp_path / 'chat.jsonl'}']}}]",
            "train.num_steps=90", "train.eval_every=10", "train.eval_batches=4", "optimizer.learning_rate=3e-3",
        ],
    )  # fmt: skip
    train.run(config)
    losses = evaluations(run_dir)
    assert len(losses) == 9
    assert losses[-1] < losses[0] - 0.25
    assert losses[-1] < 0.6 * math.log(512)

    files = run_dir / "checkpoints/90/files"
    assert (files / "chat_template.jinja").read_text() == TEMPLATE.read_text()
    assert (
        json.loads((run_dir / "checkpoints" / str(latest_step(run_dir)) / "meta.json").read_text())["data"][
            "chat_template_sha256"
        ]
        == hashlib.sha256(TEMPLATE.read_bytes()).hexdigest()
    )

    out = tmp_path / "hf"
    assert convert.main(hf_arguments(["export", str(run_dir), str(out)])) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    talk = [{"role": "user", "content": questions_and_answers()[5][0]}]
    ids = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    tokenizer = load_tokenizer(files)
    template = load_chat_template(files, tokenizer)
    assert template is not None
    assert tokenizer.encode_template(template.render(talk, add_generation_prompt=True)).tolist() == ids

    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        written = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40)[0, len(ids) :].tolist()
    command = [
        sys.executable, "-m", "llamajax.generate", "--chat", "--prompt", talk[0]["content"], "--temperature", "0",
        "--max_tokens", "40", "--mesh.num_cpu_devices", "2", "--compute_dtype", "float32",
    ]  # fmt: skip
    for name, directory in (("run", run_dir), ("hf", out)):
        output = tmp_path / f"{name}.jsonl"
        subprocess.run([*command, "--model", str(directory), "--output", str(output)], check=True)
        ours = json.loads(output.read_text())
        assert ours["tokens"] == written
        assert np.isfinite(ours["logprob"])
