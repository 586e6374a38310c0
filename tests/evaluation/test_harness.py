"""lm-evaluation-harness on our models: the log-likelihoods and texts of transformers, few programs, no torch."""

import dataclasses
import functools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers

from llamajax.config.evaluate import EvaluateConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.errors import ConfigError, DataError
from llamajax.evaluation import run as evaluate
from llamajax.evaluation.scoring import row_length, score
from llamajax.generation.prompts import find_ends
from llamajax.parallel.mesh import make_mesh
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from tests.converters.models import write_model

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance, OutputType

from llamajax.evaluation import harness

pytestmark = pytest.mark.slow  # lm-eval comes with the extra `dev`

MODEL = ModelConfig(
    vocab_size=280, embed_dim=32, mlp_dim=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8, max_seq_len=128
)
WORDS = ["the", "model", "reads", "a", "row", "of", "tokens", ",", "learns", "which", "one", "comes", "next", "\n", "blue?"]
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TASKS = {
    "colours": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "fewshot_split": "train",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def write_tokenizer(directory: Path) -> None:
    """Byte-level BPE as Llama 3 has it: a text begins with <s>."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "hf"
    write_model(directory, MODEL)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tasks_dir(tmp_path_factory) -> Path:
    """Two tasks on five questions, as a user writes them."""
    directory = tmp_path_factory.mktemp("tasks")
    questions = [
        {"question": f"What colour is thing {i}?", "choices": ["blue", "green sky", "red"], "answer": i % 3}
        for i in range(5)
    ]
    (directory / "colours.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(directory / "colours.jsonl")}}
    for name, settings in TASKS.items():
        text = "Question: {{question}}\nAnswer:"
        task = {"task": name, "test_split": "train", "doc_to_text": text, "metadata": {"version": 1}} | data | settings
        (directory / f"{name}.yaml").write_text(json.dumps(task))
    return directory


def language_model(directory: Path, mesh: MeshConfig, **settings) -> harness.LlamaLM:
    jax.set_mesh(make_mesh(mesh))
    found = open_pretrained(directory)
    tokenizer = found.tokenizer()
    defaults = {"template": None, "max_seq_len": 128, "batch_size": 16}
    model = load_model(found, dataclasses.replace(found.config, compute_dtype="float32"))
    return harness.LlamaLM(model, tokenizer, end_ids=find_ends((1,), tokenizer, None), **(defaults | settings))


def requests(kind: OutputType, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, each, 0) for each in arguments]


def text(draw: random.Random, num_words: int) -> str:
    return " ".join(draw.choices(WORDS, k=num_words))


class Transformers:
    """Scores of a text, straight from transformers' logits."""

    def __init__(self, directory: Path) -> None:
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=280, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, head_dim=8, max_position_embeddings=128, bos_token_id=0, eos_token_id=1,
            initializer_range=0.3,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config).eval()
        self.model.save_pretrained(directory)
        write_tokenizer(directory)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def next_token(self, ids: list[int]) -> int:
        import torch

        return int(self.model(torch.tensor([ids])).logits[0, -1].argmax())

    def loglikelihood(self, ids: list[int], num_targets: int) -> tuple[float, bool]:
        import torch

        with torch.no_grad():
            logprobs = torch.log_softmax(self.model(torch.tensor([ids[:-1]])).logits[0, -num_targets:], dim=-1)
        targets = torch.tensor(ids[-num_targets:])
        logprob = logprobs[torch.arange(num_targets), targets].double().sum()
        return logprob.item(), bool((logprobs.argmax(dim=-1) == targets).all())


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> tuple[Path, Transformers]:
    pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("transformers")
    return directory, Transformers(directory)


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(fsdp=2, sequence=2, tensor=2), MeshConfig(fsdp=8)],
    ids=["all", "fsdp"],
)
def test_log_likelihoods_are_those_of_transformers(mesh, theirs):
    directory, reference = theirs
    ours = language_model(directory, mesh)
    draw = random.Random(0)
    pairs = [("", " is blue"), ("What colour ", "is blue")]
    pairs += [(text(draw, draw.randint(1, 90)), " " + text(draw, draw.randint(1, 6))) for _ in range(20)]
    # Continuations that are the greedy ones, so that the flag is seen to be true as well.
    greedy_ids = reference.tokenizer.encode("the model")
    for _ in range(4):
        greedy_ids.append(reference.next_token(greedy_ids))
    expected = [reference.loglikelihood(greedy_ids, 4)]
    greedy = [(("", ""), greedy_ids[:-4], greedy_ids[-4:])]
    for context, continuation in pairs:
        whole = reference.tokenizer.encode(context + continuation)
        num_targets = len(whole) - len(reference.tokenizer.encode(context.rstrip()))
        expected.append(reference.loglikelihood(whole[-129:], num_targets))
    found = ours._loglikelihood_tokens(greedy) + ours.loglikelihood(requests("loglikelihood", pairs))
    assert max(len(reference.tokenizer.encode("".join(pair))) for pair in pairs) > 129, "none had to be cut"
    np.testing.assert_allclose([logprob for logprob, _ in found], [logprob for logprob, _ in expected], rtol=0, atol=1e-4)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert found[0][1]
    assert not all(is_greedy for _, is_greedy in found)


def test_rolling_log_likelihoods_count_every_token_once(theirs):
    """In windows of the model's length; what a window begins with has at least the token before it as context."""
    directory, reference = theirs
    ours = language_model(directory, MeshConfig())
    texts = [text(random.Random(n), n) for n in (1, 20, 150)]
    expected = []
    for each in texts:
        ids = reference.tokenizer.encode(each)  # begins with <s>
        ends = [*range(129, len(ids), 128), len(ids)]
        starts = [0, *(end - 1 for end in ends[:-1])]
        windows = [(ids[max(0, end - 129) : end], end - start - 1) for start, end in zip(starts, ends, strict=True)]
        expected.append(sum(reference.loglikelihood(*window)[0] for window in windows))
    found = ours.loglikelihood_rolling(requests("loglikelihood_rolling", [(each,) for each in texts]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


def test_greedy_texts_are_those_of_transformers(theirs):
    import torch

    directory, reference = theirs
    ours = language_model(directory, MeshConfig(fsdp=4, tensor=2))
    draw = random.Random(1)
    contexts = [text(draw, n) for n in (2, 9, 40, 3)]
    expected = []
    for context in contexts:
        ids = torch.tensor([reference.tokenizer.encode(context)])
        written = reference.model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
        expected.append(reference.tokenizer.decode(written, skip_special_tokens=True).split("t")[0])
    settings = {"until": ["t"], "max_gen_toks": 8}
    found = ours.generate_until(requests("generate_until", [(context, settings) for context in contexts]))
    assert found == expected
    assert any(found)


def test_drawn_texts_of_one_context_differ_and_repeat(model_dir):
    ours = language_model(model_dir, MeshConfig())
    settings = {"until": [], "max_gen_toks": 4, "do_sample": True, "temperature": 5.0}
    asked = requests("generate_until", [("the model", settings), ("a row", settings), ("the model", settings)])
    found = ours.generate_until(asked)
    assert found[0] != found[2]
    assert ours.generate_until(asked) == found


def test_few_programs_for_all_lengths():
    lengths = {row_length(n, 1) for n in range(1, 4097)}
    assert sorted(lengths) == [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    for n in range(32, 5000):
        assert n <= row_length(n, 1) < 1.5 * n + 1
    assert all(row_length(n, 6) % 6 == 0 for n in range(1, 300))


def test_programs_are_compiled_once_per_length(model_dir):
    ours = language_model(model_dir, MeshConfig(), batch_size=8)
    programs: Any = score  # jax's types hide how many there are
    before = programs._cache_size()
    rows = [(("", ""), [0] * n, [3]) for n in range(33, 60)]
    results = ours._loglikelihood_tokens(rows)
    assert programs._cache_size() == before + 2
    alone = ours._loglikelihood_tokens(rows[-1:])
    assert math.isclose(results[-1][0], alone[0][0], abs_tol=1e-5), "padding and neighbours change nothing"


def test_a_prompt_is_what_the_chat_template_writes(model_dir):
    """Begun by it, or not at all."""
    from llamajax.data.chat.chat_template import load_chat_template

    tokenizer = open_pretrained(model_dir).tokenizer()
    ours = language_model(model_dir, MeshConfig(), template=load_chat_template(model_dir, tokenizer))
    talk = [{"role": "user", "content": "blue?"}]
    assert ours.apply_chat_template(talk) == "[user] blue?\n[assistant] "
    begun = [*talk, {"role": "assistant", "content": "It is "}]
    assert ours.apply_chat_template(begun, add_generation_prompt=False) == "[user] blue?\n[assistant] It is"
    assert ours.chat_template(True) == TEMPLATE
    ids = tokenizer.encode_batch(["blue?"])[0].tolist()
    assert ours.tok_encode("blue?</s>") == [*ids, 1]
    assert ours.tok_encode("<s>blue?</s>") == [0, *ids, 1]
    plain = language_model(model_dir, MeshConfig())
    assert plain.tok_encode("</s>")[1:] != [1]
    assert plain.tok_encode("blue?") == [0, *ids]
    assert plain.tok_encode("blue?", add_special_tokens=False) == ids
    assert plain.tokenizer_name != ours.tokenizer_name


def settings(model_dir: Path, tasks_dir: Path, **changes: Any) -> EvaluateConfig:
    defaults: dict[str, Any] = {"tasks": "colours", "include_path": str(tasks_dir), "compute_dtype": "float32"}
    return EvaluateConfig(model=str(model_dir), **(defaults | changes))


def test_own_tasks_end_to_end(model_dir, tasks_dir, tmp_path, capsys):
    path = tmp_path / "results.json"
    changes = {"tasks": "colours, write", "limit": 3, "num_fewshot": 1, "json": str(path), "log_samples": True}
    results = evaluate.run(settings(model_dir, tasks_dir, apply_chat_template=True, system="Be brief.", **changes))
    assert results == json.loads(path.read_text())
    assert results["n-samples"]["colours"] == {"original": 5, "effective": 3}
    assert results["n-shot"] == {"colours": 1, "write": 1}
    samples = results["samples"]["colours"]
    prompt = samples[0]["arguments"][0][0]
    assert prompt.startswith("[system] Be brief.\n[user] Question: What colour is thing")
    assert prompt.count("[assistant] ") == 2
    chosen = [int(np.argmax([float(answer[0][0]) for answer in sample["resps"]])) for sample in samples]
    accuracy = sum(choice == sample["doc"]["answer"] for choice, sample in zip(chosen, samples, strict=True)) / 3
    assert results["results"]["colours"]["acc,none"] == pytest.approx(accuracy)
    output = capsys.readouterr().out
    assert "|colours|" in output
    assert "exact_match" in output


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tasks": "colous"}, ConfigError, "tasks: 'colous' is not a task, .*; did you mean colours?"),
        ({"include_path": "nowhere"}, ConfigError, "include_path: nowhere is not a directory"),
        ({"seq_len": 256}, ConfigError, "seq_len: 256 is above the model's max_seq_len=128"),
        ({"tasks": "write", "seq_len": 4}, ConfigError, "seq_len: 4 leaves no room before the 4 tokens that a task writes"),
        ({"mesh": MeshConfig(tensor=6)}, ConfigError, "does not divide the 8 devices"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(changes, error, message, model_dir, tasks_dir, monkeypatch):
    if changes.get("tasks") == "colous":  # reading the harness's own thousands of tasks takes ten seconds
        manager = harness.TaskManager
        monkeypatch.setattr(harness, "TaskManager", functools.partial(manager, include_defaults=False))
    with pytest.raises(error, match=message) as raised:
        evaluate.run(settings(model_dir, tasks_dir, **changes))
    assert "\n" not in str(raised.value)


def test_a_task_that_cannot_be_loaded_and_one_that_runs_code(model_dir, tasks_dir, tmp_path):
    task = json.loads((tasks_dir / "colours.yaml").read_text())
    broken = task | {"task": "broken", "dataset_kwargs": {"data_files": str(tmp_path / "gone.jsonl")}}
    (tmp_path / "broken.yaml").write_text(json.dumps(broken))
    (tmp_path / "unsafe.yaml").write_text(json.dumps(task | {"task": "unsafe", "unsafe_code": True}))
    with pytest.raises(DataError, match=r"tasks: cannot be loaded: .*gone\.jsonl"):
        evaluate.run(settings(model_dir, tmp_path, tasks="broken"))
    with pytest.raises(ConfigError, match="tasks: unsafe runs code that the model writes"):
        evaluate.run(settings(model_dir, tmp_path, tasks="unsafe"))


def test_a_model_without_a_template(model_dir, tasks_dir, tmp_path):
    for file in model_dir.iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"apply_chat_template: .* has no chat template"):
        evaluate.run(settings(tmp_path, tasks_dir, apply_chat_template=True))


@pytest.mark.long
def test_the_command_never_imports_torch(model_dir, tasks_dir, tmp_path):
    script = (
        "import runpy, sys\n"
        "try:\n    runpy.run_module('llamajax.evaluate', run_name='__main__', alter_sys=True)\n"
        "finally:\n    print('torch', 'torch' in sys.modules, file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", script, "--model", str(model_dir), "--tasks", "colours,write"]
    command += ["--include_path", str(tasks_dir), "--mesh.num_cpu_devices", "2", "--limit", "1"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr.endswith("torch False\n")
    assert "|write  |" in outcome.stdout
    assert "\r" not in outcome.stdout + outcome.stderr
