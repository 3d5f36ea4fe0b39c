# SPDX-License-Identifier: Apache-2.0
"""How good a model is: `scoring.py` (log-likelihoods), `harness.py` (lm-eval's tasks).

`harness.py` needs the lm-eval package and is imported by nobody but its user:

import mamba_jax.evaluation.harness  # registers the model "mamba_jax"
"""

from mamba_jax.evaluation.scoring import log_likelihoods

__all__ = ["log_likelihoods"]
