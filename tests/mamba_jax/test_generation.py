# SPDX-License-Identifier: Apache-2.0
"""Continuations do not depend on the batch, the padding, the pieces or the way they are watched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax import MambaConfig, generate, init_cache
from mamba_jax.generation import decoding, fork_cache, generate_text
from mamba_jax.generation.prompts import canonical
from mamba_jax.generation.text import ByteTokenizer
from tests.mamba_jax.models import CONFIGS, ids, model
from tests.tolerances import LOGITS, assert_close

DRAW = {"temperature": 1.3, "top_p": 0.95, "max_new_tokens": 6}
KEYS = jax.random.split(jax.random.key(3), 2)


@pytest.fixture(scope="module")
def lm():
    return model("Mamba2")


@pytest.fixture(scope="module")
def prompt():
    return np.asarray(ids(2, 7))


@pytest.mark.parametrize("name", ["Mamba1", "Mamba3-mimo", "hybrid"])
def test_rows_of_unequal_length_go_on_as_alone(name):
    """Left padding, right padding and a list of rows give the text of each row alone."""
    lm, short, long = model(name), np.asarray(ids(1, 3))[0], np.asarray(ids(1, 7, seed=5))[0]
    alone = [
        generate(lm, row[None], key=KEYS[index : index + 1], **DRAW).row(0)
        for index, row in enumerate((short, long))
    ]
    junk = np.full(4, 60)
    left = np.stack([np.concatenate([junk, short]), long])
    right = np.stack([np.concatenate([short, junk]), long])
    mask = np.array([[False] * 4 + [True] * 3, [True] * 7])
    for batch in (
        generate(lm, left, prompt_mask=mask, key=KEYS, **DRAW),
        generate(lm, right, lengths=[3, 7], key=KEYS, **DRAW),
        generate(lm, [short, long], key=KEYS, **DRAW),
    ):
        assert [batch.row(0), batch.row(1)] == alone


def test_scores_are_the_logits_of_the_whole_sequence(lm, prompt):
    result = generate(lm, prompt, max_new_tokens=6, return_scores=True)
    whole = jax.jit(lambda lm, x: lm(x))(lm, result.sequences)
    assert_close("scores", result.scores, whole[:, 6:-1], LOGITS)
    np.testing.assert_array_equal(result.tokens, np.argmax(whole[:, 6:-1, :61], axis=-1))
    assert result.sequences.dtype == np.int32 and result.num_new.tolist() == [6, 6]


def test_a_key_fixes_the_text_and_nothing_is_compiled_twice(lm, prompt):
    first = generate(lm, prompt, key=jax.random.key(1), **DRAW)
    compiled = decoding.decode._cache_size(), decoding.prefill._cache_size()
    again = generate(lm, prompt, key=jax.random.key(1), **DRAW)
    other = generate(lm, prompt, key=jax.random.key(2), **DRAW | {"temperature": 1.1})
    assert (decoding.decode._cache_size(), decoding.prefill._cache_size()) == compiled
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (first.tokens != other.tokens).any()
    assert (first.tokens[0] != first.tokens[1]).any()


def test_a_prompt_in_pieces_gives_the_same_text(lm, prompt):
    whole = generate(lm, prompt, key=jax.random.key(1), **DRAW)
    pieces = generate(lm, prompt, key=jax.random.key(1), prefill_chunk=3, **DRAW)
    np.testing.assert_array_equal(whole.tokens, pieces.tokens)
    mask = np.ones((2, 7), bool)
    mask[0, :5] = False
    whole = generate(lm, prompt, prompt_mask=mask, key=KEYS, **DRAW)
    # The first row has nothing in the first two pieces.
    pieces = generate(lm, prompt, prompt_mask=mask, key=KEYS, prefill_chunk=3, **DRAW)
    np.testing.assert_array_equal(whole.tokens, pieces.tokens)


def test_streaming_sees_every_token_once_and_can_end_rows(lm, prompt):
    whole = generate(lm, prompt, key=jax.random.key(1), **DRAW)
    seen = []
    streamed = generate(
        lm, prompt, key=jax.random.key(1), callback=seen.append, callback_every=2, **DRAW
    )
    assert [part.shape[1] for part in seen] == [1, 2, 2, 1]
    np.testing.assert_array_equal(np.concatenate(seen, axis=1), whole.tokens)
    np.testing.assert_array_equal(streamed.tokens, whole.tokens)
    ended = generate(
        lm,
        prompt,
        key=jax.random.key(1),
        callback=lambda tokens: np.array([True, False]),
        callback_every=2,
        pad_token_id=5,
        **DRAW,
    )
    assert ended.num_new.tolist() == [1, 6]
    assert ended.tokens[0, 1:].tolist() == [5] * 5
    np.testing.assert_array_equal(ended.tokens[1], whole.tokens[1])
    stopped = generate(
        lm, prompt, key=jax.random.key(1), callback=lambda tokens: True, callback_every=2, **DRAW
    )
    assert stopped.tokens.shape == (2, 1)


def test_an_end_token_ends_its_row_and_padding_follows(lm, prompt):
    free = generate(lm, prompt, max_new_tokens=6).tokens
    eos = int(free[0, 1])
    first = [int(np.argmax(row == eos)) + 1 if eos in row else 6 for row in free]
    result = generate(lm, prompt, max_new_tokens=6, eos_token_id=[eos, 60], pad_token_id=7)
    assert result.num_new.tolist() == first
    assert result.tokens.shape[1] == max(first)
    for row in range(2):
        assert result.tokens[row, : first[row]].tolist() == free[row, : first[row]].tolist()
        assert (result.tokens[row, first[row] :] == 7).all()
        assert result.row(row) == prompt[row].tolist() + free[row, : first[row]].tolist()


@pytest.mark.parametrize("name", ["Mamba2", "hybrid"])
def test_a_cache_continues_forks_and_survives_saving(name, tmp_path, prompt):
    """One row has ended before the other; what is kept is as if each had run alone."""
    lm = model(name)
    room = lm.init_cache(2, max_length=40)
    stop = {"callback": lambda tokens: np.array([True, False]), "callback_every": 2}
    first = generate(lm, prompt, max_new_tokens=4, cache=room, return_cache=True, **stop)
    assert first.num_new.tolist() == [1, 4]
    np.testing.assert_array_equal(first.cache.num_tokens, [7, 10])
    leaves, structure = jax.tree.flatten(first.cache)
    np.savez(tmp_path / "cache.npz", *leaves)
    with np.load(tmp_path / "cache.npz") as file:
        restored = jax.tree.unflatten(structure, [jnp.asarray(file[key]) for key in file.files])
    more = np.concatenate([first.last_tokens, np.asarray(ids(2, 2, seed=9))], axis=1)
    second = generate(lm, more, max_new_tokens=3, cache=restored)
    again = generate(lm, more, max_new_tokens=3, cache=first.cache)
    np.testing.assert_array_equal(second.tokens, again.tokens)
    forked = generate(lm, np.repeat(more, 2, 0), max_new_tokens=3, cache=fork_cache(restored, 2))
    np.testing.assert_array_equal(forked.tokens, np.repeat(second.tokens, 2, axis=0))
    history = [first.row(row) + more[row, 1:].tolist() for row in range(2)]
    np.testing.assert_array_equal(generate(lm, history, max_new_tokens=3).tokens, second.tokens)


def test_samples_of_a_prompt(lm, prompt):
    many = generate(lm, prompt, num_samples=3, key=jax.random.key(1), **DRAW)
    one = generate(lm, prompt, key=jax.random.key(1), **DRAW)
    np.testing.assert_array_equal(many.tokens[::3], one.tokens)
    np.testing.assert_array_equal(many.sequences[:, :7], np.repeat(prompt, 3, axis=0))
    assert len({tuple(row) for row in many.tokens.tolist()}) == 6


def test_teacher_tokens_are_used_and_scored(lm, prompt):
    teacher = np.array([[3, 4, 5], [6, -1, 8]])
    result = generate(lm, prompt, max_new_tokens=6, teacher_tokens=teacher, return_scores=True)
    assert result.tokens[0, :3].tolist() == [3, 4, 5]
    assert result.tokens[1, [0, 2]].tolist() == [6, 8]
    whole = jax.jit(lambda lm, x: lm(x))(lm, result.sequences)
    assert_close("scores", result.scores, whole[:, 6:-1], LOGITS)
    assert result.tokens[1, 1] == np.argmax(whole[1, 7, :61])


def _only_even(logits, state):
    even = jnp.arange(logits.shape[-1]) % 2 == 0
    return jnp.where(even[None, :] & ~state.seen, logits, -jnp.inf)


def test_logits_processors_are_plain_functions(lm, prompt):
    result = generate(lm, prompt, max_new_tokens=6, logits_processors=[_only_even])
    assert (result.tokens % 2 == 0).all()
    for row in range(2):
        assert len(set(result.row(row))) == len(set(prompt[row])) + 6


def test_the_cache_does_not_grow_with_the_context():
    """The same compiled piece reads the last of 64 k tokens as the last of 4 k."""
    for name in ("Mamba1", "Mamba2", "Mamba3"):
        sizes = {
            sum(leaf.nbytes for leaf in jax.tree.leaves(init_cache(CONFIGS[name], 1, length)))
            for length in (4096, 65536)
        }
        assert len(sizes) == 1
    prompts = canonical(np.zeros((1, 65536), np.int32), 61)
    assert {ids.shape for ids, _ in prompts.pieces(1024)} == {(1, 1024)}


def test_mistakes_are_named(lm, prompt):
    cases = [
        ({}, "either max_length or max_new_tokens"),
        ({"max_length": 7}, "max_length must exceed the prompt's 7 columns; got 7"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1; got 0"),
        ({"max_new_tokens": 2, "temperature": 0.5}, "key must be given"),
        ({"max_new_tokens": 2, "top_p": 0.0}, "top_p must be above 0"),
        ({"max_new_tokens": 2, "min_p": 2.0}, "min_p must be in 0 ... 1"),
        ({"max_new_tokens": 2, "top_k": -1}, "top_k must be at least 0"),
        ({"max_new_tokens": 2, "repetition_penalty": 0.0}, "repetition_penalty must be above"),
        ({"max_new_tokens": 2, "cache": lm.init_cache(3)}, "a row per prompt, 2; got 3"),
        ({"max_new_tokens": 2, "lengths": [0, 3]}, "row 0 has none"),
        ({"max_new_tokens": 2, "lengths": [8, 3]}, "lengths must be 2 numbers of at most 7"),
        ({"max_new_tokens": 2, "prompt_mask": np.ones((2, 3))}, "prompt_mask must have the shape"),
        ({"max_new_tokens": 2, "teacher_tokens": np.ones(2)}, "teacher_tokens must have shape"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            generate(lm, prompt, **options)
    with pytest.raises(ValueError, match=r"input_ids must be in 0 ... 63; got 64 at \[0, 1\]"):
        generate(lm, np.array([[1, 64]]), max_new_tokens=1)
    with pytest.raises(TypeError, match="integers"):
        generate(lm, np.ones((1, 2)), max_new_tokens=1)
    hybrid = model("hybrid")
    with pytest.raises(ValueError, match="room for 8 tokens in its attention layers; got 7"):
        generate(hybrid, prompt, max_new_tokens=2, cache=hybrid.init_cache(2, max_length=7))


BYTES = MambaConfig(d_model=16, n_layer=1, vocab_size=257, ssm_cfg={"layer": "Mamba1"})


def test_text_with_stop_strings_streams_and_ends():
    """Forced bytes stand for what a model writes; 'é' arrives in two tokens."""
    from flax import nnx

    from mamba_jax import MambaLMHeadModel

    lm = MambaLMHeadModel(BYTES, rngs=nnx.Rngs(0))
    written = ["abc é END tail", "never stops...."]
    teacher = np.array([list(text.encode()) for text in written], np.int32)
    teacher[1, -1] = ByteTokenizer.end_id
    pieces: dict[int, list[str]] = {0: [], 1: []}
    texts = generate_text(
        lm,
        ByteTokenizer(),
        ["x", "yz"],
        stop=["END", "EN?"],
        stream=lambda row, piece: pieces[row].append(piece),
        callback_every=1,
        max_new_tokens=teacher.shape[1],
        teacher_tokens=teacher,
    )
    assert texts == ["abc é ", "never stops..."]
    assert ["".join(pieces[row]) for row in range(2)] == texts
    assert not any("\ufffd" in piece for piece in pieces[0])
    quiet = generate_text(
        lm, ByteTokenizer(), ["x", "yz"], max_new_tokens=15, teacher_tokens=teacher
    )
    assert quiet == ["abc é END tail", "never stops..."]
