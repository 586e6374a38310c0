"""An evaluation, from model to table: read `run` from top to bottom."""

import dataclasses
import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import Any

import jax

from llamajax.config.evaluate import EvaluateConfig
from llamajax.config.model import ModelConfig
from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.evaluation.document_loss import evaluate_documents
from llamajax.parallel import compilation_cache, mesh, startup
from llamajax.processes.exit import end_process, exit_code
from llamajax.processes.peers import of_first, rank
from llamajax.watch import console
from llamajax.watch.option_files import check_outputs
from llamajax.weights.open_model import open_pretrained


def run(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluates as `config` says, prints a table and returns the contents of the file `json`.

    Raises:
        UserError: one of `llamajax.errors`, when the settings, data, machine or model do not allow it.
    """
    if config.tasks is not None and importlib.util.find_spec("lm_eval") is None:
        raise EnvironmentMismatchError("tasks: lm-eval is not installed; run pip install 'llamajax[eval]'")
    startup.connect(config.mesh, config.distributed)
    if config.json is not None:
        check_json(config.json)
    compilation_cache.start("auto", console.say)
    pretrained = open_pretrained(config.model)
    pretrained.check_predicts()
    model_config = choose_types(config, pretrained.config)
    jax.set_mesh(mesh.make_mesh(config.mesh))
    problems = model_config.undivided(jax.sharding.get_mesh().shape)
    if config.seq_len is not None and config.seq_len > model_config.max_seq_len:
        problems.append(f"seq_len: {config.seq_len} is above the model's max_seq_len={model_config.max_seq_len}; lower it")
    if problems:
        raise ConfigError("\n".join(problems))
    tokenizer = pretrained.tokenizer()
    console.log(f"model      {pretrained.about}")
    console.log(f"devices    {console.devices()}; weights {model_config.param_dtype}, compute {model_config.compute_dtype}")
    if config.tasks is None:
        results = evaluate_documents(config, pretrained, model_config, tokenizer)
    else:
        if not console.is_interactive() or jax.process_index() > 0:
            os.environ.setdefault("TQDM_DISABLE", "1")  # the harness reads it at import, and shows no bars
        if jax.process_index() > 0:
            logging.getLogger("lm_eval").setLevel(logging.ERROR)  # the first process prints its warnings
        from llamajax.evaluation.harness import evaluate_tasks

        results = evaluate_tasks(config, pretrained, model_config, tokenizer)
    results = {"model": pretrained.shown} | results
    if config.json is not None and jax.process_index() == 0:
        path = Path(os.path.expanduser(config.json))
        path.write_text(json.dumps(results, indent=2) + "\n")
        console.log(f"results    {path}")
    return results


def check_json(path: str) -> None:
    """Checks that process 0, which alone writes the file, can write it; all processes call this together.

    Raises:
        ConfigError: it cannot; raised in all processes.
    """
    problem = None
    if rank() == 0:
        try:
            check_outputs({"json": path}, {"json"})
        except ConfigError as error:
            problem = str(error)
    if (told := of_first(problem)) is not None:
        raise ConfigError(told)


def choose_types(config: EvaluateConfig, model: ModelConfig) -> ModelConfig:
    """Returns the model with the types of weights and computation that `config` chooses."""
    chosen = {"param_dtype": config.param_dtype, "compute_dtype": config.compute_dtype}
    return dataclasses.replace(model, **{key: dtype for key, dtype in chosen.items() if dtype != "auto"})


def main(config: EvaluateConfig) -> None:
    """Evaluates and ends the process."""
    code = exit_code(
        lambda: run(config),
        memory_remedy="a smaller batch_size or seq_len, or param_dtype: bfloat16",
        disk=config.json or config.model,
        disk_remedy="check the disk and run the same command again",
    )
    end_process(code, distributed=config.distributed.enabled)
