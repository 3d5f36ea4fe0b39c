# SPDX-License-Identifier: Apache-2.0
"""Training: `python -m train PRESET`; read train.py first, it is a straight line."""

import importlib.util

_NEEDED = ("grain", "optax", "orbax", "tyro", "rich", "matplotlib", "tokenizers")
if _missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
    raise ImportError(
        f"train needs {', '.join(_missing)}: pip install 'mamba_jax[train]' "
        "(make demo and make test install what they need)"
    )
