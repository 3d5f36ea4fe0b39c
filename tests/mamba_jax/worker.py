# SPDX-License-Identifier: Apache-2.0
"""One process of several: a few steps of gradient descent on a mesh over all of them.

    python -m tests.mamba_jax.worker PORT NUM_PROCESSES PROCESS_ID

Prints the losses as JSON. Every process makes the whole batch and keeps its own rows.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_jax import MambaLMHeadModel
from mamba_jax.partitioning.mesh import make_mesh
from mamba_jax.partitioning.rules import sharded_init
from tests.mamba_jax.models import CONFIGS, ids


def losses(model: MambaLMHeadModel, tokens: jax.Array, steps: int = 3) -> list[float]:
    """Losses of a few steps of gradient descent."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, tokens):
        logits = nnx.merge(graph, params, rest)(tokens[:, :-1]).astype(jnp.float32)
        picked = tokens[:, 1:, None] == jnp.arange(logits.shape[-1])[None, None, :]
        log_p = jnp.sum(jnp.where(picked, logits, 0), -1) - jax.nn.logsumexp(logits, axis=-1)
        return -jnp.mean(log_p)

    @jax.jit
    def step(params, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

    history = []
    for _ in range(steps):
        params, loss = step(params, tokens)
        history.append(float(loss))
    return history


def make() -> MambaLMHeadModel:
    """The model every process starts from."""
    return MambaLMHeadModel(CONFIGS["Mamba2"], rngs=nnx.Rngs(0))


def main(port: str, num_processes: str, process_id: str) -> None:
    """Joins the others and trains."""
    count, index = int(num_processes), int(process_id)
    jax.config.update("jax_num_cpu_devices", 8 // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    mesh = make_mesh(data=2, tensor=2, sequence=2)
    tokens = np.asarray(ids(4, 17))
    rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None))
    tokens = jax.make_array_from_callback(tokens.shape, rows, lambda part: tokens[part])
    with jax.set_mesh(mesh):
        print(json.dumps(losses(sharded_init(make, mesh), tokens)))


if __name__ == "__main__":
    main(*sys.argv[1:])
