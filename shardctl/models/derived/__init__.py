"""Derives how an architecture without a table is cut: from transformers' plans, else from names, shapes and config.

What is derived is never taken for a fact: a model made here carries its `RuleDerivation`, which says of each rule where
it is from and what stays whole because it is not known. `verify --forward` and `reshard --prove` prove it.
"""

from shardctl.models.derived.derivation import DerivedRule, RuleDerivation, UncutTensors
from shardctl.models.derived.deriving import can_divide, derive_model
from shardctl.models.derived.rule_text import format_rule_file

__all__ = ["DerivedRule", "RuleDerivation", "UncutTensors", "can_divide", "derive_model", "format_rule_file"]
