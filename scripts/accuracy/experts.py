"""Trains a dense model, a model with fine-grained experts and BigMac (arXiv:2502.16927) on Python's standard library.

    python -m scripts.accuracy.experts --seeds 0 1 --json FILE

As in the paper, BigMac's experts are as large as the fine-grained ones, and its projections to and from the latent width
come on top. The dense model has as many active parameters as BigMac. All three see the same rows in the same steps, with the
same learning rates. The runs need a CPU and five minutes each. Prints for every model its parameters and its losses in nats
per token, training over the last 20 steps.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llamajax
from llamajax.config.run import Config
from llamajax.estimates.formulas import num_active_params, num_params

WIDTH, HIDDEN = 192, 512
"""Width of the residual stream, and of the hidden layers of a token's fine-grained experts together."""
LATENT = 2 * WIDTH // 3
"""Width in which BigMac's tokens travel. The paper's is a quarter of 2,048 numbers; half of 192 is too few."""
NUM_DEVICES = 2
"""Emulated devices, over which the experts are split."""
MODELS = ("dense", "fine-grained", "BigMac")


def experts_of(name: str, num_experts: int, top_k: int) -> dict[str, Any]:
    """Returns `model.experts`. A token's experts have `3 WIDTH HIDDEN` parameters per layer: each `3 WIDTH mlp_dim`, or
    `3 LATENT mlp_dim`."""
    if name == "dense":
        return {}
    own = {"num_experts": num_experts, "top_k": top_k, "balance_loss": 0.01, "scores": "sigmoid", "bias_update_rate": 0.01}
    if name == "fine-grained":
        return own | {"mlp_dim": HIDDEN // top_k}
    return own | {"latent_dim": LATENT, "mlp_dim": WIDTH * HIDDEN // (LATENT * top_k)}


def config_of(name: str, args: argparse.Namespace, seed: int, directory: Path) -> Config:
    """Returns the run of one of `MODELS`."""
    mesh = {"num_cpu_devices": NUM_DEVICES, "fsdp": NUM_DEVICES}
    if name != "dense":
        mesh |= {"fsdp": 1, "expert": NUM_DEVICES}
    return llamajax.load_config(
        "quickstart",
        {
            "run_dir": str(directory / f"{name}-{seed}"),
            "seed": seed,
            "model.embed_dim": WIDTH,
            "model.mlp_dim": HIDDEN + 2 * LATENT // 3,  # of the dense model: with BigMac's 2 WIDTH LATENT more
            "model.head_dim": WIDTH // 4,
            "model.init_std": args.init_std,
            "model.experts": experts_of(name, args.experts, args.top_k),
            "mesh": mesh,
            "parallel.expert_slots": 2.0,
            "data.cache_dir": str(directory / "cache"),
            "train.num_steps": args.steps,
            "train.global_batch_size": args.rows,
            "train.eval_every": None,
            "optimizer.learning_rate": args.learning_rate,
            "optimizer.warmup_steps": args.warmup,
            "optimizer.decay_steps": args.steps // 3,
            "checkpoint.save_every": args.steps,
            "metrics.tensorboard": False,
            "sample": {},
        },
    )


def row_of(name: str, args: argparse.Namespace, seed: int, directory: Path) -> dict[str, Any]:
    """Trains one model and returns its figures."""
    config = config_of(name, args, seed, directory)
    result = llamajax.train(config)
    return {
        "model": name,
        "seed": seed,
        "parameters": num_params(config.model),
        "active": num_active_params(config.model),
        "loss": result.loss,
        "held_out_loss": result.held_out_loss,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as text."""
    lines = [f"{'model':14}{'seed':>5}{'parameters':>12}{'active':>11}{'loss':>9}{'held-out':>10}"]
    for row in rows:
        of_model = f"{row['model']:14}{row['seed']:5}{row['parameters']:12,}{row['active']:11,}"
        lines.append(f"{of_model}{row['loss']:9.4f}{row['held_out_loss']:10.4f}")
    return "\n".join(lines)


def main() -> None:
    """Trains all models with all seeds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=64, help="rows of 128 tokens per step")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top_k", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--init_std", type=float, default=0.07, help="of all weights; default: 1 / sqrt(192)")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--directory", type=Path, help="where runs are stored; default: nowhere")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.directory or Path(temporary)
        rows = [row_of(name, args, seed, directory) for seed in args.seeds for name in args.models]
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
