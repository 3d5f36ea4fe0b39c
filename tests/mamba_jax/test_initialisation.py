# SPDX-License-Identifier: Apache-2.0
"""Every parameter starts from the original's distribution, and knows whether it decays."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax import Mamba, Mamba2, Mamba3, MambaConfig, MambaLMHeadModel
from tests.mamba_jax.models import MIXERS


def flat(module) -> dict[str, nnx.Param]:
    return {".".join(map(str, path)): value for path, value in nnx.to_flat_state(nnx.state(module))}


def assert_uniform(values, low, high):
    """The sample fills [low, high] evenly: its extremes and its mean are where they belong."""
    values = np.asarray(values, np.float64).ravel()
    width = high - low
    assert low <= values.min() and values.max() <= high
    assert abs(values.mean() - (low + high) / 2) < 4 * width / math.sqrt(12 * values.size)
    slack = 12 * width / values.size
    assert values.min() < low + slack and values.max() > high - slack


@pytest.mark.parametrize("kind", [Mamba, Mamba2, Mamba3])
def test_step_sizes_start_log_uniform_in_their_range(kind):
    # 4096 step sizes: d_inner for Mamba-1, heads of one channel for the others.
    options = {} if kind is Mamba else {"headdim": 1, "d_state": 4}
    mixer = kind(2048, rngs=nnx.Rngs(0), **options)
    bias = mixer.dt_proj.bias if kind is Mamba else mixer.dt_bias
    assert bias[...].dtype == jnp.float32
    dt = np.asarray(jax.nn.softplus(bias[...]), np.float64)
    assert_uniform(np.log(dt), math.log(1e-3) - 1e-4, math.log(0.1) + 1e-4)


def test_the_floor_of_the_step_size_holds():
    mixer = Mamba2(2048, headdim=1, d_state=4, dt_min=1e-6, dt_init_floor=1e-4, rngs=nnx.Rngs(0))
    dt = np.asarray(jax.nn.softplus(mixer.dt_bias[...]))
    assert dt.min() == pytest.approx(1e-4, rel=1e-3)


def test_decay_rates():
    mamba1 = Mamba(32, d_state=8, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(np.exp(mamba1.A_log[...]), np.tile(np.arange(1, 9), (64, 1)), 1e-6)
    mamba2 = Mamba2(2048, headdim=1, d_state=4, rngs=nnx.Rngs(0))
    assert_uniform(np.exp(mamba2.A_log[...]), 1 - 1e-5, 16 + 1e-4)
    for mixer in (mamba1, mamba2):
        np.testing.assert_array_equal(mixer.D[...], 1)


def test_projections_and_convolutions():
    mixer = Mamba2(256, d_state=32, headdim=32, rngs=nnx.Rngs(0))
    for name in ("z", "x", "B", "C", "dt"):
        assert_uniform(getattr(mixer.in_proj, name).kernel[...], -1 / 16, 1 / 16)
    assert_uniform(mixer.out_proj.kernel[...], -1 / math.sqrt(512), 1 / math.sqrt(512))
    assert_uniform(mixer.conv1d.x.weight[...], -0.5, 0.5)
    assert_uniform(mixer.conv1d.x.bias[...], -0.5, 0.5)
    mixer = Mamba2(256, d_state=32, headdim=32, conv_init=0.1, rngs=nnx.Rngs(0))
    assert_uniform(mixer.conv1d.x.weight[...], -0.1, 0.1)
    mamba1 = Mamba(256, dt_scale=0.5, rngs=nnx.Rngs(0))
    assert_uniform(mamba1.dt_proj.kernel[...], -0.5 / 4, 0.5 / 4)
    mamba1 = Mamba(256, dt_init="constant", rngs=nnx.Rngs(0))
    np.testing.assert_allclose(mamba1.dt_proj.kernel[...], 1 / 4)


def test_mimo_projections_start_as_an_average():
    mixer = Mamba3(64, headdim=16, d_state=8, is_mimo=True, mimo_rank=4, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(mixer.mimo_x[...], 0.25)
    np.testing.assert_array_equal(mixer.mimo_z[...], 1)
    np.testing.assert_array_equal(mixer.mimo_o[...], 0.25)
    np.testing.assert_array_equal(mixer.B_bias[...], 1)
    np.testing.assert_array_equal(mixer.C_bias[...], 1)


@pytest.mark.parametrize("d_intermediate", [0, 256])
def test_the_language_model_scales_projections_into_the_residual_stream(d_intermediate):
    config = MambaConfig(
        d_model=128,
        n_layer=4,
        vocab_size=1000,
        d_intermediate=d_intermediate,
        ssm_cfg={"layer": "Mamba1", "bias": True},
    )
    parameters = flat(MambaLMHeadModel(config, rngs=nnx.Rngs(0)))
    bound = 1 / math.sqrt(256) / math.sqrt(4)
    assert_uniform(parameters["runs.0.mixer.out_proj.kernel"][...], -bound, bound)
    if d_intermediate:
        assert_uniform(parameters["runs.0.mlp.fc2.kernel"][...], -bound, bound)
    embedding = np.asarray(parameters["embedding.weight"][...])
    assert embedding.std() == pytest.approx(0.02, rel=0.01)
    for name in ("in_proj.x", "in_proj.z", "out_proj"):
        np.testing.assert_array_equal(parameters[f"runs.0.mixer.{name}.bias"][...], 0)
    assert np.abs(parameters["runs.0.mixer.conv1d.bias"][...]).max() > 0.1
    # The language model's zeroing of biases does not touch the step sizes.
    dt = np.asarray(jax.nn.softplus(parameters["runs.0.mixer.dt_proj.bias"][...]))
    assert dt.min() >= 0.999e-3 and dt.max() <= 0.1001


def test_layers_start_differently():
    config = MambaConfig(d_model=32, n_layer=3, vocab_size=16)
    kernel = MambaLMHeadModel(config, rngs=nnx.Rngs(0)).runs[0].mixer.in_proj.x.kernel[...]
    assert not np.allclose(kernel[0], kernel[1]) and not np.allclose(kernel[1], kernel[2])


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_decay_marks(name):
    """Decays: matrices, convolution taps, MIMO projections, the embedding. Nothing else does."""
    config = MambaConfig(
        d_model=32, n_layer=2, vocab_size=16, d_intermediate=32, ssm_cfg=MIXERS[name]
    )
    for path, param in flat(MambaLMHeadModel(config, rngs=nnx.Rngs(0))).items():
        parts = path.split(".")
        decays = (
            parts[-1] in ("kernel", "mimo_x", "mimo_z", "mimo_o")
            or path == "embedding.weight"
            or ("conv1d" in parts and parts[-1] == "weight")
        )
        assert param.get_metadata("weight_decay") is decays, path


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_dynamics_stay_float32_whatever_the_weights_are(name):
    config = MambaConfig(d_model=32, n_layer=1, vocab_size=16, ssm_cfg=MIXERS[name])
    parameters = flat(MambaLMHeadModel(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16))
    fp32 = {"A_log", "D", "dt_bias", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o"}
    for path, param in parameters.items():
        is_dynamics = path.split(".")[-1] in fp32 or path.endswith("dt_proj.bias")
        assert param[...].dtype == (jnp.float32 if is_dynamics else jnp.bfloat16), path


@pytest.mark.parametrize("kind", [Mamba, Mamba2, Mamba3])
def test_misspelt_options_are_named(kind):
    with pytest.raises(ValueError, match=r"unknown field 'd_stat'; did you mean 'd_state'\?"):
        kind(64, d_stat=4, rngs=nnx.Rngs(0))
