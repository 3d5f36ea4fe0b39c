# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods against the logits of a whole forward pass, and what lm-eval asks for."""

import types

import jax
import numpy as np
import pytest
from flax import nnx

from mamba_jax import MambaConfig, MambaLMHeadModel
from mamba_jax.evaluation import log_likelihoods
from mamba_jax.generation.text import ByteTokenizer
from tests.mamba_jax.models import ids, model


def test_continuations_of_any_length_in_pieces():
    lm = model("Mamba2")
    rows = [np.asarray(ids(1, length, seed=length))[0].tolist() for length in (3, 40, 17, 2, 9)]
    pairs = [(row[:split], row[split:]) for row, split in zip(rows, (1, 30, 5, 2, 8), strict=True)]
    greedy = jax.jit(lambda lm, x: lm(x))
    padded = np.zeros((1, 40), np.int32)
    wanted = []
    for context, continuation in pairs:
        whole = [*context, *continuation]
        padded[0, : len(whole)] = whole
        logits = np.asarray(greedy(lm, padded), np.float64)[0, :, :61]
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        places = np.arange(len(context) - 1, len(whole) - 1)
        nats = logp[places, continuation].sum() if continuation else 0.0
        wanted.append((nats, bool((logits[places].argmax(-1) == continuation).all())))
    found = log_likelihoods(lm, pairs, batch_size=2, chunk=16)
    np.testing.assert_allclose([f[0] for f in found], [w[0] for w in wanted], rtol=2e-5, atol=1e-5)
    assert [f[1] for f in found] == [w[1] for w in wanted]
    assert found[3] == (0.0, True)


def test_mistakes_are_named():
    lm = model("Mamba2")
    with pytest.raises(ValueError, match="pair 0: the context must hold"):
        log_likelihoods(lm, [([], [1])])
    with pytest.raises(ValueError, match=r"pair 1: ids must be in 0 \.\.\. 60"):
        log_likelihoods(lm, [([1], [2]), ([1], [61])])


@pytest.fixture(scope="module")
def harness_model():
    harness = pytest.importorskip("mamba_jax.evaluation.harness", reason="needs lm-eval")
    config = MambaConfig(d_model=16, n_layer=1, vocab_size=257, ssm_cfg={"layer": "Mamba1"})
    lm = MambaLMHeadModel(config, rngs=nnx.Rngs(0))
    return harness.HarnessModel(lm, tokenizer="bytes", batch_size=2, chunk=32, max_gen_toks=6)


def request(*arguments):
    return types.SimpleNamespace(args=arguments)


def test_harness_methods(harness_model):
    lm, end = harness_model.model, ByteTokenizer.end_id
    found = harness_model.loglikelihood(
        [request("ab", "cd"), request("", "xyz")], disable_tqdm=True
    )
    wanted = log_likelihoods(
        lm, [(list(b"ab"), list(b"cd")), ([end], list(b"xyz"))], batch_size=2, chunk=32
    )
    assert found == wanted
    text = "a text " * 20
    rolling = harness_model.loglikelihood_rolling([request(text)])
    assert (
        rolling[0]
        == log_likelihoods(lm, [([end], list(text.encode()))], batch_size=2, chunk=32)[0][0]
    )
    written = harness_model.generate_until(
        [request("ab", {"until": ["\n"]}), request("c", {"until": ["\n"], "max_gen_toks": 3})]
    )
    assert len(written) == 2 and all("\n" not in text for text in written)


def test_a_local_task_runs_through_lm_eval(harness_model, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    tasks = pytest.importorskip("lm_eval.tasks")
    data = tmp_path / "data.jsonl"
    data.write_text('{"q": "ab", "a": 0}\n{"q": "xy", "a": 1}\n')
    (tmp_path / "task.yaml").write_text(
        f"task: letters\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        "output_type: multiple_choice\ntest_split: test\ndoc_to_text: q\n"
        'doc_to_target: a\ndoc_to_choice: ["c", "z"]\n'
        "metric_list:\n  - metric: acc\n"
    )
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(
        harness_model, tasks=["letters"], task_manager=manager, bootstrap_iters=0
    )
    assert 0 <= results["results"]["letters"]["acc,none"] <= 1
