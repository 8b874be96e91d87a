"""The forward pass: whether the model that the shards form computes what the source computes.

What the verbs call (all on checkpoints that are already open):

    lens(manifest, source, model=None) -> Lens          # a lazy state dict, for `from_pretrained(None, state_dict=...)`
    forward(candidate, source, options) -> ForwardResult

with `candidate: Candidate` (manifest, reader, model, mesh, stages, holders), `source: Original` (manifest in STORED
names, reader, config, folder for the tokenizer) and `options: ForwardOptions`.
"""

from __future__ import annotations

from shardctl.verify.forward.lens import FusedTensor, LazyTensor, Lens, StoredTensor, lens

__all__ = ["FusedTensor", "LazyTensor", "Lens", "StoredTensor", "lens"]
