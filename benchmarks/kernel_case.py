# SPDX-License-Identifier: Apache-2.0
"""One kernel configuration that `kernels_check` compiles, and what it may cost."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A function with one Mosaic GPU kernel, its arguments and budgets.

    Attributes:
      name: For the report.
      function: Takes arrays like `arguments`.
      arguments: (shape, dtype) of each array, or None.
      spill_bytes: Most bytes of registers that may be spilled.
      tensor_cores: Whether the kernel must contain wgmma instructions.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple
    spill_bytes: int = 0
    tensor_cores: bool = True
