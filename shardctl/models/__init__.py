"""Model families as data: what a checkpoint must contain, and how each tensor is cut."""

from shardctl.models.config import Config
from shardctl.models.counting import parameters
from shardctl.models.describe import KvHeads, describe, find, model_for
from shardctl.models.families import FAMILIES
from shardctl.models.flat_parameters import refuse_flat
from shardctl.models.model import Model, ModelTensor
from shardctl.models.name_pattern import kinds
from shardctl.models.quantisation import quantisation_config
from shardctl.models.rule_file import RuleFile, load_rules
from shardctl.models.rule_table import RuleRow, rule_table

__all__ = [
    "FAMILIES",
    "Config",
    "KvHeads",
    "Model",
    "ModelTensor",
    "RuleFile",
    "RuleRow",
    "describe",
    "find",
    "kinds",
    "load_rules",
    "model_for",
    "parameters",
    "quantisation_config",
    "refuse_flat",
    "rule_table",
]
