# SPDX-License-Identifier: Apache-2.0
"""How arrays are laid out over a mesh, and the only place that talks about meshes."""
