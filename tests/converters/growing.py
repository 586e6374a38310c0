"""Models with tokenizers of every kind, small enough to grow in a second."""

import io
import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import sentencepiece
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from converters import grow
from converters.arguments import tokenizer_arguments
from converters.hf_tokenizer import tokenizer_files
from llamajax.data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece

STDLIB = Path(sysconfig.get_path("stdlib"))
OLD_TEXT = (STDLIB / "this.py").read_text() + (STDLIB / "__future__.py").read_text()
NEW_TEXT = (STDLIB / "textwrap.py").read_text() + (STDLIB / "heapq.py").read_text()
CHINESE = (
    "\u4eba\u4eba\u751f\u800c\u81ea\u7531\uff0c\u5728\u5c0a\u4e25\u548c\u6743\u5229\u4e0a\u4e00\u5f8b\u5e73\u7b49\u3002"
)
BOS, EOS, EXTRA = "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_0|>"
D = 16


def byte_level(directory: Path) -> None:
    """Like Llama 3: special tokens follow the vocabulary, whole words need no merges."""
    bpe = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([OLD_TEXT], trainer)
    bpe.add_special_tokens([AddedToken(name, special=True) for name in (BOS, EOS, EXTRA)])
    bpe.add_tokens([AddedToken("<tool>")])
    bos = bpe.token_to_id(BOS)
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    bpe.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def ours(directory: Path) -> None:
    """As exported from a run."""
    model = train_sentencepiece([OLD_TEXT], vocab_size=420)
    (directory / "tokenizer.model").write_bytes(model)
    files = tokenizer_files({"tokenizer.model": model}, load_tokenizer(directory))
    for name, content in files.items():
        (directory / name).write_bytes(content)


def llama2(directory: Path) -> None:
    """Like Llama 2, with a padding token that was added later."""
    sentencepiece_only(directory)
    loaded = transformers.AutoTokenizer.from_pretrained(directory)
    loaded.add_special_tokens({"pad_token": "<pad>"})
    loaded.save_pretrained(directory)
    body = json.loads((directory / "tokenizer.json").read_text())
    body["model"]["merges"] = [" ".join(pair) for pair in body["model"]["merges"]]  # as older files have them
    (directory / "tokenizer.json").write_text(json.dumps(body))


def sentencepiece_only(directory: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(OLD_TEXT.splitlines()), model_writer=model, model_type="bpe", vocab_size=400,
        byte_fallback=True, split_digits=True, allow_whitespace_only_pieces=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "legacy": False}))


KINDS = {"byte-level": byte_level, "ours": ours, "llama2": llama2, "sentencepiece": sentencepiece_only}
KEEPS_TEXT = ("byte-level", "ours")


def write_model(directory: Path, kind: str, *, rows: int = 448, tied: bool = False, dtype: Any = np.float32) -> None:
    """A model directory with a tokenizer and random weights, in two files if there is a head."""
    directory.mkdir()
    KINDS[kind](directory)
    heads, F = 2, 24
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": rows, "hidden_size": D,
        "intermediate_size": F, "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads,
        "max_position_embeddings": 64, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2], "top_p": 0.9}')
    (directory / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (directory / "README.md").write_text("---\nlicense: llama3.1\n---\n")
    layer = {
        "self_attn.q_proj": (D, D), "self_attn.k_proj": (D, D), "self_attn.v_proj": (D, D), "self_attn.o_proj": (D, D),
        "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
        "input_layernorm": (D,), "post_attention_layernorm": (D,),
    }  # fmt: skip
    shapes = {"model.embed_tokens": (rows, D), "model.norm": (D,), **({} if tied else {"lm_head": (rows, D)})}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    weights = {
        f"{name}.weight": rng.standard_normal(shape, np.float32).astype(np.float32 if "norm" in name else dtype)
        for name, shape in shapes.items()
    }
    files = ["model.safetensors"] if tied else [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, file in enumerate(files):
        some = {name: weights[name] for name in sorted(weights)[i :: len(files)]}
        safetensors.numpy.save_file(some, directory / file, {"format": "pt", "made": "here"})
    if not tied:
        weight_map = {name: files[i % 2] for i, name in enumerate(sorted(weights))}
        index = {"metadata": {"total_size": 0, "total_parameters": 0}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def read_weights(directory: Path) -> dict[str, np.ndarray]:
    files = directory.glob("*.safetensors")
    return {name: array for file in files for name, array in safetensors.numpy.load_file(file).items()}


def run_grow(tmp_path: Path, *options: object, source: str = "hf", out: str = "out", text: str = NEW_TEXT) -> int:
    (tmp_path / "corpus.txt").write_text(text)
    arguments = [tmp_path / source, tmp_path / out, "--corpus", tmp_path / "corpus.txt", "--num_pieces", 80, *options]
    return grow.main(tokenizer_arguments(["grow", *map(str, arguments)]))
