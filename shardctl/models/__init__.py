"""Describes model families as data: the tensors of a checkpoint, and how each one is cut."""

from shardctl.models.counting import count_parameters
from shardctl.models.describe import (
    KvHeads,
    choose_model,
    describe_model,
    find_family,
    list_assumed_values,
    name_usual_class,
)
from shardctl.models.families import load_families
from shardctl.models.names.binding import find_canonical_name, find_weight_name
from shardctl.models.names.flat_parameters import refuse_flat_parameters
from shardctl.models.quantization import (
    complete_config,
    drop_quantization_config,
    drop_torchao_metadata,
    find_quantization_config,
    list_block_encodings,
)
from shardctl.models.rules.rule_file import RuleFile, load_rules
from shardctl.models.rules.rule_table import RuleRow, build_rule_table
from shardctl.models.rules.untabled import NEEDING_TABLE, UntabledModel, build_untabled_model, order_ties
from shardctl.models.submodels.multimodal import has_text_half
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.model import Model, ModelTensor
from shardctl.models.tables.name_pattern import list_name_patterns

__all__ = [
    "NEEDING_TABLE",
    "KvHeads",
    "Model",
    "ModelConfig",
    "ModelTensor",
    "RuleFile",
    "RuleRow",
    "UntabledModel",
    "build_rule_table",
    "build_untabled_model",
    "choose_model",
    "complete_config",
    "count_parameters",
    "describe_model",
    "drop_quantization_config",
    "drop_torchao_metadata",
    "find_canonical_name",
    "find_family",
    "find_quantization_config",
    "find_weight_name",
    "has_text_half",
    "list_assumed_values",
    "list_block_encodings",
    "list_name_patterns",
    "load_families",
    "load_rules",
    "name_usual_class",
    "order_ties",
    "refuse_flat_parameters",
]
