# SPDX-License-Identifier: Apache-2.0
"""One token of the Mamba-1 and Mamba-2 recurrences."""
