# SPDX-License-Identifier: Apache-2.0
"""AdamW from optax, its learning rate over time, and which parameters decay."""

from collections.abc import Callable

import jax.numpy as jnp
import optax
from flax import nnx

from train.config import OptimizerConfig


def make_optimizer(
    config: OptimizerConfig, steps: int, decays: dict
) -> optax.GradientTransformation:
    """AdamW with decoupled decay, p -= lr · (adam + weight_decay · p); moments are fp32.

    Gradients are clipped before, in the step, where their norm is known.

    Args:
      config: Its settings.
      steps: Steps of the whole run.
      decays: For each parameter, whether it decays; see `decay_mask`.
    """
    return optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=jnp.float32),
        optax.add_decayed_weights(config.weight_decay, decays),
        optax.scale_by_learning_rate(make_schedule(config, steps)),
    )


def make_schedule(config: OptimizerConfig, steps: int) -> Callable:
    """Learning rate of step 0, 1, …: linear warm-up, then cosine, WSD or constant.

    Step s of the warm-up has (s + 1) / warmup_steps of the peak, so no step is wasted at zero. WSD
    (warm-up, stable, decay; Hu et al. 2024, arXiv:2404.06395) stays at the peak and falls linearly
    at the end; a run can go on from any checkpoint of the stable part.
    """
    peak, last = config.learning_rate, config.learning_rate * config.final_ratio
    warmup = config.warmup_steps
    falling = max(1, round(config.decay_fraction * steps))
    start = {"cosine": warmup, "wsd": max(warmup, steps - falling), "constant": steps}
    start = start[config.schedule]

    def schedule(count):
        rising = jnp.minimum(1.0, (count + 1) / max(warmup, 1))
        done = jnp.clip((count - start) / max(1, steps - start), 0.0, 1.0)
        if config.schedule == "cosine":
            rate = last + (peak - last) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        elif config.schedule == "wsd":
            rate = peak + (last - peak) * done
        else:
            rate = jnp.asarray(peak)
        return rising * rate

    return schedule


def decay_mask(params: nnx.State) -> dict:
    """Reads each parameter's `weight_decay` mark; one that has none is an error, not a guess."""
    marks = {}
    for path, variable in nnx.to_flat_state(params):
        mark = variable.get_metadata().get("weight_decay")
        if mark is None:
            name = ".".join(map(str, path))
            raise ValueError(f"parameter {name} does not say whether it decays (weight_decay)")
        marks[path] = mark
    return nnx.traversals.unflatten_mapping(marks)
