# SPDX-License-Identifier: Apache-2.0
"""The train step: a pure function of a plain dict of arrays and a batch, for `jax.jit`.

State (all arrays; masters and moments fp32):
  params        nested dict with the model's parameter names
  optimizer     optax's state
  step          () int32, batches consumed
  skipped       () int32, of those, steps not taken because loss or gradient was not finite
  bad_in_a_row  () int32, such steps since the last good one
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from mamba_jax.array_types import Array
from mamba_jax.checkpoint.pretrained import from_pretrained
from mamba_jax.checkpoint.store import differences
from mamba_jax.model import MambaLMHeadModel
from train.config import TrainConfig, UserError
from train.loss import next_token_nats
from train.optimizer import decay_mask, make_optimizer, make_schedule
from train.placement import state_shardings

State = dict[str, Any]


def make_model(config: TrainConfig, key: Array) -> MambaLMHeadModel:
    """Builds the model of a run, its weights drawn from `key`."""
    return MambaLMHeadModel(
        config.model,
        rngs=nnx.Rngs(params=key),
        dtype=jnp.dtype(config.compute_dtype),
        implementation=config.implementation,
        remat=config.remat,
        unroll=config.unroll,
    )


def init_state(config: TrainConfig, mesh: Mesh | None = None) -> State:
    """Draws the weights from `config.seed` and starts the optimizer, in one compiled call.

    On a mesh every array is made where it will live; no device ever holds the model whole.
    """
    init = _init(config)
    key = jax.random.key(config.seed)
    shardings = state_shardings(mesh, config, _abstract_model(config), jax.eval_shape(init, key))
    # Runs once: compiling it well takes longer than running it badly (11 s of 16 on two cores).
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(init, out_shardings=shardings, compiler_options=options)(key)


def with_pretrained(state: State, config: TrainConfig, mesh: Mesh | None = None) -> State:
    """A state with the weights of `config.init_from` instead of drawn ones.

    Raises:
      UserError: there is no such checkpoint, or it is of another model than `config.model`.
    """
    try:
        model = from_pretrained(config.init_from, param_dtype=jnp.float32, mesh=mesh)
    except ValueError as error:
        raise UserError(f"init_from: {error}") from None
    found = differences(model.config.to_dict(), config.model.to_dict())
    if model.config != config.model and found:
        raise UserError(
            f"init_from: wanted the model of {config.init_from}, got {', '.join(found)}"
        )
    return {**state, "params": nnx.to_pure_dict(nnx.state(model, nnx.Param))}


def abstract_state(config: TrainConfig, mesh: Mesh | None = None) -> State:
    """The shapes and shardings of `init_state`'s result, without computing it."""
    state = jax.eval_shape(_init(config), jax.random.key(0))
    shardings = state_shardings(mesh, config, _abstract_model(config), state)
    if shardings is None:
        return state
    struct = jax.ShapeDtypeStruct
    return jax.tree.map(lambda a, s: struct(a.shape, a.dtype, sharding=s), state, shardings)


def make_train_step(config: TrainConfig) -> Callable[[State, dict], tuple[State, dict]]:
    """Returns the compiled step: (state, batch) -> (state, metrics). The old state is donated.

    Metrics, all fp32 or int32 scalars: loss (nats per token), tokens, grad_norm (before clipping),
    learning_rate, skipped and bad_in_a_row.
    """
    optimizer = _optimizer(config)
    schedule = make_schedule(config.optimizer, config.steps)
    merge = _merge(config)

    def nats(params, batch):
        return _batch_nats(merge(params), batch, config.loss_chunk)

    def train_step(state: State, batch: dict) -> tuple[State, dict]:
        params, old = state["params"], state["optimizer"]
        total, grads, tokens = _accumulate(nats, params, batch, config.optimizer.accumulate)
        weight = 1 / jnp.maximum(tokens, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda grad: grad * weight, grads)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(total) & jnp.isfinite(norm)
        scale = jnp.minimum(1.0, config.optimizer.clip_norm / (norm + 1e-6))
        updates, new = optimizer.update(jax.tree.map(lambda g: g * scale, grads), old, params)
        new_params = optax.apply_updates(params, updates)

        def keep(new, old):
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        bad = (~finite).astype(jnp.int32)
        taken = state["step"] - state["skipped"]
        state = {
            "params": keep(new_params, params),
            "optimizer": keep(new, old),
            "step": state["step"] + 1,
            "skipped": state["skipped"] + bad,
            "bad_in_a_row": (state["bad_in_a_row"] + 1) * bad,
        }
        metrics = {
            "loss": total * weight,
            "tokens": tokens,
            "grad_norm": norm,
            "learning_rate": schedule(taken),
            "skipped": state["skipped"],
            "bad_in_a_row": state["bad_in_a_row"],
        }
        return state, metrics

    return jax.jit(train_step, donate_argnums=0)


def make_evaluate_step(config: TrainConfig) -> Callable[[dict, dict, Array], dict]:
    """Returns the compiled (params, batch, token_bytes) -> sums over the batch's targets.

    token_bytes is (v,) int32, bytes of text per token id. The sums: nats (-log p), tokens, bytes.
    """
    merge = _merge(config)

    def evaluate_step(params: dict, batch: dict, token_bytes: Array) -> dict[str, Array]:
        mask = batch["loss_mask"]
        sizes = jnp.where(mask, token_bytes[batch["targets"]], 0)
        return {
            "nats": _batch_nats(merge(params), batch, config.loss_chunk),
            "tokens": jnp.sum(mask, dtype=jnp.int32),
            "bytes": jnp.sum(sizes, dtype=jnp.int32),
        }

    return jax.jit(evaluate_step)


def model_with(config: TrainConfig, params: dict) -> MambaLMHeadModel:
    """The model with the parameters of a state."""
    return _merge(config)(params)


def _init(config: TrainConfig) -> Callable[[Array], State]:
    optimizer = _optimizer(config)

    def init(key: Array) -> State:
        params = nnx.to_pure_dict(nnx.state(make_model(config, key)))
        zero = jnp.zeros((), jnp.int32)
        counts = {"step": zero, "skipped": zero, "bad_in_a_row": zero}
        return {"params": params, "optimizer": optimizer.init(params), **counts}

    return init


def _optimizer(config: TrainConfig) -> optax.GradientTransformation:
    marks = decay_mask(nnx.state(_abstract_model(config)))
    return make_optimizer(config.optimizer, config.steps, marks)


@functools.lru_cache(maxsize=4)
def _abstract_model(config: TrainConfig) -> MambaLMHeadModel:
    """The model's structure and shapes; kept, since tracing its construction takes a while."""
    # `nnx.eval_shape` would look the logical axis names up in the mesh the run is on.
    graph, shapes = jax.eval_shape(lambda: nnx.split(make_model(config, jax.random.key(0))))
    return nnx.merge(graph, shapes)


def _merge(config: TrainConfig) -> Callable[[dict], MambaLMHeadModel]:
    graph, abstract = nnx.split(_abstract_model(config))

    def merge(params: dict) -> MambaLMHeadModel:
        variables = jax.tree.map(lambda leaf: leaf, abstract)
        nnx.replace_by_pure_dict(variables, params)
        return nnx.merge(graph, variables)

    return merge


def _batch_nats(model: MambaLMHeadModel, batch: dict, chunk: int) -> Array:
    hidden, _ = model.hidden_states(batch["tokens"], seq_idx=batch["seq_idx"])
    return next_token_nats(hidden, model.head_kernel(), batch["targets"], batch["loss_mask"], chunk)


def _accumulate(nats, params: dict, batch: dict, parts: int) -> tuple[Array, dict, Array]:
    """Sums the loss, its gradient (fp32) and the real tokens over `parts` pieces of a batch."""
    tokens = jnp.sum(batch["loss_mask"], dtype=jnp.int32)
    gradient = jax.value_and_grad(nats)
    if parts == 1:
        total, grads = gradient(params, batch)
        return total, grads, tokens

    def body(carry, part):
        return jax.tree.map(jnp.add, carry, gradient(params, part)), None

    # Row i goes to part i % parts, so that a batch sharded by rows stays sharded.
    split = jax.tree.map(lambda a: jnp.moveaxis(a.reshape(-1, parts, *a.shape[1:]), 1, 0), batch)
    start = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    (total, grads), _ = jax.lax.scan(body, start, split)
    return total, grads, tokens
