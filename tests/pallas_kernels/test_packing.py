# SPDX-License-Identifier: Apache-2.0
"""The meaning of `seq_idx`: a plain loop over tokens says what each derived array must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import packing

ids = st.lists(st.integers(-2, 3), min_size=9, max_size=9)


def loop(row: list[int]) -> dict[str, list]:
    """The rules of packing.py, one token after another."""
    out = {name: [] for name in packing.Packing._fields}
    previous_id, previous_real, document, position = -1, -1, 0, 0
    for t, token_id in enumerate(row):
        is_real = token_id >= 0
        begins = is_real and token_id != previous_id
        starts = begins and previous_real >= 0
        document += starts
        position = 0 if begins else position
        out["is_real"].append(is_real)
        out["begins"].append(begins)
        out["starts"].append(starts)
        out["document"].append(document)
        out["position"].append(position)
        out["previous_real"].append(previous_real)
        if is_real:
            previous_id, previous_real, position = token_id, t, position + 1
        out["carried_id"].append(previous_id)
    out["last_real"] = previous_real
    return out


@settings(max_examples=60, deadline=None)
@given(rows=st.tuples(ids, ids))
def test_resolve_follows_the_rules(rows):
    got = packing.resolve(jnp.array(rows, jnp.int32))
    for name, value in got._asdict().items():
        wanted = np.array([loop(row)[name] for row in rows])
        np.testing.assert_array_equal(value, wanted, err_msg=name)


def test_padding_inside_a_document_does_not_cut_it():
    got = packing.resolve(jnp.array([[-1, 5, -1, 5, 2, -1]]))
    assert got.starts.tolist() == [[False, False, False, False, True, False]]
    assert got.document.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert got.position[0, jnp.array([1, 3, 4])].tolist() == [0, 1, 0]


def test_an_id_used_again_is_another_document():
    got = packing.resolve(jnp.array([[0, 1, 0]]))
    assert got.document.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32])
def test_resolve_under_jit_and_vmap(dtype):
    seq_idx = jnp.array([[0, 0, -1, 1], [-1, 2, 2, 3]], dtype)
    whole = packing.resolve(seq_idx)
    apart = jax.jit(jax.vmap(lambda row: packing.resolve(row[None])))(seq_idx)
    for name, value in whole._asdict().items():
        np.testing.assert_array_equal(getattr(apart, name)[:, 0], value, err_msg=name)


def test_last_tokens_of_documents():
    seq_idx = jnp.array([[0, 0, -1, 0, 2, -1], [-1, -1, -1, -1, -1, -1]])
    assert packing.last_tokens(seq_idx, 4).tolist() == [[3, -1, 4, -1], [-1, -1, -1, -1]]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    tail=st.integers(0, 2),
)
def test_cu_seqlens_give_each_document_its_id(lengths, tail):
    """Empty documents in the first, a middle or the last place included."""
    wanted = [i for i, length in enumerate(lengths) for _ in range(length)] + [-1] * tail
    if not wanted:
        return
    cu_seqlens = np.cumsum([0, *lengths])
    got = packing.seq_idx_from_cu_seqlens(cu_seqlens, len(wanted))
    assert got.dtype == jnp.int32
    assert got.tolist() == [wanted]


def test_cu_seqlens_of_several_rows_under_jit():
    cu_seqlens = jnp.array([[0, 0, 3, 3], [1, 2, 2, 5]])
    got = jax.jit(packing.seq_idx_from_cu_seqlens, static_argnums=1)(cu_seqlens, 5)
    assert got.tolist() == [[1, 1, 1, -1, -1], [-1, 0, 2, 2, 2]]


@pytest.mark.parametrize(
    ("cu_seqlens", "length", "error", "message"),
    [
        ([0, 2], 2, TypeError, "cu_seqlens must be an array"),
        (np.array([0.0, 2.0]), 2, TypeError, "cu_seqlens must have an integer dtype"),
        (np.array([0]), 2, ValueError, "at least 2 entries"),
        (
            np.zeros((1, 1, 2), int),
            2,
            ValueError,
            r"cu_seqlens must have shape \(s\+1 or b, s\+1\)",
        ),
        (np.array([0, 3, 2]), 3, ValueError, "cu_seqlens must not decrease; got"),
        (np.array([0, 2]), 0, ValueError, "length must be at least 1; got 0"),
        (np.array([0, 2]), 2.0, TypeError, "length must be an int; got 2.0"),
    ],
)
def test_bad_cu_seqlens_are_refused(cu_seqlens, length, error, message):
    with pytest.raises(error, match=message):
        packing.seq_idx_from_cu_seqlens(cu_seqlens, length)
