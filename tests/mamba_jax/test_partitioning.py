# SPDX-License-Identifier: Apache-2.0
"""A mesh changes where numbers live, not what they are: logits, gradients, collectives, memory."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax import MambaConfig, MambaLMHeadModel, make_mesh, shard_model
from mamba_jax.partitioning.replicas import unequal_replicas
from mamba_jax.partitioning.rules import addressable_bytes, sharded_init
from tests.mamba_jax.models import CONFIGS, ids, model, shaken
from tests.tolerances import assert_close
from train.loss import next_token_nats

TOLERANCE = 1e-5
NAMES = ["Mamba1", "Mamba2", "Mamba3", "Mamba3-mimo", "hybrid"]
EVERY_AXIS = {"data": 1, "fsdp": 2, "tensor": 2, "sequence": 2}
LONG = {"sequence": 8, "data": 1}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


MESHES = [
    ("Mamba1", {"fsdp": 8, "data": 1}),
    ("Mamba2", {"tensor": 8, "data": 1}),
    *((name, EVERY_AXIS) for name in ("Mamba1", "Mamba3", "hybrid")),
    *(slow(name, EVERY_AXIS) for name in ("Mamba2", "Mamba3-mimo")),
    *(slow(name, {"data": 8}) for name in NAMES),
    *(slow(name, {"sequence": 2}) for name in NAMES),
    *(slow(name, LONG) for name in NAMES),
    *(slow(name, {"tensor": 2}) for name in NAMES),
]
PACKED = ["Mamba1", "hybrid", slow("Mamba2"), slow("Mamba3"), "Mamba3-mimo"]
TIME = 16


def mesh_id(value):
    if isinstance(value, str):
        return value
    return "-".join(f"{name}{size}" for name, size in value.items())


def loss(lm, tokens, seq_idx=None):
    logits = lm(tokens, seq_idx=seq_idx).astype(jnp.float32)
    real = 1.0 if seq_idx is None else (seq_idx >= 0)[..., None]
    return jnp.mean((logits * real) ** 2), logits


value_and_grad = jax.jit(jax.value_and_grad(loss, has_aux=True))


def leaves(tree):
    return jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(tree)))


def assert_same_on_mesh(lm, mesh, tokens, seq_idx=None):
    (_, logits), grads = value_and_grad(lm, tokens, seq_idx)
    with jax.set_mesh(mesh):
        (_, got), got_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
            shard_model(lm, mesh), tokens, seq_idx
        )
    real = np.ones(tokens.shape, bool) if seq_idx is None else np.asarray(seq_idx) >= 0
    assert_close("logits", np.asarray(got)[real], np.asarray(logits)[real], TOLERANCE)
    for (path, wanted), (_, value) in zip(leaves(grads), leaves(got_grads), strict=True):
        assert_close(jax.tree_util.keystr(path), value, wanted, TOLERANCE)


@pytest.mark.multidevice
@pytest.mark.parametrize(("name", "sizes"), MESHES, ids=mesh_id)
def test_logits_and_gradients_equal_one_devices(name, sizes):
    assert_same_on_mesh(model(name), make_mesh(**sizes), ids(8, TIME))


@pytest.mark.multidevice
@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_cross_the_cuts(name):
    """Documents that end on a cut, span several pieces, and leave whole pieces as padding; pieces
    shorter than the convolution's memory."""
    rows = [
        [0] * 7 + [1] * 1 + [2] * 8,
        [3] * 2 + [-1] * 6 + [3] * 3 + [5] * 5,
        [-1] * 9 + [0] * 7,
        [-1] * 16,
        [1] * 16,
        [0, 1] * 8,
        [4] * 4 + [7] * 4 + [-1] * 8,
        [2, -1] * 8,
    ]
    mesh = make_mesh(data=1, sequence=8)
    assert_same_on_mesh(model(name), mesh, ids(8, TIME), jnp.asarray(rows, jnp.int32))


@pytest.mark.multidevice
@pytest.mark.parametrize("name", ["Mamba1", "Mamba3-mimo", "hybrid"])
def test_a_cache_crosses_meshes(name):
    """A prompt prefilled with its tokens cut over devices goes on as on one device."""
    lm, tokens = model(name), ids(2, TIME + 1)
    wanted = lm(tokens)
    mesh = make_mesh(data=1, sequence=4, tensor=2)
    with jax.set_mesh(mesh):
        call = jax.jit(lambda lm, tokens, cache: lm(tokens, cache=cache))
        sharded = shard_model(lm, mesh)
        cache = lm.init_cache(2, max_length=TIME + 1)
        first, cache = call(sharded, tokens[:, :8], cache)
        second, cache = call(sharded, tokens[:, 8:TIME], cache)
        third, cache = call(sharded, tokens[:, TIME:], cache)
    assert_close("logits", jnp.concatenate([first, second, third], 1), wanted, TOLERANCE)


@pytest.mark.multidevice
@pytest.mark.parametrize(("ngroups", "tensor"), [(1, 2), (2, 4), (8, 4)])
def test_groups_follow_their_heads(ngroups, tensor):
    """Fewer groups than devices are replicated, as many or more are cut with the heads."""
    config = MambaConfig(
        d_model=32,
        n_layer=1,
        vocab_size=64,
        ssm_cfg={"layer": "Mamba2", "d_state": 4, "headdim": 8, "ngroups": ngroups},
    )
    assert_same_on_mesh(shaken(config), make_mesh(tensor=tensor), ids(8, TIME))


@pytest.mark.multidevice
def test_uneven_divisions_are_refused_with_the_numbers():
    config = MambaConfig(
        d_model=24, n_layer=1, vocab_size=64, ssm_cfg={"layer": "Mamba2", "headdim": 16}
    )
    lm = MambaLMHeadModel(config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"must divide the number of heads 3; got tensor=2"):
        shard_model(lm, make_mesh(tensor=2))
    lm = MambaLMHeadModel(MambaConfig(d_model=28, n_layer=1, vocab_size=64), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"must divide d_model=28; got fsdp=8"):
        shard_model(lm, make_mesh(fsdp=8, data=1))
    config = MambaConfig(
        d_model=24,
        n_layer=1,
        vocab_size=64,
        ssm_cfg={"layer": "Mamba2", "headdim": 2, "ngroups": 3, "d_state": 4},
    )
    lm = MambaLMHeadModel(config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"got ngroups=3, tensor=8"):
        shard_model(lm, make_mesh(tensor=8, data=1))


@pytest.mark.multidevice
def test_meshes():
    assert dict(make_mesh(tensor=2).shape) == {"data": 4, "fsdp": 1, "sequence": 1, "tensor": 2}
    with pytest.raises(ValueError, match=r"number of devices, 8; got data=3"):
        make_mesh(data=3)
    with pytest.raises(ValueError, match=r"number of devices, 8; got data=-1 with 16 taken"):
        make_mesh(tensor=16)
    with pytest.raises(ValueError, match=r"at most one axis may be -1; got data and tensor"):
        make_mesh(tensor=-1)
    with pytest.raises(ValueError, match=r"fsdp must be at least 1, or -1; got 0"):
        make_mesh(fsdp=0)


@pytest.mark.multidevice
def test_initialising_on_the_mesh_gives_the_same_model():
    def make():
        return MambaLMHeadModel(CONFIGS["Mamba2"], rngs=nnx.Rngs(3))

    sharded = sharded_init(make, make_mesh(fsdp=2, tensor=2))
    for (path, wanted), (_, got) in zip(leaves(make()), leaves(sharded), strict=True):
        assert_close(jax.tree_util.keystr(path), got, wanted, 1e-6)
    kernel = sharded.runs[0].mixer.in_proj.x.kernel[...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 16, 32)}


@pytest.mark.multidevice
@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 2), (2, 2), (4, 2), (1, 8)])
def test_parameter_memory_falls_with_the_mesh(fsdp, tensor):
    """Matrices, most of a real model, shrink by fsdp · tensor; vectors stay."""
    config = MambaConfig(
        d_model=256,
        n_layer=1,
        vocab_size=512,
        ssm_cfg={"layer": "Mamba2", "headdim": 32, "d_state": 16, "ngroups": 8},
    )
    lm = MambaLMHeadModel(config, rngs=nnx.Rngs(0))
    whole = addressable_bytes(nnx.state(lm))
    part = addressable_bytes(nnx.state(shard_model(lm, make_mesh(fsdp=fsdp, tensor=tensor))))
    assert whole / part > 0.75 * fsdp * tensor


def collectives(compiled) -> collections.Counter:
    pattern = r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return collections.Counter(re.findall(pattern, compiled.as_text()))


@pytest.mark.multidevice
@pytest.mark.parametrize("name", ["Mamba1", "Mamba2", "Mamba3"])
def test_a_layer_gathers_once_and_scatters_once(name):
    """Tensor parallelism: all-gather in, reduce-scatter out. Mamba-1's low-rank projection adds one
    reduction. The compiled program holds no gather of weights and no all-to-all."""
    lm = model(name)
    mesh = make_mesh(tensor=4)
    graph, state = nnx.split(shard_model(lm, mesh).runs)
    hidden = jnp.ones((8, TIME, 32))

    def layers(state, hidden, residual):
        (run,) = nnx.merge(graph, state)
        layer = jax.tree.map(lambda leaf: leaf[0], run)
        return layer(hidden, residual)[:2]

    cut = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), ("sequence", "tensor"), None))
    with jax.set_mesh(mesh):
        hidden = jax.device_put(hidden, cut)
        compiled = jax.jit(layers, out_shardings=(cut, cut)).lower(state, hidden, hidden).compile()
    wanted = {"all-gather": 1, "reduce-scatter": 1}
    if name == "Mamba1":
        wanted["all-reduce"] = 1
    if name == "Mamba2":
        wanted["all-reduce"] = 1  # statistics of the gated norm: one group over all heads
    assert collectives(compiled) == wanted


@pytest.mark.multidevice
@pytest.mark.parametrize("name", ["Mamba2", slow("Mamba1"), slow("Mamba3"), slow("Mamba3-mimo")])
def test_no_weight_and_no_logits_are_gathered(name):
    """Under tensor parallelism a training loss gathers tokens of the residual stream, and nothing
    else: no weight, and no axis as long as the vocabulary. All-to-all does not occur."""
    # 200 is no other size of this program.
    config = dataclasses.replace(CONFIGS[name], vocab_size=200)
    lm, mesh = MambaLMHeadModel(config, rngs=nnx.Rngs(0)), make_mesh(tensor=4)
    tokens = jax.ShapeDtypeStruct((8, TIME), jnp.int32)
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(token_loss)).lower(shard_model(lm, mesh), tokens)
    text = lowered.compile().as_text()
    gathered = set(re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", text))
    assert gathered <= {f"4,{TIME},32", "4,4,32"}  # a layer's input; one chunk of the loss's
    assert "all-to-all" not in text
    assert not re.search(r"\w\[(\d+,)*200(,\d+)*\]", text), "an array as long as the vocabulary"


def token_loss(lm, tokens):
    hidden, _ = lm.hidden_states(tokens)
    mask = jnp.ones(tokens.shape, bool)
    return next_token_nats(hidden, lm.head_kernel(), tokens, mask, chunk=4)


@pytest.mark.multidevice
def test_unequal_replicas_are_named():
    mesh = make_mesh(tensor=2)
    good = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("tensor")))
    copies = [jnp.zeros(3).at[0].set(float(index == 5)) for index in range(8)]
    bad = jax.make_array_from_single_device_arrays(
        (3,),
        jax.NamedSharding(mesh, jax.P()),
        [jax.device_put(copy, device) for copy, device in zip(copies, jax.devices(), strict=True)],
    )
    report = unequal_replicas({"good": good, "bad": bad})
    assert list(report) == ["['bad']"]
    assert "device 5" in report["['bad']"]
