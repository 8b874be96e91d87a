"""Model families as data: what a checkpoint must contain, and how each tensor is cut."""

from shardctl.models.describe import FAMILIES, KvHeads, describe, find
from shardctl.models.model import Model, ModelTensor

__all__ = ["FAMILIES", "KvHeads", "Model", "ModelTensor", "describe", "find"]
