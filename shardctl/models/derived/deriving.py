"""Derives the model of an architecture that has no table."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.derived.cutting import GroupPartitioner, find_expert_number
from shardctl.models.derived.derivation import SHAPES, DerivedRule, RuleDerivation, TensorRule, UncutTensors
from shardctl.models.derived.head_counts import ConfigSizes
from shardctl.models.derived.library_embeddings import list_normed_embeddings
from shardctl.models.derived.library_styles import read_library_experts, read_library_styles
from shardctl.models.derived.module_groups import list_circuits
from shardctl.models.derived.stored_codes import restore_weights, spread_rules
from shardctl.models.derived.stored_modules import ModuleTree
from shardctl.models.rules.fused_orders import FusedOrders
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.name_pattern import list_name_patterns
from shardctl.models.tables.table import FSDP
from shardctl.tensors.mesh import EXPERT_AXES, EXPERT_FSDP
from shardctl.tensors.placement import AxisPartition, PartitionSection

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardctl.models.derived.library_styles import LibraryStyle
    from shardctl.models.tables.model import Model, ModelTensor
    from shardctl.tensors.mesh import Mesh

_EMBEDDINGS: Final = ("wte", "shared", "embed_in", "encoder_embed", "decoder_embed")
"""What embeddings of tokens are called whose names do not begin with one of the next."""
_EMBEDDING_STARTS: Final = ("embed_tokens", "word_embed", "tok_embed", "token_embed", "embedding", "embed_token")
_HEADS: Final = ("lm_head", "embed_out", "output_projection", "proj_out", "decoder", "output", "head")
"""What linears are called that give a score for each token."""
_ROUTERS: Final = ("gate", "router", "layer", "classifier", "shared_expert_gate")
_POSITIONS: Final = ("position", "pos_emb", "wpe", "token_type", "relative", "rotary", "indexer")
_MATRIX: Final = 2


def derive_model(config: Mapping[str, object], model: Model, *, share_kv: bool, library: bool = True) -> Model:
    """`model`, which is known by names and shapes alone, with cuts by tp and by the axes of experts.

    `share_kv` lets neighbouring tp ranks hold the same key/value head where there are fewer heads than ranks; `library`
    says whether an installed transformers is asked.
    Raises UnsupportedError for quantized weights whose shapes their arrays do not tell.
    """
    named = ModelConfig(config)
    architecture = named.architecture() or named.text("model_type", "")
    weights = restore_weights(model, config)
    cutter = GroupPartitioner(
        ModuleTree(weights.tensors.values()),
        ConfigSizes(config),
        share_kv,
        FusedOrders(config),
        read_library_styles(config, list(weights.tensors)) if library else {},
    )
    for circuit in list_circuits(cutter.tree):
        cutter.cut(circuit)
    _cut_idle_experts(cutter, weights)
    if library:
        _divide_experts(cutter, weights, read_library_experts(config, list(weights.tensors)))
    _cut_vocabularies(cutter, list_normed_embeddings(config) if library else frozenset())
    if weights is not model:
        cutter.rules = spread_rules(cutter.rules, _apply_rules(weights, cutter.rules), model, config)
    derivation = RuleDerivation(
        architecture=architecture,
        rules=_collect_rules(cutter.rules, model),
        uncut=_collect_uncut(cutter, model),
        experts=_list_expert_patterns(cutter.rules),
    )
    return replace(_apply_rules(model, cutter.rules), derivation=derivation)


def can_divide(model: Model, mesh: Mesh) -> bool:
    """Tell whether a layer has something that each axis of the mesh that needs a table divides."""
    wanted = {axis for axis in ("tp", *EXPERT_AXES) if mesh.degree(axis) > 1}
    layered = [t.spec for t in model.tensors.values() if t.spec.where[0][0] == "layer"]
    found = {axis for spec in dict.fromkeys(layered) for axis in spec.axes}
    return wanted <= found or (bool(wanted) and wanted <= {"tp", "etp"} and not found.isdisjoint(wanted))


def _cut_vocabularies(cutter: GroupPartitioner, normed: Collection[str]) -> None:
    """Cut embeddings and heads by tokens, in ceil-sized parts; embeddings called as one of `normed` stay whole."""
    for module in cutter.tree.modules.values():
        last = module.path.rpartition(".")[2]
        if not module.is_matrix or module.weight.name in cutter.rules:
            continue
        embeds = last in _EMBEDDINGS or last.startswith(_EMBEDDING_STARTS)
        inside = (part.path.rpartition(".")[2] for part in cutter.tree.within(module.path))
        if embeds and (last in normed or any("norm" in part for part in inside)):
            cutter.reasons[module.weight.name] = "its module ends with a norm, which needs the rows of all ranks"
        elif (embeds or last in _HEADS) and module.shape[0] in cutter.sizes.vocabularies:
            note = "embeddings by tokens" if embeds else "scores by tokens"
            cutter.rules[module.weight.name] = TensorRule(((AxisPartition("tp"),), ()), SHAPES, note)
            if module.bias is not None:
                cutter.rules[module.bias.name] = TensorRule(((AxisPartition("tp"),),), SHAPES, note)


def _cut_idle_experts(cutter: GroupPartitioner, model: Model) -> None:
    """Cut those tensors of experts without others that would make a circuit of them as those of the whole experts.

    No token is multiplied by them (the zero experts that transformers saves of LongCat).
    """
    known = {
        (list_name_patterns([name])[0], model.tensors[name].shape): rule
        for name, rule in cutter.rules.items()
        if rule.member is not None
    }
    for name, tensor in model.tensors.items() if known else ():
        rule = known.get((list_name_patterns([name])[0], tensor.shape))
        if rule is None or rule.member is None or name in cutter.rules:
            continue
        number = find_expert_number(name)
        if number is not None:
            cutter.rules[name] = replace(rule, member=replace(rule.member, index=number))


def _divide_experts(cutter: GroupPartitioner, model: Model, styles: Mapping[str, LibraryStyle]) -> None:
    """Divide by ep the arrays of experts of which a library says so, and whose circuit is not known."""
    for name, said in styles.items():
        shape = model.tensors[name].shape
        if name not in cutter.rules and len(shape) >= _MATRIX:
            ep = AxisPartition("ep", (PartitionSection(shape[0], noun="experts"),))
            cutter.rules[name] = TensorRule(
                ((ep,), *((),) * (len(shape) - 1)), said.source, "experts; how to cut one is not known"
            )


def _apply_rules(model: Model, rules: Mapping[str, TensorRule]) -> Model:
    """Return a model with the cuts of its rules."""
    return replace(
        model, tensors={name: _apply_rule(t, rules[name]) if name in rules else t for name, t in model.tensors.items()}
    )


def _apply_rule(tensor: ModelTensor, rule: TensorRule) -> ModelTensor:
    """Return a tensor with the cuts of its rule, and fsdp after them."""
    cuts = rule.cuts
    if cuts:
        expert = rule.member is not None or any(cut.axis in EXPERT_AXES for dim in cuts for cut in dim)
        cuts = ((*cuts[0], AxisPartition(EXPERT_FSDP) if expert else FSDP), *cuts[1:])
    return replace(tensor, spec=replace(tensor.spec, cuts=cuts, member=rule.member))


def _collect_rules(rules: Mapping[str, TensorRule], model: Model) -> tuple[DerivedRule, ...]:
    """Return the rules by pattern; where tensors of one pattern are cut differently, by name."""
    groups: dict[str, list[str]] = {}
    for name in model.tensors:
        groups.setdefault(list_name_patterns([name])[0], []).append(name)
    found: list[DerivedRule] = []
    for pattern, names in groups.items():
        known = [rules.get(name) for name in names]
        kinds = {rule and (rule.cuts, rule.origin, rule.note) for rule in known}
        if kinds == {None}:
            continue
        if len(kinds) == 1 and known[0] is not None:
            found.append(DerivedRule(pattern, known[0]))
        else:
            found += [DerivedRule(name, rule) for name, rule in zip(names, known, strict=True) if rule is not None]
    return tuple(found)


def _collect_uncut(cutter: GroupPartitioner, model: Model) -> tuple[UncutTensors, ...]:
    found: dict[str, UncutTensors] = {}
    for name, tensor in model.tensors.items():
        if name in cutter.rules or sum(extent > 1 for extent in tensor.shape) < _MATRIX:
            continue
        reason = cutter.reasons.get(name) or _explain_whole(name, tensor)
        pattern = list_name_patterns([name])[0]
        if reason is not None:
            found.setdefault(pattern, UncutTensors(pattern, reason))
    return tuple(found.values())


def _explain_whole(name: str, tensor: ModelTensor) -> str | None:
    """Say why a tensor that no circuit has stays whole; None if it is one that always does."""
    words = name.split(".")
    module = words[-2] if len(words) > 1 else ""
    if module in _ROUTERS or any(word in name for word in _POSITIONS) or "norm" in module:
        return None
    return "a convolution" if len(tensor.shape) > _MATRIX else "not recognised"


def _list_expert_patterns(rules: Mapping[str, TensorRule]) -> tuple[str, ...]:
    """Return patterns of the modules of experts that have tensors of their own."""
    owners: dict[str, None] = {}
    for name, rule in rules.items():
        if rule.member is not None:
            words = name.split(".")
            place = max(n for n, word in enumerate(words) if word == str(rule.member.index))
            owners[list_name_patterns([".".join(words[: place + 1])])[0]] = None
    return tuple(owners)
