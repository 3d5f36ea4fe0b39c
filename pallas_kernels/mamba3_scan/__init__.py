# SPDX-License-Identifier: Apache-2.0
"""`mamba3_scan`: the Mamba-3 recurrence, SISO and MIMO, over a sequence."""
