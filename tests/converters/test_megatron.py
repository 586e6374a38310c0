"""A run's documents leave as Megatron-LM's token files, all of them, in order; mistakes leave nothing."""

import itertools
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from converters import megatron_export
from converters.arguments import megatron_arguments
from llamajax.data.documents import file_groups
from llamajax.data.tokenizers.tokenizer import load_tokenizer
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.data.tokens import shards
from llamajax.data.tokens.megatron import IndexedDataset
from tests.converters.growing import write_model
from tests.data.tokens.token_files import DOCUMENTS, DTYPES, MODES, write
from tests.runs import ROOT, WORDS, write_config


def export(directory: pathlib.Path, out: str = "out", *options: str) -> int:
    arguments = ["export", str(directory / out), "--config", str(directory / "run.yaml"), *options]
    return megatron_export.main(megatron_arguments(arguments))


def ids_in(prefix: pathlib.Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    offsets = dataset.document_offsets(0, dataset.num_documents).tolist()
    return [dataset.tokens[start:end].tolist() for start, end in itertools.pairwise(offsets)]


def texts_in(path: pathlib.Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def tokenizer_of(directory: pathlib.Path) -> Tokenizer:
    """The one that the run trained for itself."""
    (model,) = (directory / "cache/tokenizers").glob("*/tokenizer.model")
    return load_tokenizer(model)


def framed(tokenizer: Tokenizer, texts: list[str], *, with_bos: bool = True) -> list[list[int]]:
    begin = [tokenizer.bos_id] * with_bos
    return [[*begin, *ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_batch([text for text in texts if text])]


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(file_groups, "GROUP_BYTES", 4000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 4000)
    monkeypatch.setattr(shards, "BATCH_BYTES", 500)


def test_all_documents_are_exported_in_order(tmp_path, small_shards, capsys):
    write_config(tmp_path)
    assert export(tmp_path) == 0
    texts = texts_in(tmp_path / "text.jsonl")
    assert len(list(tmp_path.glob("cache/shards-*/*/*.shard"))) > 3
    expected = framed(tokenizer_of(tmp_path), texts)
    assert ids_in(tmp_path / "out") == expected
    dataset = IndexedDataset(tmp_path / "out")
    assert dataset.dtype == np.uint16
    assert dataset.sequence_lengths[:].tolist() == [len(ids) for ids in expected]
    *_, wrote, ids, megatron = capsys.readouterr().out.splitlines()
    assert wrote.startswith(
        f"wrote      {tmp_path}/out.bin and .idx: 300 documents, {dataset.num_tokens:,} tokens of uint16, "
    )
    assert ids == "ids        bos 1, eos 2 of 320 tokens; texts begin with bos and end with eos"
    assert megatron == f"megatron   --data-path {tmp_path}/out"

    assert export(tmp_path, "sub/plain.bin", "--without_bos") == 0
    assert ids_in(tmp_path / "sub/plain") == framed(tokenizer_of(tmp_path), texts, with_bos=False)
    assert "tokens; texts end with eos\n" in capsys.readouterr().out


def test_each_source_has_its_pair(tmp_path, capsys):
    config = json.loads(write_config(tmp_path).read_text())
    (tmp_path / "other.txt").write_text(" ".join(WORDS))
    config["data"]["sources"][0]["weight"] = 3
    config["data"]["sources"].append({"kind": "text", "paths": [str(tmp_path / "other.txt")], "weight": 0.5})
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    assert export(tmp_path) == 0
    tokenizer = tokenizer_of(tmp_path)
    assert ids_in(tmp_path / "out_0") == framed(tokenizer, texts_in(tmp_path / "text.jsonl"))
    assert ids_in(tmp_path / "out_1") == framed(tokenizer, [" ".join(WORDS)])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"megatron   --data-path 3 {tmp_path}/out_0 0.5 {tmp_path}/out_1"


def test_a_source_of_a_later_stage_is_written_but_not_named_to_megatron_which_refuses_a_weight_of_0(tmp_path, capsys):
    config = json.loads(write_config(tmp_path).read_text())
    (tmp_path / "other.txt").write_text(" ".join(WORDS))
    config["data"]["sources"].append({"kind": "text", "paths": [str(tmp_path / "other.txt")], "weight": 0})
    config["data"]["stages"] = [{"from_step": 4, "weights": [1, 1]}]
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    assert export(tmp_path) == 0
    assert ids_in(tmp_path / "out_1") == framed(tokenizer_of(tmp_path), [" ".join(WORDS)])
    blend, note = capsys.readouterr().out.splitlines()[-2:]
    assert blend == f"megatron   --data-path 1 {tmp_path}/out_0"
    assert note == "note       --data-path leaves out written sources that get a weight only in a later one of data.stages"


def test_a_setting_can_be_given_with_the_command(tmp_path):
    write_config(tmp_path)
    (tmp_path / "other.txt").write_text(" ".join(WORDS) * 200)
    sources = json.dumps([{"kind": "text", "paths": [str(tmp_path / "other.txt")]}])
    assert export(tmp_path, "out", f"--data.sources={sources}", "--model.vocab_size=300") == 0
    assert ids_in(tmp_path / "out") == framed(tokenizer_of(tmp_path), [" ".join(WORDS) * 200])


def test_a_run_that_starts_from_a_model_has_its_tokenizer(tmp_path):
    write_config(tmp_path)
    write_model(tmp_path / "hf", "llama2")
    assert export(tmp_path, "out", f"--init_from={tmp_path / 'hf'}", "--model.vocab_size=448") == 0
    assert ids_in(tmp_path / "out") == framed(load_tokenizer(tmp_path / "hf"), texts_in(tmp_path / "text.jsonl"))


def test_conversations_are_in_the_models_template(tmp_path, capsys):
    """With the bos of the template if that has one, and told what is lost of them."""
    write_config(tmp_path)
    messages = [{"role": "user", "content": "the model"}, {"role": "assistant", "content": "reads a row"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    sources = json.dumps([{"kind": "chat", "paths": [str(tmp_path / "chat.jsonl")]}])
    write_model(tmp_path / "hf", "llama2")
    tokenizer = load_tokenizer(tmp_path / "hf")
    of_message = (
        "{% if message.role == 'user' %}[{{ message.content }}]"
        "{% else %}{% generation %}{{ message.content }}{% endgeneration %}{% endif %}"
    )
    options = [
        f"--data.sources={sources}", f"--data.tokenizer.path={tmp_path / 'hf/tokenizer.model'}", "--model.vocab_size=448",
        "--data.held_out_fraction=0", "--train.eval_every=null", "--train.eval_batches=0",
    ]  # fmt: skip
    for name, begin in (("plain", ""), ("bos", "{{ bos_token }}")):
        path = tmp_path / f"{name}.jinja"
        path.write_text(begin + "{% for message in messages %}" + of_message + "{% endfor %}")
        for out, more in ((name, ()), (f"{name}_without", ("--without_bos",))):
            assert export(tmp_path, out, f"--data.chat_template={path}", *options, *more) == 0
            printed = capsys.readouterr().out
            assert "note       data.sources[0]: Megatron-LM's files do not record which tokens are learnt" in printed
    (plain,), (without,) = ids_in(tmp_path / "plain"), ids_in(tmp_path / "plain_without")
    assert tokenizer.bos_id not in plain
    assert without == plain
    (bos,), (without,) = ids_in(tmp_path / "bos"), ids_in(tmp_path / "bos_without")
    assert bos == [tokenizer.bos_id, *without]
    assert tokenizer.decode(without) == tokenizer.decode(bos)


def test_preferences_are_refused_before_anything_is_written(tmp_path, capsys):
    write_config(tmp_path)
    (tmp_path / "pairs.jsonl").touch()
    sources = json.dumps([{"kind": "preference", "paths": [str(tmp_path / "pairs.jsonl")]}])
    options = (
        f"--data.sources={sources}",
        "--objective.kind=orpo",
        "--data.chat_template=configs/chat_templates/plain.jinja",
    )
    assert export(tmp_path, "out", *options) == 2
    message = "data.sources[0].kind: Megatron-LM's files do not record which answer is chosen; remove the source"
    assert message in capsys.readouterr().err
    prompts = "--data.sources=" + sources.replace('"preference"', '"prompt"')
    grpo = ("--objective.kind=grpo", "--objective.rollout.max_tokens=8", f"--init_from={tmp_path}")
    assert export(tmp_path, "out", prompts, *grpo) == 2
    assert "data.sources[0].kind: prompts have nothing to train on; remove the source" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_a_damaged_shard_is_made_again(tmp_path, small_shards, capsys):
    write_config(tmp_path)
    assert export(tmp_path) == 0
    damaged = sorted(tmp_path.glob("cache/shards-*/*/*.shard"))[0]
    content = bytearray(damaged.read_bytes())
    content[-1000] ^= 1
    damaged.write_bytes(content)
    assert export(tmp_path, "again") == 0
    assert f"damaged    {damaged}" in capsys.readouterr().out
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"again.{suffix}").read_bytes() == (tmp_path / f"out.{suffix}").read_bytes()


def test_files_that_are_there_are_kept(tmp_path, capsys):
    write_config(tmp_path)
    (tmp_path / "out.idx").write_text("of somebody")
    assert export(tmp_path) == 2
    assert capsys.readouterr().err == f"{tmp_path}/out.idx: exists already; choose another prefix, or remove it\n"
    assert (tmp_path / "out.idx").read_text() == "of somebody"
    assert not (tmp_path / "cache").exists()


def test_a_source_without_documents_leaves_nothing(tmp_path, capsys):
    write_config(tmp_path)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    write_model(tmp_path / "hf", "llama2")
    sources = json.dumps([{"kind": "jsonl", "paths": [str(tmp_path / "empty.jsonl")]}])
    options = [
        f"--data.sources={sources}",
        f"--data.tokenizer.path={tmp_path / 'hf/tokenizer.model'}",
        "--model.vocab_size=448",
    ]
    assert export(tmp_path, "out", *options) == 3
    assert capsys.readouterr().err == "data.sources[0].paths: has no document to write; add documents with text\n"
    assert not list(tmp_path.glob("out*"))


def test_bad_records_are_left_out_as_the_run_allows(tmp_path, capsys):
    write_config(tmp_path)
    lines = (tmp_path / "text.jsonl").read_text().splitlines()
    (tmp_path / "text.jsonl").write_text("\n".join([*lines[:10], "{", *lines[10:], "["]))
    sources = [{"kind": "jsonl", "paths": [str(tmp_path / "text.jsonl")], "max_bad_records": 2}]
    assert export(tmp_path, "out", f"--data.sources={json.dumps(sources)}") == 0
    assert len(ids_in(tmp_path / "out")) == 300
    assert f"left out   data.sources[0]: 2 bad records, the first one {tmp_path}/text.jsonl:11" in capsys.readouterr().out
    sources[0]["max_bad_records"] = 1  # of shards that are made already
    assert export(tmp_path, "fewer", f"--data.sources={json.dumps(sources)}") == 3
    assert "data.sources[0].max_bad_records: 1 allows no more" in capsys.readouterr().err
    assert not list(tmp_path.glob("fewer*"))


def test_a_pair_is_described(tmp_path, capsys):
    write(tmp_path / "x", DTYPES["int32"], DOCUMENTS, MODES)
    command = [sys.executable, "-m", "converters.megatron", "info", str(tmp_path / "x.idx")]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert re.sub(r"in [\d.]+ s, [\d,]+ MB/s", "in 0.0 s, X MB/s", outcome.stdout) == (
        "checked    0.0 MB in 0.0 s, X MB/s\n"
        f"files      {tmp_path}/x.bin and {tmp_path}/x.idx: index, sizes and ids are valid\n"
        "documents  4 of 5 sequences, with modes\n"
        "tokens     7 of int32, 0.0 MB\n"
        "ids        0 to 255\n"
        "lengths    2 tokens per document, 3 in the longest\n"
    )
    (tmp_path / "x.bin").write_bytes(b"")
    assert megatron_export.main(megatron_arguments(["info", str(tmp_path / "x")])) == 3
    assert capsys.readouterr().err.startswith(f"{tmp_path}/x.bin: has 0 bytes, but the sequences in ")


def test_ids_that_no_model_or_not_this_one_has_are_told(tmp_path, capsys):
    write(tmp_path / "negative", DTYPES["int32"], [[[5, 6]], [[], [7, -3]]], None)
    assert megatron_export.main(megatron_arguments(["info", str(tmp_path / "negative")])) == 3
    assert f"{tmp_path}/negative.bin: token id -3 in document 1 must be not negative; write the" in capsys.readouterr().err
    write(tmp_path / "large", DTYPES["uint16"], [[[5, 6]], [[600]]], None)
    of_large = ["info", str(tmp_path / "large"), "--vocab_size"]
    assert megatron_export.main(megatron_arguments([*of_large, "601"])) == 0
    assert megatron_export.main(megatron_arguments([*of_large, "512"])) == 3
    assert "large.bin: token id 600 in document 1 must be below the 512 of --vocab_size; write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["export", "out"], "the following arguments are required: --config"),
        (["export", "--config", "run.yaml"], "the following arguments are required: OUT_PREFIX"),
        (["export", "out", "--config", "run.yaml", "--seed", "1"], "unrecognized argument: --seed"),
        (["info", "x", "--seed=1"], "unrecognized argument: --seed=1"),
        (["export", "out", "--config", "nowhere.yaml"], "nowhere.yaml: "),
        (
            ["export", "out", "--config", "configs/quickstart.yaml", "--sead=1"],
            "--sead: unknown key 'sead'; did you mean 'seed'?",
        ),
    ],
)
def test_mistakes_on_the_command_line_end_with_two(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        megatron_arguments(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
