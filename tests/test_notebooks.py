# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from top to bottom, and what they say is what comes out."""

import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent


def outputs(notebook) -> str:
    texts = [
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    return "\n".join(texts)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    text = outputs(notebook)
    for apart in re.findall(r"(?:differ by|alone:) (\d\S+e-\d+)", text):
        assert float(apart) < 1e-5, text
    start, end = map(float, re.search(r"byte: (\S+) at the start, (\S+) at the end", text).groups())
    assert start > 7 and end < 3.7, text
