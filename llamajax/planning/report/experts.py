"""Figures of experts in a plan: their bytes on a device, the tokens that it receives, and the rounds of all-to-alls."""

from collections.abc import Mapping
from typing import Any

from llamajax.config.run import Config
from llamajax.estimates.communication import expert_bytes
from llamajax.estimates.experts import Dispatch, num_exchanges
from llamajax.estimates.formulas import DTYPE_BYTES, expert_weights, mesh_sizes, trained_weights
from llamajax.units import format_bytes, format_count


def expert_figures(config: Config) -> dict[str, Any] | None:
    """Returns the figures of a run's experts; None: it has none.

    - `num_params` (of all experts), `of_device` (experts of a layer that a device computes with).
    - Bytes of all layers' experts on a device: `weight_bytes` and `moment_bytes` between steps, `gradient_bytes` in the
      accumulated type where `parallel.zero` splits them.
    - `tokens` (of a micro-batch and layer that come to a device, on average, once for each chosen expert), `busiest`
      (those of the device with `imbalance` times as many), `places` (room for them in one round), `rounds`.
    - `all_to_alls` of a layer, forward and backward, and the `sent_bytes` of a device in all of them per step.
    """
    if not config.model.experts.enabled:
        return None
    mesh, model = mesh_sizes(config), config.model
    own, way, imbalance = expert_weights(model), Dispatch.of(config, mesh), config.hardware.expert_imbalance
    stored = mesh["data"] if config.parallel.zero_data else 1
    shards = mesh["fsdp"] * mesh["expert"] * mesh["sequence"] * mesh["tensor"] * stored * mesh["pipeline"]
    trained = sum(size for name, size in trained_weights(config, model).items() if name in own)
    moments = config.optimizer.moments.of_weight(is_matrix=True)
    loads = way.loads(imbalance)
    return {
        "num_params": sum(own.values()),
        "of_device": way.experts,
        "weight_bytes": sum(own.values()) * DTYPE_BYTES[model.param_dtype] // shards,
        "moment_bytes": trained * moments * DTYPE_BYTES[config.optimizer.moment_dtype] // shards,
        "gradient_bytes": trained * DTYPE_BYTES[config.train.grad_accum_dtype] // shards,
        "imbalance": imbalance,
        "tokens": way.choices,
        "busiest": round(sum(loads)),
        "places": way.places,
        "rounds": len(loads),
        "all_to_alls": num_exchanges(config),
        "sent_bytes": round(expert_bytes(config, mesh)),
    }


def lines(figures: Mapping[str, Any], num_experts: int, top_k: int) -> list[str]:
    """Returns the lines of a report for `expert_figures`."""
    stored = ", ".join(f"{format_bytes(figures[f'{name}_bytes'])} of {name}s" for name in ("weight", "moment", "gradient"))
    rounds = "one round" if figures["rounds"] == 1 else f"{figures['rounds']} rounds"
    of_all = f"{format_count(figures['num_params'])} parameters in all"
    busiest = f"; the busiest gets {figures['imbalance']:g} times as many" if figures["imbalance"] > 1 else ""
    return [
        f"{num_experts} per layer, of which a token chooses {top_k}, {of_all}; {figures['of_device']} of each layer per GPU,"
        f" which stores {stored}",
        f"{figures['tokens']:,} tokens of a micro-batch come to a GPU per layer, which has room for {figures['places']:,}"
        f"{busiest}: {rounds}; a GPU sends {format_bytes(figures['sent_bytes'])} in {figures['all_to_alls']} all-to-alls of"
        " each layer",
    ]
