# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints in and out, against golden models of other implementations."""

import json
import shutil
import subprocess
import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from mamba_jax import MambaConfig, MambaLMHeadModel, generate
from mamba_jax.checkpoint import safetensors_file
from mamba_jax.checkpoint.__main__ import main as convert
from mamba_jax.checkpoint.files import local_files
from mamba_jax.checkpoint.packing import file_tensors
from mamba_jax.checkpoint.pretrained import PretrainedError, from_pretrained, save_pretrained
from mamba_jax.checkpoint.tensor_files import open_tensors
from mamba_jax.partitioning.mesh import make_mesh
from tests.golden import DATA, fill
from tests.mamba_jax.models import CONFIGS
from tests.tolerances import LOGITS, assert_close

GOLDEN = sorted(path.name for path in [*DATA.glob("lm_*"), *DATA.glob("hf_*")])
GRADIENT = 1e-4  # the golden README's bound for whole models
ATTENTION = {"num_heads": 4, "causal": True, "rotary_emb_dim": 4, "d_conv": 4} | {
    "qkv_proj_bias": False,
    "out_proj_bias": False,
}


@jax.jit
def run(model, ids):
    return model(ids)


def tensors(directory) -> dict:
    return {n: t.read() for n, t in open_tensors(local_files(directory).weights).items()}


def save(directory, values: dict, name="model.safetensors"):
    entries = {n: (v.shape, v.dtype, lambda v=v: v) for n, v in values.items()}
    safetensors_file.write(directory / name, entries)


@pytest.fixture
def copy(tmp_path):
    """Copies a golden folder as safetensors, to be changed."""

    def make(name: str):
        directory = tmp_path / name
        directory.mkdir()
        shutil.copyfile(DATA / name / "config.json", directory / "config.json")
        save(directory, {n: np.array(v) for n, v in tensors(DATA / name).items()})
        return directory

    return make


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_models(name):
    """Logits, loss, every gradient under its name in the file, and greedy continuations."""
    expected = dict(np.load(DATA / name / "expected.npz"))
    model = from_pretrained(DATA / name)
    ids = expected["input_ids"].astype(np.int32)
    graph, params = nnx.split(model)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss_of(params):
        logits = nnx.merge(graph, params)(ids)
        logp = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1)), logits

    (loss, logits), grads = loss_of(params)
    assert_close("logits", logits, expected["out.logits"], LOGITS)
    assert abs(float(loss) / float(expected["out.loss"]) - 1) <= 1e-5
    tree = nnx.to_pure_dict(nnx.state(nnx.merge(graph, grads), nnx.Param))

    def gradient(path, layer):
        value = tree
        for key in path:
            value = value[key]
        return np.asarray(value if layer is None else value[layer])

    norms = json.loads(str(expected["grad_norms_json"]))
    prefix = "backbone.embeddings" if name.startswith("hf") else "backbone.embedding"
    found = {
        t.name.replace("backbone.embedding", prefix): t.assemble(gradient)
        for t in file_tensors(model)
    }
    assert found.keys() == norms.keys()
    for key, value in found.items():
        if f"grad.{key}" in expected:
            assert_close(key, value, expected[f"grad.{key}"], GRADIENT)
        assert abs(np.linalg.norm(value) - norms[key]) <= GRADIENT * norms[key] + 1e-12, key
    prompt_len = int(expected["prompt_len"])
    greedy = generate(
        model,
        expected["out.greedy_ids"][:, :prompt_len],
        max_length=expected["out.greedy_ids"].shape[1],
        return_scores=True,
    )
    np.testing.assert_array_equal(greedy.sequences, expected["out.greedy_ids"])
    if "out.greedy_step_logits" in expected:
        assert_close("scores", greedy.scores, expected["out.greedy_step_logits"], LOGITS)


G_IDS = ((np.arange(14).reshape(2, 7) * 5 + 3) % 29).astype(np.int32)
G10 = MambaConfig(
    d_model=16,
    d_intermediate=20,
    n_layer=3,
    vocab_size=29,
    ssm_cfg={"layer": "Mamba2", "headdim": 4, "d_state": 6, "ngroups": 2},
    attn_layer_idx=(1,),
    attn_cfg=ATTENTION,
)
G11 = MambaConfig(d_model=16, n_layer=2, vocab_size=29, ssm_cfg={"d_state": 4})


def filled(config, order: str, directory) -> MambaLMHeadModel:
    """The specification's fill: parameter i in state-dict order holds 0.5 · h(shape, 100 + i)."""
    abstract = nnx.eval_shape(lambda: MambaLMHeadModel(config, rngs=nnx.Rngs(0)))
    shapes = {tensor.name: tensor.shape for tensor in file_tensors(abstract)}
    names = [n for n in open_tensors(local_files(DATA / order).weights) if n != "lm_head.weight"]
    assert set(names) == set(shapes)
    values = {n: 0.5 * fill(shapes[n], 100 + i) for i, n in enumerate(names)}
    save(directory, values)
    return from_pretrained(directory, config=config)


def summary(x) -> list[float]:
    x = np.asarray(x, np.float64)
    flat = x.reshape(-1)
    return [x.sum(), np.abs(x).sum(), flat[0], flat[flat.size // 2], flat[-1]]


def test_g10_a_hybrid_with_mlp(tmp_path):
    model = filled(G10, "lm_hybrid_mamba2_attn", tmp_path)
    assert sum(np.prod(t.shape) for t in file_tensors(model)) == 25_088
    wanted = [-9.942297, 137.030754, 0.1711176, 0.4214767, 0.2507088]
    np.testing.assert_allclose(summary(run(model, G_IDS)), wanted, rtol=1e-4, atol=1e-5)


def test_g11_logits_greedy_text_and_repetition_penalty(tmp_path):
    model = filled(G11, "lm_mamba1", tmp_path)
    wanted = [-1.725421, 129.680475, 0.0894233, 0.1204246, 0.2498692]
    np.testing.assert_allclose(summary(run(model, G_IDS)), wanted, rtol=1e-4, atol=1e-5)
    greedy = generate(model, G_IDS, max_length=12)
    assert greedy.tokens.tolist() == [[5, 16, 9, 25, 24], [2, 12, 2, 12, 2]]
    penalized = generate(model, G_IDS, max_length=12, repetition_penalty=1.3)
    assert penalized.tokens[1].tolist() == [2, 12, 18, 24, 25]


@pytest.mark.parametrize("name", GOLDEN)
def test_export_import_export_is_byte_equal(name, tmp_path):
    """And the exported tensors are those of the file, under their names."""
    model = from_pretrained(DATA / name)
    formats = ["state-spaces"] if name.startswith("lm_") else ["hf"]
    if name in ("lm_mamba1", "lm_mamba2", "hf_mamba", "hf_mamba2"):
        formats = ["state-spaces", "hf"]
    for format in formats:
        once, twice = tmp_path / f"{format}-1", tmp_path / f"{format}-2"
        model.save_pretrained(once, format=format)
        from_pretrained(once).save_pretrained(twice, format=format)
        assert sorted(p.name for p in once.iterdir()) == ["config.json", "model.safetensors"]
        for file in ("config.json", "model.safetensors"):
            assert (once / file).read_bytes() == (twice / file).read_bytes(), file
        ours, theirs = tensors(once), tensors(DATA / name)
        if (format == "hf") == name.startswith("hf"):
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[key], theirs[key]) for key in ours)
            kept = json.loads((once / "config.json").read_text())
            for key, value in json.loads((DATA / name / "config.json").read_text()).items():
                if key in kept and key != "time_step_limit":
                    assert kept[key] == value, key


VARIANTS = {
    "mamba2-mlp-branch-bias": {"layer": "Mamba2", "headdim": 4, "d_ssm": 24, "bias": True}
    | {"ngroups": 2, "d_state": 6, "D_has_hdim": True, "rmsnorm": False},
    "mamba1-bias": {"layer": "Mamba1", "d_state": 4, "bias": True, "conv_bias": False},
}


@pytest.mark.parametrize("name", [*VARIANTS, "attention", "layer-norm-untied"])
def test_uncommon_layers_survive(name, tmp_path):
    options = {"d_model": 16, "n_layer": 2, "vocab_size": 30, "ssm_cfg": VARIANTS.get(name, {})}
    if name == "attention":
        mlp = {"num_heads": 4, "mlp_dim": 250, "causal": True, "qkv_proj_bias": True}
        options |= {"attn_layer_idx": (0, 1), "attn_cfg": mlp, "d_intermediate": 20}
    if name == "layer-norm-untied":
        options |= {"rms_norm": False, "tie_embeddings": False}
    config = MambaConfig(**options)
    model = MambaLMHeadModel(config, rngs=nnx.Rngs(0))
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path)
    assert loaded.config == config
    before, after = (jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, loaded))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_packed_order_of_the_mlp_halves(tmp_path):
    """Mamba-2 reads [mlp | ssm] columns in out_proj, attention [heads | mlp]."""
    ssm = VARIANTS["mamba2-mlp-branch-bias"]
    attention = {"num_heads": 2, "head_dim": 4, "mlp_dim": 256, "causal": True}
    config = MambaConfig(
        d_model=16, n_layer=2, vocab_size=8, ssm_cfg=ssm, attn_layer_idx=(1,), attn_cfg=attention
    )
    model = MambaLMHeadModel(config, rngs=nnx.Rngs(0))
    save_pretrained(model, tmp_path)
    stored = tensors(tmp_path)
    first, second = (model.runs[i].mixer for i in (0, 1))
    packed = stored["backbone.layers.0.mixer.out_proj.weight"]
    np.testing.assert_array_equal(packed[:, :8], first.out_proj_mlp.kernel[0].T)
    np.testing.assert_array_equal(packed[:, 8:], first.out_proj.kernel[0].T)
    packed = stored["backbone.layers.1.mixer.out_proj.weight"]
    np.testing.assert_array_equal(packed[:, :8], second.out_proj.kernel[0].T)
    np.testing.assert_array_equal(packed[:, 8:], second.out_proj_mlp.kernel[0].T)
    assert stored["backbone.layers.0.mixer.D"].shape == (24,)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
def test_low_precision_files(copy, dtype):
    directory = copy("lm_mamba2")
    values = {n: v.astype(dtype) for n, v in tensors(directory).items()}
    save(directory, values)
    model = from_pretrained(directory, dtype=jnp.bfloat16)
    assert model.embedding.weight.dtype == jnp.bfloat16
    assert model.runs[0].mixer.A_log.dtype == model.runs[0].mixer.dt_bias.dtype == jnp.float32
    masters = from_pretrained(directory, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    assert masters.embedding.weight.dtype == jnp.float32 and masters.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        masters.embedding.weight, values["backbone.embedding.weight"].astype(np.float32)
    )


def test_names_heads_and_padding_that_files_vary_in(copy):
    """`embeddings` in an original's file, no tied head, rows padded to another multiple."""
    directory = copy("lm_mamba2")
    values = {n: np.array(v) for n, v in tensors(directory).items()}
    head = values.pop("lm_head.weight")
    embedding = values.pop("backbone.embedding.weight")
    wider = np.concatenate([embedding, np.zeros((8, 32), np.float32)])
    save(directory, values | {"backbone.embeddings.weight": wider})
    model = from_pretrained(directory)
    assert (model.config.vocab_size, model.config.padded_vocab_size) == (120, 128)
    np.testing.assert_array_equal(model.embedding.weight, wider)
    save(directory, values | {"backbone.embedding.weight": embedding, "lm_head.weight": head + 1})
    with pytest.raises(PretrainedError, match="differs from the embedding"):
        from_pretrained(directory)


def test_shards_of_either_kind(copy):
    directory = copy("lm_mamba1")
    values = sorted(tensors(directory).items())
    whole = from_pretrained(directory)
    parts = {"model-1.safetensors": dict(values[::2]), "model-2.safetensors": dict(values[1::2])}
    for name, part in parts.items():
        save(directory, part, name)
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {k: n for n, p in parts.items() for k in p}}))
    np.testing.assert_array_equal(run(from_pretrained(directory), G_IDS), run(whole, G_IDS))
    index.write_text(json.dumps({"weight_map": {"x": "../model-1.safetensors"}}))
    with pytest.raises(PretrainedError, match="names of files beside it"):
        from_pretrained(directory)
    index.write_text(json.dumps({"weight_map": {"x": "model-3.safetensors"}}))
    with pytest.raises(PretrainedError, match=r"no file .*model-3\.safetensors"):
        from_pretrained(directory)


def test_every_mismatch_is_listed(copy):
    directory = copy("lm_mamba2")
    values = {n: np.array(v) for n, v in tensors(directory).items()}
    del values["backbone.norm_f.weight"]
    values["backbone.layers.7.norm.weight"] = np.zeros(3, np.float32)
    values["backbone.layers.0.mixer.A_log"] = np.zeros(5, np.float32)
    values["backbone.layers.1.mixer.D"] = np.zeros(4, np.int32)
    save(directory, values)
    with pytest.raises(PretrainedError) as caught:
        from_pretrained(directory)
    for line in (
        "missing backbone.norm_f.weight [32]",
        "unexpected backbone.layers.7.norm.weight [3]",
        "backbone.layers.0.mixer.A_log: wanted [4], got [5]",
        "backbone.layers.1.mixer.D: wanted floats, got int32",
    ):
        assert line in str(caught.value)


def test_damaged_and_foreign_files(copy, tmp_path):
    directory = copy("lm_mamba1")
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    for content, message in (
        (whole[: len(whole) // 2], "cut short or damaged"),
        (b"\xff" * 64, "not a safetensors file"),
        (b"", "not a safetensors file"),
        (whole.replace(b'"F32"', b'"Q32"', 1), "unknown dtype 'Q32'"),
    ):
        weights.write_bytes(content)
        with pytest.raises(PretrainedError, match=message):
            from_pretrained(directory)
    weights.write_bytes(whole)
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "wanted a JSON object"),
        ('{"d_modle": 3}', "did you mean 'd_model'"),
        ('{"model_type": "llama"}', "model_type must be one of"),
        ('{"model_type": "mamba"}', "lacks 'hidden_size'"),
    ):
        (directory / "config.json").write_text(text)
        with pytest.raises(PretrainedError, match=message):
            from_pretrained(directory)
    (directory / "config.json").unlink()
    with pytest.raises(PretrainedError, match=r"has no config\.json"):
        from_pretrained(directory)
    with pytest.raises(PretrainedError, match="holds no weights"):
        from_pretrained(tmp_path)
    with pytest.raises(PretrainedError, match="no directory /nowhere/at/all"):
        from_pretrained("/nowhere/at/all")


def test_what_a_format_cannot_express_is_refused(tmp_path):
    falcon = MambaConfig(d_model=16, n_layer=1, vocab_size=8, ssm_cfg={"bcdt_norm_eps": 1e-6})
    older = {"layer": "Mamba3", "headdim": 8, "d_state": 8, "A_activation": "softplus"}
    cases = [
        (falcon, "state-spaces", "cannot express bcdt_norm_eps"),
        (MambaConfig(d_model=16, n_layer=1, vocab_size=8, ssm_cfg=older), "state-spaces", "A_act"),
        (CONFIGS["hybrid"], "hf", "cannot express attention layers, d_intermediate"),
        (CONFIGS["Mamba3"], "hf", "cannot express Mamba-3"),
        (CONFIGS["Mamba1"], "gguf", "format must be one of state-spaces, hf; got 'gguf'"),
    ]
    for config, format, message in cases:
        model = MambaLMHeadModel(config, rngs=nnx.Rngs(0))
        with pytest.raises(PretrainedError, match=message):
            save_pretrained(model, tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


def test_loading_onto_a_mesh_places_the_shards_and_writes_the_same_text():
    mesh = make_mesh(data=1, fsdp=2, tensor=2, devices=jax.devices()[:4])
    model = from_pretrained(DATA / "lm_mamba2", mesh=mesh)
    alone = from_pretrained(DATA / "lm_mamba2")
    kernel = model.runs[0].mixer.in_proj.x.kernel[...]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4
    for a, b in zip(
        jax.tree.leaves(nnx.state(model, nnx.Param)),
        jax.tree.leaves(nnx.state(alone, nnx.Param)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    expected = np.load(DATA / "lm_mamba2" / "expected.npz")["out.greedy_ids"]
    with jax.set_mesh(mesh):
        text = generate(model, expected[:, :9], max_length=expected.shape[1])
    np.testing.assert_array_equal(text.sequences, expected)


def test_the_safetensors_library_reads_and_writes_the_same(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    values = {"b": fill((3, 4), 1), "a": fill((2,), 2).astype(np.float16), "c": np.arange(3)}
    save(tmp_path, values)
    read = library.load_file(tmp_path / "model.safetensors")
    library.save_file(values, tmp_path / "theirs.safetensors")
    ours = safetensors_file.open_tensors(tmp_path / "theirs.safetensors")
    for name, value in values.items():
        np.testing.assert_array_equal(read[name], value)
        np.testing.assert_array_equal(ours[name].read(), value)


def test_hub_ids(monkeypatch, tmp_path):
    """A stand-in for the hub: only what is needed is fetched; offline is one line."""
    asked = {}

    def offline(*arguments, **options):
        raise OSError("no\nnetwork")

    hub = types.ModuleType("huggingface_hub")
    hub.list_repo_files = lambda hub_id, revision: ["config.json", "pytorch_model.bin", "a.md"]
    hub.snapshot_download = lambda hub_id, **options: asked.update(options) or DATA / "lm_mamba1"
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert from_pretrained("some/model", revision="main").config.d_model == 32
    assert asked == {"revision": "main", "allow_patterns": ["config.json", "pytorch_model.bin"]}
    hub.list_repo_files = hub.snapshot_download = offline
    with pytest.raises(PretrainedError, match=r"no directory some/model, and .*: no network") as e:
        from_pretrained("some/model")
    assert "\n" not in str(e.value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PretrainedError, match=r"pip install 'mamba_jax\[hf\]'"):
        from_pretrained("some/model")


def test_convert_command(tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(DATA / "lm_mamba2", source)
    (source / "tokenizer.json").write_text("{}")
    convert([str(source), str(tmp_path / "hf"), "--format", "hf", "--dtype", "bfloat16"])
    assert "hf, bfloat16" in capsys.readouterr().out
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "mamba2"
    stored = tensors(tmp_path / "hf")
    assert stored["backbone.embeddings.weight"].dtype == ml_dtypes.bfloat16
    with pytest.raises(PretrainedError, match="another directory"):
        convert([str(source), str(source)])


def test_mistakes_on_the_command_line_are_one_line(tmp_path):
    for module in ("checkpoint", "generation"):
        command = [sys.executable, "-m", f"mamba_jax.{module}", str(tmp_path / "none"), "x"]
        if module == "generation":
            command = [*command[:-1], "--tokenizer", "bytes"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=DATA.parents[2])
        assert done.returncode == 2
        assert done.stderr.startswith("error: no directory") and done.stderr.count("\n") == 1


def _tiny_hf(kind):
    """A random tiny model of transformers, its config and a function for its logits."""
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers", reason="needs torch and transformers")
    shared = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 64}
    if kind == "Mamba2":
        shared |= {"num_heads": 8, "head_dim": 8, "n_groups": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shared)
    return torch, getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2", "FalconMamba"])
def test_transformers_live(kind, tmp_path):
    """Loads what transformers writes, gives its logits, and it loads what we write."""
    torch, theirs = _tiny_hf(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(tmp_path / "theirs")
    ids = np.arange(20, dtype=np.int32).reshape(2, 10) * 3 % 64
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    assert_close("logits", run(ours, ids), wanted, 1e-5)
    ours.save_pretrained(tmp_path / "ours", format="hf")
    again = type(theirs).from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        back = again(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    np.testing.assert_array_equal(back, wanted)
