# SPDX-License-Identifier: Apache-2.0
"""A run's checkpoints: what was saved comes back bit for bit; damage and mismatch are reported."""

import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.checkpoint.store import CheckpointError, CheckpointStore, differences

CONFIG = {"model": {"d_model": 4}, "steps": 9}


class Moments(NamedTuple):
    """Stands for an optimizer's state."""

    count: jax.Array
    mu: dict


def state(step):
    """A state with every kind of container and dtype, different at every step."""
    key = jax.random.fold_in(jax.random.key(5), step)
    weights = {"kernel": jax.random.normal(key, (3, 4)), "half": jnp.full(5, step, jnp.bfloat16)}
    return {
        "params": {"runs": {0: weights, 1: {"D": jnp.full((), -0.0)}}},
        "optimizer": (Moments(jnp.int32(step), {"kernel": jnp.full((3, 4), jnp.nan)}), ()),
    }


@pytest.fixture
def reports():
    return []


@pytest.fixture
def store(tmp_path, reports):
    """A store with checkpoints 1 and 2, written by one that was closed."""
    with_two = CheckpointStore(tmp_path / "checkpoints", keep=2)
    for step in (1, 2):
        with_two.save(step, state(step), data={"next_index": step}, config=CONFIG)
    with_two.close()
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, report=reports.append)
    yield store
    store.close()


def assert_bitwise(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_restores_the_newest_bit_for_bit(store):
    restored = store.restore(state(0), config=CONFIG)
    assert (restored.step, restored.data, restored.config) == (2, {"next_index": 2}, CONFIG)
    assert_bitwise(restored.state, state(2))


def test_an_empty_directory_restores_nothing(tmp_path):
    store = CheckpointStore(tmp_path / "new")
    assert store.restore(state(0)) is None
    assert store.newest_config() is None
    store.close()


def test_keeps_the_newest_and_never_rewrites_one(store):
    store.save(2, state(7), data={}, config={})
    store.save(3, state(3), data={}, config=CONFIG)
    store.close()
    assert store.steps() == [2, 3]


def test_a_saved_array_may_be_donated_at_once(store):
    changing = jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree), donate_argnums=0)
    saved = {"a": jnp.arange(1 << 16, dtype=jnp.float32)}
    store.save(5, saved, data={}, config=CONFIG)
    for _ in range(3):
        saved = changing(saved)
    like = {"a": jnp.zeros(1 << 16)}
    np.testing.assert_array_equal(store.restore(like).state["a"], np.arange(1 << 16))


def test_a_different_config_is_named_field_by_field(store):
    other = {"model": {"d_model": 8}, "steps": 12}
    with pytest.raises(CheckpointError, match=r"got model\.d_model \(4, now 8\)$"):
        store.restore(state(0), config=other, may_change=("steps",))
    assert store.steps() == [1, 2]


def test_differences_name_missing_fields_and_leave_out_free_groups():
    saved, wanted = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 2, "d": 4}, "e": None}
    assert differences(saved, wanted) == ["a (1, now None)", "b.d (3, now 4)"]
    assert differences(saved, wanted, may_change=("b", "a")) == []


def files(store, step, part):
    found = (store._directory / str(step) / part).rglob("*")
    return [file for file in found if file.is_file()]


def flip_a_bit(store):
    for file in files(store, 2, "arrays"):
        if "d" in file.parent.name:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 4
            file.write_bytes(bytes(content))


def truncate_the_arrays(store):
    for file in files(store, 2, "arrays"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty_the_record(store):
    for file in files(store, 2, "record"):
        file.write_bytes(b"")


def remove_the_record(store):
    shutil.rmtree(store._directory / "2" / "record")


def remove_the_arrays(store):
    shutil.rmtree(store._directory / "2" / "arrays")


DAMAGES = [
    flip_a_bit,
    truncate_the_arrays,
    empty_the_record,
    remove_the_record,
    remove_the_arrays,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_used(store, reports, damage):
    damage(store)
    restored = store.restore(state(0), config=CONFIG)
    assert restored.step == 1
    assert_bitwise(restored.state, state(1))
    assert len(reports) == 1 and reports[0].startswith("checkpoint 2 is damaged (")
    assert "using 1" in reports[0] and "\n" not in reports[0]
    # Its name is free again, and nothing was deleted.
    store.save(2, state(2), data={}, config=CONFIG)
    assert (store._directory.with_name("checkpoints-damaged") / "2").is_dir()
    assert_bitwise(store.restore(state(0)).state, state(2))


def test_only_damaged_checkpoints_are_an_error_and_stay_where_they_are(store):
    for step in (1, 2):
        shutil.rmtree(store._directory / str(step) / "record")
    with pytest.raises(CheckpointError, match="wanted a readable checkpoint, got damaged ones"):
        store.restore(state(0))
    assert store.steps() == [1, 2]


def test_an_array_that_reads_well_but_is_another_one_is_found_out(store, reports):
    """What no file check sees: the arrays of another checkpoint in this one's place."""
    root = store._directory
    shutil.rmtree(root / "2" / "arrays")
    shutil.copytree(root / "1" / "arrays", root / "2" / "arrays")
    assert store.restore(state(0)).step == 1
    assert "is not what was written" in reports[0]


def test_read_only_changes_nothing(store):
    flip_a_bit(store)
    half_written = store._directory / "3.orbax-checkpoint-tmp"
    half_written.mkdir()
    reports = []
    reader = CheckpointStore(store._directory, read_only=True, report=reports.append)
    assert reader.restore(state(0)).step == 1
    assert len(reports) == 1
    reader.close()
    assert half_written.is_dir() and (store._directory / "2").is_dir()


def test_moves_between_meshes(store):
    devices = np.array(jax.devices()[:2])
    mesh = jax.sharding.Mesh(devices, ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    wanted = np.arange(12, dtype=np.float32).reshape(4, 3)
    store.save(4, {"a": jax.device_put(wanted, sharding)}, data={}, config=CONFIG)
    for place in (sharding, jax.sharding.SingleDeviceSharding(devices[0])):
        like = {"a": jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=place)}
        got = store.restore(like).state["a"]
        assert got.sharding == place
        np.testing.assert_array_equal(got, wanted)
