"""Sorts the keys of what Megatron-FSDP saves (`--ckpt-format fsdp_dtensor`), which are the way through the dicts.

The names of a module's parameters follow `model.`, those of optimizer states `optimizer.state.`, and the settings of
every parameter `optimizer.param_to_group_meta.`; gate and up projection are two arrays, and experts have the number
that they have in the model. See `transformer/fsdp_dtensor_checkpoint.py` and `optimizer/distrib_optimizer.py` of
megatron-core.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.base.settings import as_steps
from shardctl.libraries.megatron.dist_common import CommonState
from shardctl.libraries.megatron.dist_groups import is_vector
from shardctl.libraries.megatron.dist_keys import MegatronKeys
from shardctl.libraries.megatron.names import find_newer_name
from shardctl.libraries.megatron.namespace import parse_namespace
from shardctl.libraries.torch_save.zip_file import read_torch_zip

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardctl.base.settings import Setting
    from shardctl.libraries.dcp.save import DcpSave

_WEIGHT_KEY_PATTERN: Final = re.compile(r"model[0-9]*\.(?:module\.)*(.+)")
_OPTIMIZER_STATE_PATTERN: Final = re.compile(r"optimizer\.state\.(?:module\.)*(.+)\.([^.]+)")
_GROUP_SETTING_PATTERN: Final = re.compile(r"(optimizer\.param_to_group_meta\.(?:module\.)*(.+))\.([^.]+)")
_SCHEDULER_STATE_PATTERN: Final = re.compile(r"opt_param_scheduler\.[^.]+")
_GROUPED_EXPERT_PATTERN: Final = re.compile(r"(.+\.mlp\.experts)\.(linear_fc[12]\.(?:weight|bias))([0-9]+)(_[wv])?")
_SEQUENTIAL_EXPERT_PATTERN: Final = re.compile(r"(.+\.mlp\.experts)\.local_experts\.([0-9]+)\.(.+)")
_EXPERT_NAME_PATTERN: Final = re.compile(
    r"(.+\.mlp\.experts)\.experts\.([0-9]+)\.(linear_fc[12]\.(?:weight|bias))(_[wv])?"
)
_MTP_LAYER_PATTERN: Final = re.compile(r"(mtp\.layers\.[0-9]+\.)mtp_model_layer\.(.+)")
_STEP_KEY: Final = "step"
_PIPELINE_STAGES_ARG: Final = "pipeline_model_parallel_size"


SAVED: Final = "saved by Megatron-FSDP (fsdp_dtensor); its weights are the optimizer's"


def is_read(key: str) -> bool:
    """Return whether an object has settings of the optimizer or its schedule, which are read."""
    return _GROUP_SETTING_PATTERN.fullmatch(key) is not None or _SCHEDULER_STATE_PATTERN.fullmatch(key) is not None


def find_global_name(name: str) -> str:
    """Find the name that `torch_dist` has for an array if layers and experts have numbers.

    >>> find_global_name("decoder.layers.1.mlp.experts.linear_fc1.weight3_w")
    'decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight_w'
    >>> find_global_name("decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight")
    'decoder.layers.1.mlp.experts.experts.3.linear_fc2.weight'
    """
    name = _MTP_LAYER_PATTERN.sub(r"\1transformer_layer.\2", name)
    name = _GROUPED_EXPERT_PATTERN.sub(lambda found: f"{found[1]}.experts.{found[3]}.{found[2]}{found[4] or ''}", name)
    return _SEQUENTIAL_EXPERT_PATTERN.sub(r"\1.experts.\2.\3", name)


def find_module_name(name: str, *, grouped: bool, older: bool = False) -> str:
    """Find the name that a module's parameter has, of the name of its array, as `find_global_name` has it.

    `grouped` says whether experts are in one module, `older` whether core is 0.16 or older.

    >>> find_module_name("decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight_w", grouped=True)
    'decoder.layers.1.mlp.experts.linear_fc1.weight3_w'
    >>> find_module_name("decoder.layers.1.mlp.experts.experts.3.linear_fc2.weight", grouped=False)
    'decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight'
    """
    expert = _EXPERT_NAME_PATTERN.fullmatch(name)
    if expert is not None:
        local = f"{expert[3]}{expert[2]}" if grouped else f"local_experts.{expert[2]}.{expert[3]}"
        name = f"{expert[1]}.{local}{expert[4] or ''}"
    return name if older else find_newer_name(name)


def sort_fsdp_keys(tensors: Iterable[str]) -> MegatronKeys:
    """Return what each key is, from its name alone."""
    found = MegatronKeys()
    for key in tensors:
        weight, state = _WEIGHT_KEY_PATTERN.fullmatch(key), _OPTIMIZER_STATE_PATTERN.fullmatch(key)
        if weight is not None:
            found.weights[key] = find_global_name(weight[1])
        elif state is not None and state[2] != _STEP_KEY:
            found.states[key] = state[2], find_global_name(state[1])
    return found


def read_fsdp_common(save: DcpSave) -> CommonState:
    """Read what is common to all ranks from the objects among the tensors.

    Raises UnsupportedError if the model was divided into stages.
    """
    items = save.metadata[0].items
    item = items.get("args", {}).get(None)
    tree = (
        read_torch_zip(save.source, item.file, start=item.offset, size=item.length).tree if item is not None else None
    )
    arguments = parse_namespace(tree)
    stages = arguments.get(_PIPELINE_STAGES_ARG)
    if isinstance(stages, int) and stages > 1:
        raise UnsupportedError(
            f"the layers of {stages} stages are in one fsdp_dtensor checkpoint, and how Megatron-FSDP numbers them is "
            "not known",
            hint=f"load it with Megatron-LM and save it with {_PIPELINE_STAGES_ARG} 1, or as torch_dist",
        )
    groups = _read_groups(save, items)
    steps = {
        as_steps(save.value(key))
        for key in save.tensors
        if _OPTIMIZER_STATE_PATTERN.fullmatch(key) and key.endswith(f".{_STEP_KEY}")
    }
    steps |= {as_steps(group[_STEP_KEY]) for group in groups if _STEP_KEY in group}
    if len(steps) > 1:
        raise UnsupportedError(
            f"the parameters of {save.source.name} were trained for different numbers of steps, and torch_dist has one",
            hint="load it with Megatron-LM, and save the weights alone with --no-save-optim",
        )
    version, iteration = save.value("checkpoint_version"), save.value("iteration")
    return CommonState(
        arguments=arguments,
        version=float(version) if isinstance(version, int | float) else None,
        iteration=iteration if type(iteration) is int else None,
        step=next(iter(steps), None),
        groups=tuple(groups),
        progress={
            **{k: arguments[k] for k in ("consumed_train_samples", "consumed_valid_samples") if k in arguments},
            **({"iteration": iteration} if type(iteration) is int else {}),
            **{key.replace(".", "/"): save.value(key) for key in items if _SCHEDULER_STATE_PATTERN.fullmatch(key)},
        },
    )


def _read_groups(save: DcpSave, keys: Iterable[str]) -> list[dict[str, Setting]]:
    """Read the settings of the first parameter of each kind: matrices and vectors, in experts and outside."""
    chosen: dict[tuple[bool, bool], str] = {}
    found: dict[str, dict[str, Setting]] = {}
    for key in keys:
        setting = _GROUP_SETTING_PATTERN.fullmatch(key)
        if setting is None:
            continue
        kind = ".mlp.experts." in setting[2], is_vector(find_global_name(setting[2]))
        if chosen.setdefault(kind, setting[1]) == setting[1]:
            found.setdefault(setting[1], {})[setting[3]] = save.value(key)
    unique: list[dict[str, Setting]] = []
    for values in found.values():
        if values not in unique:
            unique.append(values)
    return unique
