"""Plans what Megatron-LM resumes from with Muon: states of two optimizers in one `torch_dist` checkpoint.

Muon has the matrices, Adam embeddings, the head and what is no matrix (`optimizer/emerging_optimizers.py`). In 16 bits
both keep weights in fp32: `fp32_param` (`Float16OptimizerWithFloat16Params`), and Adam's `param` where it is
distributed, as beside a layer-wise Muon (`optimizer/layer_wise_optimizer.py`). In fp32 nothing has a second copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.libraries.megatron.dist_states import COPIES, SHARDING, STATES, build_group, is_half
from shardctl.libraries.megatron.ranks import TITLE
from shardctl.libraries.torch_save.pickle_writer import PickleObject
from shardctl.tensors.training import MOMENTUM

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.base.dtype import DType
    from shardctl.base.settings import Setting
    from shardctl.libraries.megatron.dist_arrays import StackCell
    from shardctl.libraries.torch_save.pickle_writer import Value
    from shardctl.tensors.manifest import TrainingState

_NON_LAYER_WEIGHTS: Final = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})
_MATRIX_NDIM: Final = 2
_MUON_SETTING_KEYS: Final = frozenset(
    {
        *("lr", "weight_decay", "momentum", "max_lr", "min_lr", "wd_mult", "lr_mult", "start_wd", "end_wd"),
        *("is_expert_parallel", "is_decoupled_lr", "default_config"),
    }
)
"""What a group of Megatron-LM's Muon has; the rest are settings of others, or of its command line."""
_DROP_STATES_HINT: Final = "add --optimizer-states drop, or write --to dcp, which has a place for every state"


def list_copies(cell: StackCell, states: tuple[str, ...], dtype: DType) -> tuple[str, ...]:
    """List the names of an optimizer's copies of an array's weights, which have `states` and are of `dtype`.

    Raises UnsupportedError if Megatron-LM gives the array to the other optimizer.
    """
    theirs = len(cell.pieces[0].shape) == _MATRIX_NDIM and cell.name not in _NON_LAYER_WEIGHTS
    if theirs != (MOMENTUM in states):
        mine, other = ("Adam", "Muon") if theirs else ("Muon", "Adam")
        first = cell.pieces[0].pieces[0].tensor
        raise UnsupportedError(
            f"{first} has the states of {mine}, and {TITLE} trains it with {other}: "
            "its Muon has all matrices but the embedding and the head",
            hint=_DROP_STATES_HINT,
        )
    return COPIES[: 1 if theirs else 2] if is_half(dtype) else ()


def build_muon_state(
    training: TrainingState, trained: Mapping[str, tuple[str, ...]], *, halves: bool, routed: bool
) -> dict[str | int, Value]:
    """Build what all ranks of the optimizers share; `halves` says that weights are in 16 bits.

    If `routed`, experts have a group of their own, which is an optimizer of its own in fp32. Raises UnsupportedError
    if all parameters are Muon's.
    """
    if not any(set(STATES) <= set(states) for states in trained.values()):
        raise UnsupportedError(
            f"all parameters have the states of Muon, but {TITLE}'s has no embeddings and no vectors",
            hint=_DROP_STATES_HINT,
        )
    muon = [_build_muon_group(training, expert=expert) for expert in (False, True)[: 1 + routed]]
    adam: list[Value] = [
        {"optimizer": "adam", **build_group(training, expert=False, decayed=each)} for each in (True, False)
    ]
    if halves:
        distributed: dict[str | int, Value] = {"optimizer": {"param_groups": adam}}
        return {
            0: {"optimizer": {"param_groups": list(muon)}},
            1: {**distributed, "param_state_sharding_type": SHARDING},
        }
    chained: list[Value] = [*({"param_groups": [each]} for each in muon), {"param_groups": adam}]
    return dict(enumerate(chained))


def _build_muon_group(training: TrainingState, *, expert: bool) -> Value:
    """Build the settings of a group of Muon's, which has no use for what only other Muons have."""
    found = build_group(training, expert=expert, decayed=True, momentum=True)
    return {"momentum": 0.95} | {name: value for name, value in found.items() if name in _MUON_SETTING_KEYS}


def set_optimizer(args: Value, *, halves: bool) -> None:
    """Change `args` to those of a run with Muon."""
    assert isinstance(args, PickleObject)  # noqa: S101 - as `build_arguments` makes it
    assert isinstance(args.state, dict)  # noqa: S101
    args.state.update(
        {"optimizer": "muon", "use_distributed_optimizer": False, "use_layer_wise_distributed_optimizer": halves}
    )


def note_muon(training: TrainingState, *, halves: bool, routed: bool) -> Iterator[str]:
    """Note what the run that goes on must be, and what differs from other trainers' Muon."""
    if not halves:
        yield (
            f"weights in fp32 have no second copy: {TITLE} resumes with --optimizer muon in fp32; add --dtype bf16 for "
            "a run in bf16, with or without --use-distributed-optimizer"
        )
    elif routed:
        yield f"experts are divided: {TITLE} resumes with --optimizer muon --use-distributed-optimizer, not without"
    if training.writer == TITLE:
        return
    yield (
        f"{TITLE}'s Muon updates gate and up as one matrix and q, k and v apart, and its command line says how "
        "(--muon-momentum, --muon-scale-mode, --muon-extra-scale-factor, --muon-coefficient-type, "
        "--muon-num-ns-steps): losses go on as in the source only if its Muon does the same"
    )
    rates = {_find_rate(group.settings) for group in training.groups}
    if len(rates) > 1:
        yield (
            f"groups have the learning rates {', '.join(map(str, sorted(rates)))}, and {TITLE} has one --lr: "
            "give it overrides for groups, or it does not find them"
        )


def _find_rate(settings: Mapping[str, Setting]) -> float:
    rate = settings.get("max_lr", settings.get("initial_lr", settings.get("lr", 0.0)))
    return float(rate) if isinstance(rate, int | float) else 0.0
