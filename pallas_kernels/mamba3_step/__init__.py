# SPDX-License-Identifier: Apache-2.0
"""`mamba3_step`: the Mamba-3 recurrence, SISO and MIMO, for one token."""
