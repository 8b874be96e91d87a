"""Derives the model of an architecture that has no table."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.models.derived.cutting import GroupPartitioner, find_expert_number
from shardctl.models.derived.derivation import SHAPES, DerivedRule, RuleDerivation, TensorRule, UncutTensors
from shardctl.models.derived.head_counts import ConfigSizes, list_parts
from shardctl.models.derived.library_styles import read_library_experts, read_library_styles
from shardctl.models.derived.module_groups import list_circuits
from shardctl.models.derived.stored_modules import ModuleTree
from shardctl.models.quantization import find_quantization_config, quantize_model
from shardctl.models.quantization.methods import read_scheme
from shardctl.models.quantization.settings import name_method
from shardctl.models.quantization.storage import FP8, AlongDim
from shardctl.models.rules.fused_orders import FusedOrders
from shardctl.models.rules.transformers_plan import find_sources, list_config_files
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.family import Row
from shardctl.models.tables.name_pattern import list_name_patterns
from shardctl.models.tables.table import FSDP
from shardctl.tensors.manifest import Manifest, Tensor
from shardctl.tensors.mesh import EXPERT_AXES, EXPERT_FSDP
from shardctl.tensors.placement import AxisPartition, PartitionSection

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from shardctl.models.derived.library_styles import LibraryStyle
    from shardctl.models.quantization.storage import QuantizationScheme
    from shardctl.models.tables.model import Model, ModelTensor
    from shardctl.tensors.mesh import Mesh

_EMBEDDING_MODULE_NAMES: Final = ("wte", "shared", "embed_in", "encoder_embed", "decoder_embed")
"""What embeddings of tokens are called whose names do not begin with one of the next."""
_EMBEDDING_STARTS: Final = ("embed_tokens", "word_embed", "tok_embed", "token_embed", "embedding", "embed_token")
_HEAD_MODULE_NAMES: Final = ("lm_head", "embed_out", "output_projection", "proj_out", "decoder", "output", "head")
"""What linears are called that give a score for each token."""
_ROUTER_MODULE_NAMES: Final = ("gate", "router", "layer", "classifier", "shared_expert_gate")
_POSITION_NAME_FRAGMENTS: Final = ("position", "pos_emb", "wpe", "token_type", "relative", "rotary", "indexer")

_EMBEDDING_BASE_CLASS: Final = "Embedding"

_RESTORABLE_QUANTIZATION_METHODS: Final = ("fp8", "fbgemm_fp8", "gptq", "awq")
"""Methods whose arrays say by their shapes what the weight's is."""
_QUANTIZED_DTYPES: Final = ("U8", "I8", "I32", *FP8)
_MATRIX_NDIM: Final = 2


def derive_model(config: Mapping[str, object], model: Model, *, share_kv: bool, library: bool = True) -> Model:
    """`model`, which is known by names and shapes alone, with cuts by tp and by the axes of experts.

    `share_kv` lets neighbouring tp ranks hold the same key/value head where there are fewer heads than ranks; `library`
    says whether an installed transformers is asked.
    Raises UnsupportedError for quantized weights whose shapes their arrays do not tell.
    """
    named = ModelConfig(config)
    architecture = named.architecture() or named.text("model_type", "")
    weights = _restore_weights(model, config)
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
    _cut_vocabularies(cutter, _list_normed_embeddings(config) if library else frozenset())
    if weights is not model:
        cutter.rules = _spread_rules(cutter.rules, _apply_rules(weights, cutter.rules), model, config)
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
        embeds = last in _EMBEDDING_MODULE_NAMES or last.startswith(_EMBEDDING_STARTS)
        inside = (part.path.rpartition(".")[2] for part in cutter.tree.within(module.path))
        if embeds and (last in normed or any("norm" in part for part in inside)):
            cutter.reasons[module.weight.name] = "its module ends with a norm, which needs the rows of all ranks"
        elif (embeds or last in _HEAD_MODULE_NAMES) and module.shape[0] in cutter.sizes.vocabularies:
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
        if name not in cutter.rules and len(shape) >= _MATRIX_NDIM:
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
        if name in cutter.rules or sum(extent > 1 for extent in tensor.shape) < _MATRIX_NDIM:
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
    if module in _ROUTER_MODULE_NAMES or any(word in name for word in _POSITION_NAME_FRAGMENTS) or "norm" in module:
        return None
    return "a convolution" if len(tensor.shape) > _MATRIX_NDIM else "not recognised"


def _list_expert_patterns(rules: Mapping[str, TensorRule]) -> tuple[str, ...]:
    """Return patterns of the modules of experts that have tensors of their own."""
    owners: dict[str, None] = {}
    for name, rule in rules.items():
        if rule.member is not None:
            words = name.split(".")
            place = max(n for n, word in enumerate(words) if word == str(rule.member.index))
            owners[list_name_patterns([".".join(words[: place + 1])])[0]] = None
    return tuple(owners)


def _list_normed_embeddings(config: Mapping[str, object]) -> frozenset[str]:
    """List what the classes of a config call embeddings that end with a norm; none if transformers is not installed.

    Inkling's and Muse Glimmer's are subclasses of `nn.Embedding`; the norm of the latter has no weight to be seen.
    """
    sources = find_sources()
    kinds = {str(kind) for _, part in list_parts(config) if (kind := part.get("model_type"))}
    if sources is None:
        return frozenset()
    files = (next(list_config_files(sources / "models", kind), None) for kind in sorted(kinds))
    folders = {path.parent for path in files if path is not None}
    return frozenset[str]().union(*(_read_folder(folder) for folder in folders))


@cache
def _read_folder(folder: Path) -> frozenset[str]:
    """Return the attributes that are such embeddings in the classes of one folder."""
    found: set[str] = set()
    for path in folder.glob("modeling_*.py"):
        text = path.read_bytes()
        if b"nn.Embedding)" not in text:
            continue
        try:
            classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        except (SyntaxError, ValueError):  # written for a newer Python
            continue
        normed = {
            node.name
            for node in classes
            if any(isinstance(base, ast.Attribute) and base.attr == _EMBEDDING_BASE_CLASS for base in node.bases)
            and any("norm" in attribute for attribute, _ in _list_submodules(node))
        }
        found |= {name for node in classes for name, kind in _list_submodules(node) if kind in normed}
    return frozenset(found)


def _list_submodules(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """List what a class assigns to attributes of itself by calling a class: the attribute, and the class."""
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call) and isinstance(each.value.func, ast.Name):
            target = each.targets[0]
            if isinstance(target, ast.Attribute):
                yield target.attr, each.value.func.id


def _restore_weights(model: Model, config: Mapping[str, object]) -> Model:
    """Return the model with its weights in place of the arrays that are stored of them.

    It is `model` where nothing is quantized. Raises UnsupportedError for codes whose weights are not known.
    """
    settings = find_quantization_config(config)
    if settings is None:
        return model
    scheme = read_scheme(config) if name_method(settings) in _RESTORABLE_QUANTIZATION_METHODS else None
    if scheme is None:
        raise _explain_unknown(model)
    tensors: dict[str, ModelTensor] = {}
    for name, tensor in model.tensors.items():
        module, _, last = name.rpartition(".")
        storage = scheme.storage((module,))
        weight = _restore_weight(model, scheme, module)
        if weight is None or last not in storage.names or last == "bias":
            tensors[name] = tensor
        else:
            tensors.setdefault(weight.name, weight)
    kept = (tensor for name, tensor in tensors.items() if tensor is model.tensors.get(name))
    if any(tensor.dtype.name in _QUANTIZED_DTYPES and len(tensor.shape) >= _MATRIX_NDIM for tensor in kept):
        raise _explain_unknown(model)
    return replace(model, tensors=tensors)


def _restore_weight(model: Model, scheme: QuantizationScheme, module: str) -> ModelTensor | None:
    """Return the weight that the arrays of a module stand for; None if it is not quantized."""
    codes, *others = scheme.storage((module,)).arrays
    stored = next((t for n in codes.names if (t := model.tensors.get(f"{module}.{n}")) is not None), None)
    scaled = any(f"{module}.{name}" in model.tensors for array in others for name in array.names if name != "bias")
    if stored is None or stored.dtype.name not in _QUANTIZED_DTYPES or len(stored.shape) != _MATRIX_NDIM or not scaled:
        return None
    extents = [0] * _MATRIX_NDIM
    for extent, along in zip(stored.shape, codes.forms[0], strict=True):
        assert isinstance(along, AlongDim)  # noqa: S101 - codes of these methods follow the weight
        extents[along.dim] = extent * along.block // along.stored
    name = f"{module}.weight"
    return replace(stored, name=name, shape=tuple(extents), row=Row(list_name_patterns([name])[0], ""))


def _spread_rules(
    rules: Mapping[str, TensorRule], weights: Model, stored: Model, config: Mapping[str, object]
) -> dict[str, TensorRule]:
    """Return the rules of stored arrays that follow from those of `weights`, which have their cuts."""
    tensors = {name: Tensor(name, t.dtype, t.shape, ()) for name, t in stored.tensors.items()}
    encodings = quantize_model(weights, config, Manifest("", tensors, {})).encodings
    found = {name: rule for name, rule in rules.items() if name not in encodings}
    for name, encoding in encodings.items():
        if name not in rules:
            continue
        for array in encoding.arrays:
            cuts = tuple(tuple(c for c in dim if c.axis not in ("fsdp", EXPERT_FSDP)) for dim in array.cuts)
            found[encoding.name(array)] = replace(rules[name], cuts=cuts)
    return found


def _explain_unknown(model: Model) -> UnsupportedError:
    return UnsupportedError(
        f"how quantized weights of {model.architecture or 'a model without a table'} are cut is not known",
        hint="write a rule file and give it with --rules FILE",
    )
