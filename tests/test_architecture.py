# SPDX-License-Identifier: Apache-2.0
"""The house rules that a program can check: imports, sizes, documentation, exported names."""

import ast
import re
from pathlib import Path

import pytest

import mamba_jax
import pallas_kernels

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "mamba_jax", "train")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
OPS = sorted(path.parent for path in (ROOT / "pallas_kernels").glob("*/api.py"))

# file → reason; may only shrink.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {
    "pallas_kernels/selective_scan/mosaic_backward.py:scan": "a kernel's body and its launch",
    "pallas_kernels/ssd/mosaic_backward.py:backward": "a kernel's body and its launch",
    "pallas_kernels/ssd/mosaic_backward.py:ssd_backward": "every gradient of a chunk at once",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def functions(path: Path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_kernel(path: Path) -> bool:
    return path.name.startswith(("mosaic", "triton"))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_run_one_way(path):
    """train → mamba_jax → pallas_kernels, with one door to the kernels and one to the meshes."""
    package = relative(path).split("/")[0]
    above = PACKAGES[PACKAGES.index(package) + 1 :]
    for module in imported_modules(path):
        root = module.split(".")[0]
        assert root not in above, f"{relative(path)} imports {module} from a layer above it"
        assert root not in ("tests", "benchmarks", "notebooks"), f"{relative(path)}: {module}"
        assert not (package == "pallas_kernels" and root == "flax"), "flax under pallas_kernels"
        assert not module.startswith("jax._src"), f"{relative(path)} imports {module}"
        if package == "mamba_jax" and root == "pallas_kernels":
            # sequence.py is the part of sharded_ops.py that cuts time.
            assert path.parent.name == "partitioning", relative(path)
            assert path.name in ("sharded_ops.py", "sequence.py"), relative(path)
    if "shard_map" in path.read_text(encoding="utf-8"):
        assert "partitioning" in path.parts or package == "pallas_kernels", relative(path)


def test_configs_and_array_types_import_nothing_of_ours():
    for name in ("layer_config.py", "array_types.py"):
        modules = imported_modules(ROOT / "mamba_jax" / name)
        assert not {m for m in modules if m.split(".")[0] in PACKAGES}
    ours = {m for m in imported_modules(ROOT / "mamba_jax/config.py") if m.startswith("mamba_jax")}
    assert {".".join(m.split(".")[:2]) for m in ours} == {"mamba_jax.layer_config"}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_and_functions_stay_short(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    if relative(path) not in LONG_FILES:
        assert lines <= 400, f"{relative(path)} has {lines} lines"
    limit = 150 if is_kernel(path) else 60
    for function in functions(path):
        body = function.end_lineno - function.body[0].lineno + 1
        if ast.get_docstring(function):
            body -= function.body[0].end_lineno - function.body[0].lineno + 1
        name = f"{relative(path)}:{function.name}"
        if name not in LONG_FUNCTIONS:
            assert body <= limit, f"{name} has {body} lines"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_public_names_are_documented(path):
    module = tree(path)
    assert ast.get_docstring(module), f"{relative(path)} has no docstring"
    assert path.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{relative(path)}:{node.name} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_banned_words(path):
    assert path.name not in ("utils.py", "common.py", "misc.py", "helpers.py", "wrapper.py")
    text = path.read_text(encoding="utf-8")
    if relative(path) != "train/launch/processes.py":
        assert "os.environ" not in text, "environment variables decide nothing here"
    assert not re.search(r"except ImportError:\s*pass", text), relative(path)
    if "checkpoint" not in path.parts:
        for word in (r"\bhidden_size\b", r"\bstate_size\b"):
            assert not re.search(word, text), f"{relative(path)} says {word}"
    if path.name == "api.py":
        for function in functions(path):
            assert function.args.kwarg is None, f"{relative(path)}:{function.name} takes **kwargs"


@pytest.mark.parametrize("folder", OPS, ids=lambda folder: folder.name)
def test_every_op_folder_has_its_cast(folder):
    for name in ("__init__.py", "api.py", "reference.py", "xla.py", "shapes.py", "README.md"):
        assert (folder / name).is_file(), f"{folder.name} lacks {name}"
    tests = (ROOT / "tests" / "pallas_kernels").glob("test_*.py")
    assert any(f"pallas_kernels.{folder.name}" in t.read_text() for t in tests), folder.name


@pytest.mark.parametrize("folder", OPS, ids=lambda folder: folder.name)
def test_op_docstrings_give_shapes(folder):
    """Every array argument of a public op is documented as `name: (axes), ...`."""
    for node in tree(folder / "api.py").body:
        if not isinstance(node, ast.FunctionDef) or node.name not in pallas_kernels.__all__:
            continue
        document = ast.get_docstring(node)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            if "Array" in ast.unparse(argument.annotation or ast.Constant("")):
                pattern = rf"^\s*(?:\w+, )*{argument.arg}(?:, \w+)*: \("
                assert re.search(pattern, document, re.M), f"{node.name}: {argument.arg}"


def test_the_public_surface_is_frozen():
    """A new public name is a decision: it is added here too."""
    assert set(mamba_jax.__all__) == {
        "ColumnParallelLinear",
        "Mamba",
        "Mamba2",
        "Mamba3",
        "MambaConfig",
        "MambaLMHeadModel",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "generate",
        "init_cache",
        "make_mesh",
        "shard_model",
    }
    assert set(pallas_kernels.__all__) == {
        "Mamba3State",
        "add_layer_norm",
        "add_rms_norm",
        "causal_conv1d",
        "causal_conv1d_update",
        "explain",
        "layer_norm",
        "mamba3_scan",
        "mamba3_step",
        "rms_norm",
        "selective_scan",
        "selective_state_update",
        "seq_idx_from_cu_seqlens",
        "ssd",
    }


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_in_documents_resolve(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / target).exists(), f"{name} links to {target}"
