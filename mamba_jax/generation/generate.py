# SPDX-License-Identifier: Apache-2.0
"""`generate`: continues prompts, the whole loop over tokens on the device."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_jax.array_types import Array, Float, Int
from mamba_jax.cache import AttentionCache, ModelCache
from mamba_jax.generation import decoding
from mamba_jax.generation.decoding import GenerationState, LogitsProcessor, Options
from mamba_jax.generation.prompts import Prompts, canonical
from mamba_jax.generation.sampling import Sampling
from mamba_jax.model import MambaLMHeadModel

Callback = Callable[[np.ndarray], "bool | np.ndarray | None"]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns. Rows: sample j of prompt i is row i · num_samples + j.

    Attributes:
      sequences: (b, t + n), int32. The prompts, shorter ones padded on the left, and `tokens`.
      tokens: (b, n), int32. The new tokens; after a row's end token, padding. n is what the longest
        row needed.
      num_new: (b,), int32. New tokens of each row, its end token included.
      prompt_lengths: (b,), int32. Tokens of each row's prompt.
      scores: (b, n, v), float32. The model's logits at each new token, before any processing; None
        unless asked for.
      cache: The model's state after everything but each row's last token: to continue, begin the
        next input_ids with `last_tokens`. None unless asked for.
    """

    sequences: np.ndarray
    tokens: np.ndarray
    num_new: np.ndarray
    prompt_lengths: np.ndarray
    scores: Float[Array, "b n v"] | None = None
    cache: ModelCache | None = None

    @property
    def last_tokens(self) -> np.ndarray:
        """(b, 1), int32. The last token of each row, which `cache` has not seen."""
        return np.take_along_axis(self.tokens, self.num_new[:, None] - 1, axis=1)

    def row(self, index: int) -> list[int]:
        """Prompt and new tokens of one row, without any padding."""
        start = self.sequences.shape[1] - self.tokens.shape[1] - int(self.prompt_lengths[index])
        end = self.sequences.shape[1] - self.tokens.shape[1] + int(self.num_new[index])
        return self.sequences[index, start:end].tolist()


def generate(
    model: MambaLMHeadModel,
    input_ids: Int[Array, "b t"] | Sequence[Sequence[int]],
    *,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    prompt_mask: np.ndarray | None = None,
    lengths: np.ndarray | Sequence[int] | None = None,
    temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    key: Array | None = None,
    num_samples: int = 1,
    logits_processors: Sequence[LogitsProcessor] = (),
    teacher_tokens: np.ndarray | None = None,
    return_scores: bool = False,
    return_cache: bool = False,
    callback: Callback | None = None,
    callback_every: int = 8,
    prefill_chunk: int = 4096,
    cache: ModelCache | None = None,
    state_dtype: jnp.dtype = jnp.float32,
) -> Generation:
    """Continues prompts.

    A row gives the same tokens in any batch, however it is padded, and a fixed key the same tokens
    on every run. The loop is compiled for each shape (rows, prompt columns, new tokens) once;
    temperature, top_p, min_p and repetition_penalty may change without compiling again.

    Args:
      model: The model.
      input_ids: (b, t), integers, t >= 1; or a list of rows of unequal length.
      max_length: Columns of prompt and new tokens together. This or `max_new_tokens` is given.
      max_new_tokens: New tokens of each row at most.
      prompt_mask: (b, t), bool. False marks padding, on the left or the right.
      lengths: (b,), integers. Real tokens of each row, the padding being on the right.
      temperature: Divides the logits; 0 takes the most likely token. None is 1 when top_k, top_p or
        min_p is given, otherwise 0.
      top_k: Draw from the k most likely tokens; 0 for all, 1 for the most likely token.
      top_p: Draw from the fewest most likely tokens whose probabilities sum to at least this.
      min_p: Draw from tokens at least this many times as likely as the most likely one.
      repetition_penalty: Divides (when negative, multiplies) the logits of tokens that occurred, in
        `input_ids` or since; 1 for none.
      eos_token_id: Token, or tokens, that end a row.
      pad_token_id: What ended rows are filled with; the (first) end token when None.
      key: A random key, from which each row and sample derives its own, or (b,) keys, one per
        prompt. Needed to draw.
      num_samples: Continuations per prompt; the prompt is read once.
      logits_processors: Functions (logits (b, v), GenerationState) → logits, applied after the
        repetition penalty. Compiled in: pass the same function objects to compile once.
      teacher_tokens: (b, m), integers. Used instead of drawn tokens; -1 leaves one free, and so
        does a row that is shorter than the new tokens.
      return_scores: Whether to return logits (b · n · v numbers).
      return_cache: Whether to return the cache.
      callback: Called with (b, k) new tokens, after the first and then every `callback_every`. It
        may return True, or (b,) bools, to end all or some rows.
      callback_every: Tokens between callbacks.
      prefill_chunk: Columns of the prompt read at a time: memory does not grow beyond it.
      cache: State after what came before the prompts, from `return_cache` or `model`. It is not
        changed, so that any number of continuations can start from it; see `fork_cache`.
      state_dtype: Dtype of a new cache's states.

    Returns:
      A `Generation`.

    Raises:
      ValueError: a wrong shape or number; no key to draw with; a cache of another batch, or too
        small for the attention layers of a hybrid.
      TypeError: input_ids are not integers.
    """
    prompts = canonical(
        input_ids, model.config.padded_vocab_size, prompt_mask=prompt_mask, lengths=lengths
    )
    batch, time = prompts.ids.shape
    num_new = _num_new(time, max_length, max_new_tokens)
    sampling = _sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    _check_counts(
        num_samples=num_samples, callback_every=callback_every, prefill_chunk=prefill_chunk
    )
    eos_ids = _ids(eos_token_id)
    options = Options(
        vocab_size=model.config.vocab_size,
        top_k=top_k,
        eos_ids=eos_ids,
        pad_id=pad_token_id if pad_token_id is not None else (*eos_ids, 0)[0],
        processors=tuple(logits_processors),
        freeze_done=return_cache and (bool(eos_ids) or callback is not None),
    )
    keys = _keys(key, batch, num_samples, needed=sampling.temperature is not None)
    teacher = _teacher(teacher_tokens, batch, num_samples, num_new)
    graph, params = nnx.split(model)
    if cache is None:
        cache = model.init_cache(batch, time + num_new, state_dtype)
    else:
        _check_cache(cache, prompts, num_new)
        # The compiled functions consume their cache; the caller's stays.
        cache = jax.tree.map(jnp.copy, cache)
    for ids, seq_idx in prompts.pieces(prefill_chunk):
        logits, cache = decoding.prefill(graph, params, ids, seq_idx, cache)
    if num_samples > 1:
        cache, logits = fork_cache(cache, num_samples), jnp.repeat(logits, num_samples, axis=0)
    rows = batch * num_samples
    watches = sampling.repetition_penalty is not None or options.processors
    state = GenerationState(
        step=jnp.zeros((), jnp.int32),
        token=jnp.zeros((rows,), jnp.int32),
        tokens=jnp.full((rows, num_new), options.pad_id, jnp.int32),
        num_new=jnp.zeros((rows,), jnp.int32),
        done=jnp.zeros((rows,), bool),
        keys=keys,
        cache=cache,
        seen=_seen(prompts, num_samples, logits.shape[-1]) if watches else None,
        scores=jnp.zeros((rows, num_new, logits.shape[-1])) if return_scores else None,
        teacher=teacher,
    )
    state = decoding.begin(state, logits, sampling, options)
    every = num_new if callback is None else callback_every
    state = _run(graph, params, state, sampling, options, num_new, callback, every)
    return _result(prompts, state, num_samples, return_cache)


def fork_cache(cache: ModelCache, copies: int) -> ModelCache:
    """Repeats every row of a cache: row i becomes rows i · copies ... i · copies + copies - 1."""
    layers = jax.tree.map(lambda leaf: jnp.repeat(leaf, copies, axis=1), cache.layers)
    return ModelCache(layers, jnp.repeat(cache.num_tokens, copies))


def _run(
    graph: nnx.GraphDef,
    params: nnx.State,
    state: GenerationState,
    sampling: Sampling,
    options: Options,
    num_new: int,
    callback: Callback | None,
    every: int,
) -> GenerationState:
    """Decodes to the end, handing new tokens to the callback on the way."""
    shown = 0
    while True:
        if callback is not None:
            step = int(state.step)
            if step > shown:
                stop = callback(np.asarray(state.tokens[:, shown:step]))
                shown = step
                if stop is not None:
                    done = state.done | jnp.broadcast_to(jnp.asarray(stop, bool), state.done.shape)
                    state = state._replace(done=done)
        if int(state.step) >= num_new or bool(jnp.all(state.done)):
            return state
        stop_at = jnp.asarray(min(int(state.step) + every, num_new), jnp.int32)
        state = decoding.decode(graph, params, state, stop_at, sampling, options)


def _result(
    prompts: Prompts, state: GenerationState, num_samples: int, with_cache: bool
) -> Generation:
    step = int(state.step)
    tokens = np.asarray(state.tokens[:, :step])
    ids = np.repeat(prompts.ids, num_samples, axis=0)
    return Generation(
        sequences=np.concatenate([ids, tokens], axis=1),
        tokens=tokens,
        num_new=np.asarray(state.num_new),
        prompt_lengths=np.repeat(prompts.lengths, num_samples),
        scores=None if state.scores is None else state.scores[:, :step],
        cache=state.cache if with_cache else None,
    )


def _num_new(time: int, max_length: int | None, max_new_tokens: int | None) -> int:
    if (max_length is None) == (max_new_tokens is None):
        raise ValueError("give either max_length or max_new_tokens")
    if max_new_tokens is not None:
        _check_counts(max_new_tokens=max_new_tokens)
        return max_new_tokens
    if max_length <= time:
        raise ValueError(f"max_length must exceed the prompt's {time} columns; got {max_length}")
    return max_length - time


def _sampling(
    temperature: float | None, top_k: int, top_p: float, min_p: float, repetition_penalty: float
) -> Sampling:
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0; got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1; got {top_p}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be in 0 ... 1; got {min_p}")
    if not repetition_penalty > 0:
        raise ValueError(f"repetition_penalty must be above 0; got {repetition_penalty}")
    if temperature is None:
        temperature = 1.0 if top_k > 1 or top_p < 1 or min_p > 0 else 0.0
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0; got {temperature}")
    draws = temperature > 0 and top_k != 1
    return Sampling(
        temperature=jnp.float32(temperature) if draws else None,
        top_p=jnp.float32(top_p) if draws and top_p < 1 else None,
        min_p=jnp.float32(min_p) if draws and min_p > 0 else None,
        repetition_penalty=jnp.float32(repetition_penalty) if repetition_penalty != 1 else None,
    )


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1; got {count}")


def _ids(token_id: int | Sequence[int] | None) -> tuple[int, ...]:
    if token_id is None:
        return ()
    return tuple(int(i) for i in np.atleast_1d(np.asarray(token_id)))


def _keys(key: Array | None, batch: int, num_samples: int, *, needed: bool) -> Array:
    """A key per row and sample, (b · num_samples,)."""
    if key is None:
        if needed:
            raise ValueError("key must be given to draw tokens (temperature above 0); got None")
        key = jax.random.key(0)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    fold = jax.vmap(jax.random.fold_in)
    if key.ndim == 0:
        key = fold(jnp.broadcast_to(key, (batch,)), jnp.arange(batch))
    if key.shape != (batch,):
        raise ValueError(f"key must be one key or {batch}, one per prompt; got {key.shape}")
    samples = jnp.tile(jnp.arange(num_samples), batch)
    return fold(jnp.repeat(key, num_samples, axis=0), samples)


def _teacher(
    teacher_tokens: np.ndarray | None, batch: int, num_samples: int, num_new: int
) -> Int[Array, "b n"] | None:
    if teacher_tokens is None:
        return None
    given = np.asarray(teacher_tokens)
    if given.ndim != 2 or given.shape[0] != batch:
        raise ValueError(f"teacher_tokens must have shape ({batch}, m); got {given.shape}")
    tokens = np.full((batch, num_new), -1, np.int32)
    columns = min(given.shape[1], num_new)
    tokens[:, :columns] = given[:, :columns]
    return jnp.asarray(np.repeat(tokens, num_samples, axis=0))


def _seen(prompts: Prompts, num_samples: int, vocab: int) -> Array:
    seen = np.zeros((len(prompts.lengths), vocab), bool)
    for row in range(len(seen)):
        seen[row, prompts.real_ids(row)] = True
    return jnp.asarray(np.repeat(seen, num_samples, axis=0))


def _check_cache(cache: ModelCache, prompts: Prompts, num_new: int) -> None:
    batch = prompts.ids.shape[0]
    if cache.num_tokens.shape != (batch,):
        raise ValueError(
            f"cache must have a row per prompt, {batch}; got {cache.num_tokens.shape[0]} "
            "(fork_cache repeats rows)"
        )
    needed = int(np.max(np.asarray(cache.num_tokens) + prompts.lengths)) + num_new - 1
    for layer in cache.layers:
        if isinstance(layer, AttentionCache) and layer.k.shape[2] < needed:
            raise ValueError(
                f"cache must have room for {needed} tokens in its attention layers; "
                f"got {layer.k.shape[2]}"
            )
