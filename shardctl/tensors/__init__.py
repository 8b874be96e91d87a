"""Describes tensors without their values: boxes, meshes, placement, manifests, copy plans, and the digest."""
