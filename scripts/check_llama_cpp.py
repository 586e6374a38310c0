"""Comparisons of scripts/check_llama_cpp.sh, which installs the packages; runs in its directory with a run `quickstart`.

python scripts/check_llama_cpp.py CONVERT_HF_TO_GGUF PYTHON_WITH_TRANSFORMERS_4
"""

import ctypes
import dataclasses
import importlib.metadata
import itertools
import json
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import llama_cpp  # pyright: ignore[reportMissingImports] (of this script alone)
import numpy as np
import torch
import transformers
from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

from converters.arguments import hf_arguments
from converters.convert import main as run_converter
from llamajax.config.generate import GenerateConfig
from llamajax.config.parallel import MeshConfig
from llamajax.data.tokenizers.tokenizer import load_tokenizer
from llamajax.generation import run as generate
from llamajax.parallel.mesh import make_mesh
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from tests import real_tokenizers
from tests.mixed_texts import TEXTS

PROMPTS = (
    "def read_file(path):",
    "class Parser:\n    ",
    "import ",
    "The quick brown fox",
    "  # two spaces",
    "敏捷的棕色狐狸",
)
NUM_TOKENS = 24
TOLERANCE = 1e-3
"""Tolerance relative to the largest logit; llama.cpp multiplies in fp32, in another order."""
WINDOW = 64


@dataclasses.dataclass(frozen=True)
class Kind:
    """Model of another program, with random weights and a published tokenizer."""

    name: str
    config: Callable[..., Any]
    """Class of its configuration in transformers."""
    changes: dict[str, Any]
    add_tokenizer: Callable[[Path], object]
    """Writes the tokenizer's files into a directory."""


KINDS = (
    Kind("llama-2", transformers.LlamaConfig, {},
         lambda out: shutil.copy(real_tokenizers.mistral("v1"), out / "tokenizer.model")),
    Kind("llama-3", transformers.LlamaConfig, {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}, real_tokenizers.llama3),
    Kind("mistral", transformers.MistralConfig, {"sliding_window": WINDOW},
         lambda out: shutil.copy(real_tokenizers.mistral("v3"), out / "tokenizer.model")),
    Kind("qwen2", transformers.Qwen2Config, {"tie_word_embeddings": True}, real_tokenizers.qwen2),
    Kind("qwen3", transformers.Qwen3Config, {"head_dim": 32}, real_tokenizers.qwen2),
)  # fmt: skip


def import_kind(kind: Kind) -> Path:
    """Creates and imports a model. Returns its directory."""
    source, imported = Path(f"{kind.name}_hf"), Path(kind.name)
    for old in (source, imported):
        shutil.rmtree(old, ignore_errors=True)
    source.mkdir()
    kind.add_tokenizer(source)
    tokenizer = load_tokenizer(source)
    config = kind.config(
        vocab_size=-(-tokenizer.vocab_size // 64) * 64, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1,
        bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id, **kind.changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(weight, mean=float(name.endswith("weight")), std=0.1)
    model.save_pretrained(source)
    convert("import", source, imported)
    return imported


def convert(*arguments: object) -> None:
    """Runs `python -m converters.hf`."""
    if code := run_converter(hf_arguments([*map(str, arguments)])):
        sys.exit(code)


def compare(source: Path, convert_to_gguf: str, python4: str) -> list[str]:
    """Exports a run or imported model and compares it. Returns a line for each difference."""
    out, gguf = Path(f"{source}_exported"), Path(f"{source}.gguf")
    shutil.rmtree(out, ignore_errors=True)
    convert("export", source, out, "--dtype", "float32")
    command = [sys.executable, convert_to_gguf, "--outtype", "f32", "--outfile", str(gguf), str(out)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    there = Llama(str(gguf), n_ctx=256, logits_all=True, type_k=0, type_v=0, verbose=False)  # keys and values in fp32
    wrong = [*_compare_ids(source, out, there, python4), *_compare_logits(source, there), *_compare_texts(out, there)]
    gguf.unlink()
    return [f"{source}: {line}" for line in wrong]


def _compare_ids(source: Path, out: Path, there: Llama, python4: str) -> list[str]:
    tokenizer = load_tokenizer(open_pretrained(source).files)
    ours = [tokenizer.encode_prompt(text) for text in TEXTS]
    empty = [tokenizer.bos_id]  # a prompt has at least one token
    auto = transformers.AutoTokenizer.from_pretrained(out)
    again = load_tokenizer(out)
    Path("texts.json").write_text(json.dumps(TEXTS))
    found = {
        "generate": [again.encode_prompt(text) for text in TEXTS],
        f"transformers {transformers.__version__}": [auto(text, split_special_tokens=True)["input_ids"] for text in TEXTS],
        "transformers 4.57": json.loads(subprocess.check_output([python4, "-E", "-c", _IDS_IN_4, out, "texts.json"])),
        "llama.cpp": [there.tokenize(text.encode(), add_bos=True, special=False) for text in TEXTS],
    }
    wrong = []
    for reader, theirs in found.items():
        differing = [text for text, one, other in zip(TEXTS, ours, theirs, strict=True) if one != (other or empty)]
        composed = [text for text in differing if unicodedata.is_normalized("NFC", text)]
        unnormal = f", of which {len(differing) - len(composed)} are not NFC" if len(composed) < len(differing) else ""
        print(f"{source}: ids in {reader}: {len(TEXTS) - len(differing)} of {len(TEXTS)} texts as in training{unnormal}")
        # Qwen's tokenizer composes characters; llama.cpp does not.
        if composed if reader == "llama.cpp" and "qwen" in source.name else differing:
            wrong.append(f"ids in {reader}: {differing[:3]!r}")
    return wrong


_IDS_IN_4 = """
import json, sys, transformers
assert transformers.__version__.startswith("4.57.")
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
texts = json.load(open(sys.argv[2]))
print(json.dumps([tokenizer(text, split_special_tokens=True)["input_ids"] for text in texts]))
"""


def _compare_logits(source: Path, there: Llama) -> list[str]:
    found = open_pretrained(source)
    config = dataclasses.replace(found.config, compute_dtype="float32", remat="none")
    T = min(128, config.max_seq_len)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, T), dtype=np.int32)
    model = load_model(found, config)
    ours = np.asarray(jax.jit(lambda model: model(tokens))(model))[0]
    there.reset()
    there.eval(tokens[0].tolist())
    theirs = there.scores[:T]
    differences, largest = np.max(np.abs(ours - theirs), axis=1), float(np.max(np.abs(ours)))
    within = config.sliding_window or T
    near, far = (float(some.max(initial=0.0)) for some in (differences[:within], differences[within:]))
    print(f"{source}: logits of {within} positions differ by at most {near:.1e} (the largest is {largest:.1f})")
    if within < T:
        print(f"{source}: logits beyond the window differ by up to {far:.1e}: llama.cpp has no window in this architecture")
    return [] if near <= TOLERANCE * largest else ["logits"]


def _compare_texts(out: Path, there: Llama) -> list[str]:
    file = Path("texts.jsonl")
    file.unlink(missing_ok=True)
    settings = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "compute_dtype": "float32", "output": str(file)}
    generate.run(GenerateConfig(model=str(out), prompt=PROMPTS, mesh=MeshConfig(num_cpu_devices=1), **settings))
    ours = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    theirs = [_greedy_text(there, prompt) for prompt in PROMPTS]
    # Bytes that are not UTF-8 become one or several U+FFFD.
    same = [one.replace("\ufffd", "") == other.replace("\ufffd", "") for one, other in zip(ours, theirs, strict=True)]
    print(f"{out}: {sum(same)} of {len(same)} greedy texts are the same, such as {theirs[0][:60]!r}")
    return [] if all(same) else [f"greedy texts: {ours!r} and {theirs!r}"]


def _greedy_text(there: Llama, prompt: str) -> str:
    tokens = there.generate(there.tokenize(prompt.encode()), temp=0.0, repeat_penalty=1.0)
    tokens = itertools.islice(itertools.takewhile(lambda token: token != there.token_eos(), tokens), NUM_TOKENS)
    return b"".join(_piece(there, token) for token in tokens).decode(errors="replace")


def _piece(there: Llama, token: int) -> bytes:
    """Returns a token's text; llama-cpp-python's own function leaves out texts above 32 bytes."""
    text = ctypes.create_string_buffer(1024)
    num_bytes = llama_cpp.llama_token_to_piece(
        llama_cpp.llama_model_get_vocab(there.model), token, text, len(text), 0, False
    )
    return text.raw[:num_bytes]


def main() -> None:
    convert_to_gguf, python4 = sys.argv[1:]
    print(f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}, transformers {transformers.__version__}")
    with jax.set_mesh(make_mesh(MeshConfig())):
        sources = [Path("quickstart"), *map(import_kind, KINDS)]
        wrong = [line for source in sources for line in compare(source, convert_to_gguf, python4)]
    if wrong:
        sys.exit("\n".join(wrong))
    print("all the same")


if __name__ == "__main__":
    main()
