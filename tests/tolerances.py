# SPDX-License-Identifier: Apache-2.0
"""Every tolerance of the test suite and the two measures of error; never widened to pass."""

import numpy as np

# fp32 op against a float64 golden vector, max|a-b|/max|b| (twenty times what a plain fp32
# recurrence loses); a golden case with a stated looser bound carries its own.
GOLDEN_OUT = 2e-5
GOLDEN_GRAD = 5e-5
# fp32 op against the float64 reference, ||a-b||/||b||.
FP32_OUT = 2e-6
FP32_GRAD = 1e-5
# bf16 op against the fp32 reference on the same bf16-rounded inputs, ||a-b||/||b||.
BF16_OUT = 6e-3
BF16_GRAD = 1e-2
# Logits of whole models in fp32, max|a-b|/max|b|.
LOGITS = 2e-5


def max_error(got, wanted) -> float:
    """max|got - wanted| / max|wanted|; absolute where wanted is zero everywhere."""
    got, wanted = _wide(got), _wide(wanted)
    assert got.shape == wanted.shape, f"shape {got.shape}, wanted {wanted.shape}"
    scale = np.max(np.abs(wanted), initial=0.0)
    return float(np.max(np.abs(got - wanted), initial=0.0) / (scale if scale > 1e-30 else 1.0))


def norm_error(got, wanted) -> float:
    """||got - wanted|| / ||wanted||; absolute where wanted is zero everywhere."""
    got, wanted = _wide(got), _wide(wanted)
    assert got.shape == wanted.shape, f"shape {got.shape}, wanted {wanted.shape}"
    scale = np.linalg.norm(wanted)
    return float(np.linalg.norm(got - wanted) / (scale if scale > 1e-30 else 1.0))


def assert_close(name: str, got, wanted, tolerance: float, measure=max_error) -> None:
    """Fails with the name of the array when its error exceeds the tolerance (NaN fails too)."""
    error = measure(got, wanted)
    assert error <= tolerance, f"{name}: error {error:.3g} exceeds {tolerance:.3g}"


def _wide(array) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
