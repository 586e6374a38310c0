"""Initial weights of all rows, drawn once and stored as a Hugging Face directory."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

from llamajax.config.hf_config import SPECIAL_TOKENS, hf_config_of
from llamajax.model.layers import residual_std
from llamajax.weights import names
from llamajax.weights.safetensors import SINGLE, Stored, Writer, stored_tensors
from scripts.bench.case import SEED, Case

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def write_weights(case: Case, directory: Path) -> None:
    """Draws weights like llamajax, with norms of one, in bfloat16. Every row widens them to the same fp32 master weights."""
    model, shapes = case.network, names.hf_shapes(case.network)
    (directory / "config.json").write_text(json.dumps(hf_config_of(model, dict.fromkeys(SPECIAL_TOKENS), "bfloat16")))

    with Writer(directory, shapes, _BFLOAT16, max_shard_bytes=1 << 60) as writer, ThreadPoolExecutor() as pool:

        def draw(number: int, name: str, shape: tuple[int, ...]) -> None:
            values = np.ones(shape, np.float32)
            if len(shape) > 1:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                values = np.random.default_rng((SEED, number)).standard_normal(shape, np.float32)
                values *= residual_std(model) if is_residual else model.init_std
            writer.write(name, values.astype(_BFLOAT16))

        for drawn in [pool.submit(draw, number, *item) for number, item in enumerate(shapes.items())]:
            drawn.result()


def open_weights(directory: Path) -> dict[str, Stored]:
    """Returns the tensors that `write_weights` wrote, by Hugging Face name."""
    path = directory / SINGLE
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return stored_tensors(path, header, 8 + length, path.stat().st_size)
