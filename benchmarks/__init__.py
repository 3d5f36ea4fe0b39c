# SPDX-License-Identifier: Apache-2.0
"""Side-by-side measurements; results lie in `results/` as JSON."""
