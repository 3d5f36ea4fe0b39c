# SPDX-License-Identifier: Apache-2.0
"""AdamW, what decays, and the learning rate over time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mamba_jax.config import MambaConfig
from mamba_jax.model import MambaLMHeadModel
from train.config import OptimizerConfig
from train.optimizer import decay_mask, make_optimizer, make_schedule

KEPT = {"A_log", "D", "dt_bias", "B_bias", "C_bias", "bias"}


def schedule(steps=100, **options):
    rate = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=10, **options), steps)
    return np.array([rate(step) for step in range(steps + 5)])


def test_cosine_rises_then_falls_to_its_last_ratio():
    rates = schedule(schedule="cosine", final_ratio=0.1)
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(rates[55], 0.1 + 0.9 * 0.5, rtol=1e-6)
    np.testing.assert_allclose(rates[100:], 0.1, rtol=1e-6)
    assert (np.diff(rates[10:101]) < 0).all()


def test_wsd_stays_at_the_peak_and_falls_linearly():
    rates = schedule(schedule="wsd", final_ratio=0.0, decay_fraction=0.2)
    np.testing.assert_allclose(rates[9:81], 1)
    np.testing.assert_allclose(rates[80:101], np.linspace(1, 0, 21), atol=1e-6)


def test_constant_stays_and_no_warmup_starts_at_the_peak():
    np.testing.assert_allclose(schedule(schedule="constant")[9:], 1)
    rate = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=0), 100)
    assert rate(0) == 1


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_zero_gradients_decay_weights_alone(layer):
    """Case T25 b: with lr 1e-3 and decay 0.1 weights shrink by 1e-4 and nothing else moves."""
    extra = {} if layer == "Mamba1" else {"headdim": 8}
    config = MambaConfig(
        d_model=16, n_layer=2, vocab_size=8, ssm_cfg={"layer": layer, "d_state": 8, **extra}
    )
    model = nnx.eval_shape(lambda: MambaLMHeadModel(config, rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 2.0), nnx.to_pure_dict(state))
    options = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, warmup_steps=0)
    optimizer = make_optimizer(options, 10**9, decay_mask(state))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    for path, leaf in jax.tree.leaves_with_path(optax.apply_updates(params, updates)):
        names = [str(entry.key) for entry in path]
        kept = names[-1] in KEPT or any("norm" in name for name in names)
        np.testing.assert_allclose(leaf, 2.0 if kept else 1.9998, rtol=1e-7, err_msg=str(names))


def test_a_parameter_that_does_not_say_whether_it_decays_is_an_error():
    with pytest.raises(ValueError, match=r"parameter kernel does not say whether it decays"):
        decay_mask(nnx.state(nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))))


def test_masters_keep_what_bf16_would_lose():
    """Case T25 c: 100 steps of -6e-4 from 1 end at 0.94; a bf16 weight would stay at 1."""
    options = OptimizerConfig(
        learning_rate=6e-4, warmup_steps=0, schedule="constant", weight_decay=0, eps=1e-20
    )
    optimizer = make_optimizer(options, 100, {"w": True})
    params = {"w": jnp.ones(())}
    state = optimizer.init(params)
    for _ in range(100):
        updates, state = optimizer.update({"w": jnp.ones(())}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["w"], 0.94, rtol=1e-5)
    assert float(params["w"].astype(jnp.bfloat16)) == 0.94140625
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype != jnp.int32]
    assert {leaf.dtype for leaf in moments} == {jnp.dtype("float32")}
