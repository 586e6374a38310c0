"""Model card of an exported model. It states known facts and nothing else."""

import json
import math
from pathlib import Path
from typing import Any

from llamajax.config.architectures import Architecture
from llamajax.config.model import ModelConfig
from llamajax.errors import UserError
from llamajax.estimates.formulas import num_params
from llamajax.watch.console import say
from llamajax.watch.run_log import METRICS_FILE, read_run
from llamajax.weights import names
from llamajax.weights.pretrained import Pretrained


def model_card(found: Pretrained, architecture: Architecture, dtype: str, license: str | None, made: str = "") -> str:
    """Returns README.md: the fields that Hugging Face reads, then a short description of the model and its training.

    Args:
        found: the checkpoint.
        architecture: the model's architecture in transformers.
        dtype: dtype of the written weights.
        license: licence identifier; None: that of the model it started from, or `other` if a licence file exists.
        made: sentence about how the model was made, of one that was not trained.
    """
    task = "text-classification" if found.config.head == "score" else "text-generation"
    lines = ["library_name: transformers", f"pipeline_tag: {task}", *_license(found, license)]
    if source := (found.hf or {}).get("source"):
        lines.append(f"base_model: {json.dumps(source)}")
    lines += ["tags:", f"- {architecture.model_type}", "- llamajax"]
    texts = [_model(found.config, architecture, dtype)]
    if found.adapters is not None and found.base is not None:
        base = (found.hf or {}).get("source") or found.base.source.name
        texts.append(f"Its weights are those of {base} with adapters merged into them: {found.adapters.about}.")
    texts += [_training(found)] if found.meta else [made] if made else []
    return _card(lines, texts)


def adapters_card(found: Pretrained, base: str, dtype: str, license: str | None) -> str:
    """Returns README.md of a PEFT directory; arguments as for `model_card`, and `base` is the name of the base."""
    assert found.adapters is not None
    lines = ["library_name: peft", "pipeline_tag: text-generation", *_license(found, license)]
    lines += [f"base_model: {json.dumps(base)}", "tags:", f"- {json.dumps(f'base_model:adapter:{base}')}"]
    lines += ["- lora", "- llamajax"]
    numbers = sum(math.prod(shape) for shape in names.hf_shapes(found.config, found.adapters).values())
    text = f"Adapters of {numbers:,} parameters in {dtype} for {base}: {found.adapters.about}."
    return _card(lines, [text, _training(found)])


def _card(lines: list[str], texts: list[str]) -> str:
    return "\n".join(["---", *lines, "---", "", "\n\n".join(texts), ""])


def _license(found: Pretrained, license: str | None) -> list[str]:
    """Returns the lines about the licence."""
    if (license := license or (found.hf or {}).get("license")) is not None:
        return [f"license: {license}"]
    file = next((file for file in sorted(found.files.glob("LICENSE*")) if file.is_file()), None)
    return [] if file is None else ["license: other", f"license_link: {file.name}"]


def _model(config: ModelConfig, architecture: Architecture, dtype: str) -> str:
    window = f", sliding window of {config.sliding_window:,}" if config.sliding_window else ""
    window += f" in {', '.join(config.layer_types)} layers in turn" if config.layer_types else ""
    own = config.experts
    window += f", {own.num_experts} experts of which each token chooses {own.top_k}" if own.enabled else ""
    kind = f"{architecture.name} reward model" if config.head == "score" else architecture.name
    return (
        f"A {kind} with {num_params(config):,} parameters in {dtype}: {config.num_layers} layers, width"
        f" {config.embed_dim}, {config.num_heads} query and {config.num_kv_heads} key/value heads, {config.vocab_size:,}"
        f" tokens, context of {config.max_seq_len:,}{window}."
    )


def _training(found: Pretrained) -> str:
    source, step = (found.hf or {}).get("source"), int(found.source.name)
    start = f"started from {source}" if source else "started from random weights"
    if step == 0:
        return f"Written by llamajax at step 0; {start}."
    trained = f"Trained with llamajax for {step:,} steps"
    match found.meta:
        case {"data": {"tokens": int(tokens)}}:
            trained += f" on {tokens:,} tokens (padding included)"
        case {"data": {"position": int(rows)}, "config": {"data": {"seq_len": int(seq_len)}}}:  # written by older versions
            trained += f" on {rows * seq_len:,} tokens (padding included)"
    loss = _held_out_loss(found.source.parent.parent, step)
    unit = "per pair of answers" if found.config.head == "score" else "nats per token"
    return f"{trained}; {start}." + ("" if loss is None else f" Loss on held-out documents: {loss:.4f} {unit}.")


def _held_out_loss(run_dir: Path, step: int) -> float | None:
    """Returns the held-out loss measured at exactly this step; None if the log has none."""
    if not (run_dir / METRICS_FILE).is_file():
        return None
    try:
        series: dict[str, Any] = read_run(run_dir).series
    except UserError as error:
        say(f"{error}; the model card states no loss")
        return None
    steps, losses = series.get("eval/loss", ([], []))
    return next((float(loss) for at, loss in zip(steps, losses, strict=True) if at == step), None)
