"""Plans the optimizer states of `torch_dist` checkpoints, from which Megatron-LM resumes on any mesh.

Every array of trained weights is there once for each state, and once in fp32, which is the optimizer's copy: the
weights that Megatron-LM goes on from (`sharded_param_state_fully_reshardable` of `optimizer/distrib_optimizer.py`).
What is not divided, such as steps and settings, is in `common.pt`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UnsupportedError
from shardctl.libraries.megatron.ranks import TITLE
from shardctl.libraries.torch_save.pickle_writer import PickleObject
from shardctl.tensors.training import MOMENTUM, format_state_name, has_momentum, split_state_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from shardctl.base.dtype import DType
    from shardctl.base.settings import Setting
    from shardctl.libraries.arrays.composite import CompositeArray
    from shardctl.libraries.megatron.dist_arrays import StackCell
    from shardctl.libraries.torch_save.pickle_writer import Value
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import Chunk, Tensor, TrainingState

SHARDING: Final = "fully_reshardable"
MASTERS: Final = "param"
"""The state that is the weights themselves."""
COPIES: Final = ("fp32_param", MASTERS)
"""The weights of optimizers in 16 bits: of those that are not distributed, and of Adam where it is."""
SCHEDULE: Final = "opt_param_scheduler"
"""What the learning rate's schedule is called, before the names of its settings."""
STATES: Final = ("exp_avg", "exp_avg_sq")
STORED: Final = BY_NAME["F32"]
"""The type of states and of the optimizer's own weights."""
_STEP_KEY: Final = "step"
_HALF_PRECISION_DTYPES: Final = frozenset({"F16", "BF16"})
_CONSUMED_SAMPLES_KEYS: Final = ("consumed_train_samples", "consumed_valid_samples")
_OPTIMIZER_STATE_PATTERN: Final = re.compile(r"optimizer\.state\.[^.]+\.(.+)")
_PARAM_GROUP_DEFAULTS: Final[dict[str | int, Value]] = {
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_decoupled_lr": False,
    "default_config": True,
}
_ADAM_GROUP_DEFAULTS: Final[dict[str | int, Value]] = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "bias_correction": True,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""What torch's Adam and Transformer Engine's expect in a group."""
_NOT_SETTINGS: Final = frozenset(
    {"params", "initial_lr", "is_expert_parallel", "pre_wd_mult", "pre_lr_mult", _STEP_KEY}
)


def find_array_name(key: str) -> str:
    """Find the array that a key is of, or of a state of which it is.

    >>> find_array_name("optimizer.state.exp_avg.output_layer.weight"), find_array_name("output_layer.weight")
    ('output_layer.weight', 'output_layer.weight')
    """
    found = _OPTIMIZER_STATE_PATTERN.fullmatch(key)
    return found[1] if found is not None else key


def list_trained(order: PackRequest, *, muon: bool = False) -> dict[str, tuple[str, ...]]:
    """List the parameters that have states, each with those that its optimizer keeps: Adam, or, if `muon`, Muon.

    Raises UnsupportedError for a state that Megatron-LM's optimizer has not, or that a parameter has alone.
    """
    kinds = (STATES, *(((MOMENTUM,),) if muon else ()))
    known = {_STEP_KEY, *(state for kind in kinds for state in kind)}
    held: dict[str, set[str]] = {}
    for name in order.have.training.states if order.have.training is not None else ():
        state, parameter = split_state_name(name) or ("", name)
        if state not in known:
            raise UnsupportedError(
                f"{parameter} has a state {state}, and {TITLE}'s optimizer has only "
                f"{' and '.join(sorted(known - {_STEP_KEY}))}{'' if muon else ' here'}",
                hint="add --optimizer-states drop, or write --to dcp, which has a place for every state"
                + (", or --to torch_dist, which has one for Muon's" if state == MOMENTUM else ""),
            )
        held.setdefault(parameter, set()).add(state)
    return {parameter: _choose_kind(parameter, states - {_STEP_KEY}, kinds) for parameter, states in held.items()}


def _choose_kind(parameter: str, states: set[str], kinds: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Choose the optimizer that keeps these states of a parameter."""
    for kind in kinds:
        if states == set(kind):
            return kind
    missing = [state for state in STATES if state not in states]
    said = f"has no state {missing[0]}" if missing else f"has the states {', '.join(sorted(states))} together"
    raise UnsupportedError(f"{parameter} {said}", hint="add --optimizer-states drop")


def has_muon(trained: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether any parameter has the states of Muon."""
    return any(MOMENTUM in states for states in trained.values())


def is_half(dtype: DType) -> bool:
    """Return whether weights of a type have copies in fp32."""
    return dtype.name in _HALF_PRECISION_DTYPES


def is_trained(cell: StackCell, trained: Collection[str]) -> bool:
    """Return whether an array has optimizer states; raises UnsupportedError for one trained in part."""
    tensors = {piece.tensor for composite in cell.pieces for piece in composite.pieces}
    if tensors.isdisjoint(trained):
        return False
    if not tensors <= set(trained):
        raise UnsupportedError(
            f"{cell.name} of {TITLE} has optimizer states for all of {', '.join(sorted(tensors))}, or for none",
            hint="add --optimizer-states drop",
        )
    return True


def list_state_cells(
    cells: Collection[StackCell],
    trained: Mapping[str, tuple[str, ...]],
    list_copies: Callable[[StackCell, tuple[str, ...]], Iterable[str]] = lambda *_: (MASTERS,),
) -> Iterator[StackCell]:
    """List the cells of every state of the arrays of `cells`; raises UnsupportedError for one trained in part.

    `list_copies` lists what the copies of the weights are called that the optimizer of a cell with some states has.
    """
    for cell in cells:
        if is_trained(cell, trained):
            states = _find_states(cell, trained)
            for copy in list_copies(cell, states):
                yield replace(cell, name=f"optimizer.state.{copy}.{cell.name}", dtype=STORED)
            for state in states:
                yield build_state_cell(cell, state, f"optimizer.state.{state}.{cell.name}")


def _find_states(cell: StackCell, trained: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Find the states that all tensors of a trained array have; raises UnsupportedError if they have different ones."""
    found = {trained[piece.tensor]: piece.tensor for composite in cell.pieces for piece in composite.pieces}
    if len(found) > 1:
        said = ", ".join(f"{name} has {' and '.join(states)}" for states, name in found.items())
        raise UnsupportedError(
            f"{cell.name} of {TITLE} has one optimizer, but {said}", hint="add --optimizer-states drop"
        )
    return next(iter(found))


def build_state_cell(cell: StackCell, state: str, name: str) -> StackCell:
    """Build the cell of a state of the array of `cell`, under `name`."""
    return replace(cell, name=name, pieces=tuple(_rename_pieces(each, state) for each in cell.pieces), dtype=STORED)


def _rename_pieces(content: CompositeArray, state: str) -> CompositeArray:
    pieces = (replace(piece, tensor=format_state_name(state, piece.tensor)) for piece in content.pieces)
    return replace(content, pieces=tuple(pieces))


def collect_states(training: TrainingState | None, stored: Iterable[tuple[str, Chunk]]) -> dict[str, Tensor]:
    """Collect those of the states of which there are chunks among what is `stored`."""
    chunks: dict[str, list[Chunk]] = {}
    for name, chunk in stored:
        chunks.setdefault(name, []).append(chunk)
    states = training.states if training is not None else {}
    return {n: replace(states[n], dtype=c[0].dtype, chunks=tuple(c)) for n, c in chunks.items() if n in states}


def find_iteration(training: TrainingState | None) -> int:
    """Find the number of the iteration: the loop's own, or the optimizer's steps."""
    said = training.progress.get("iteration") if training is not None else None
    return said if isinstance(said, int) else (training.step if training is not None else None) or 0


def add_progress(args: Value, training: TrainingState, *, distributed: bool = True) -> None:
    """Change `args` to those of a run that has come as far as the training has, with a distributed optimizer or not."""
    assert isinstance(args, PickleObject)  # noqa: S101 - as `build_arguments` makes it
    number = {name: training.progress[name] for name in _CONSUMED_SAMPLES_KEYS if name in training.progress}
    said = args.state if isinstance(args.state, dict) else {}
    said |= {"use_distributed_optimizer": distributed, "no_save_optim": False, "no_save_rng": True, **number}
    said["iteration"] = find_iteration(training)
    said |= {"clip_grad": training.clipping} if training.clipping is not None else {}


def build_optimizer_state(training: TrainingState, *, routed: bool) -> dict[str | int, Value]:
    """Build what all ranks of the optimizer share; if `routed`, experts have an optimizer of their own."""
    common: list[dict[str | int, Value]] = []
    for expert in (False, True)[: 1 + routed]:
        groups: list[Value] = [build_group(training, expert=expert, decayed=each) for each in (True, False)]
        common.append({"optimizer": {"param_groups": groups}, "param_state_sharding_type": SHARDING})
    return dict(enumerate(common)) if routed else common[0]


def build_group(
    training: TrainingState, *, expert: bool, decayed: bool, momentum: bool = False
) -> dict[str | int, Value]:
    """Build the settings of the group of matrices, or of vectors, which have no weight decay.

    `momentum` says that it is one of Muon's.
    """
    settings = find_settings(training, expert=expert, decayed=decayed, momentum=momentum)
    rate = settings.get("lr", 0.0)
    kept: dict[str | int, Value] = {name: value for name, value in settings.items() if name not in _NOT_SETTINGS}
    found: dict[str | int, Value] = {
        **_PARAM_GROUP_DEFAULTS,
        "max_lr": settings.get("initial_lr", rate),
        "min_lr": 0.0,
        **_ADAM_GROUP_DEFAULTS,
        "lr": rate,
        "weight_decay": 0.0,
        **kept,
        "is_expert_parallel": expert,
        "wd_mult": 1.0 if decayed else 0.0,
        "step": training.step or 0,
    }
    return found


def find_settings(
    training: TrainingState, *, expert: bool, decayed: bool, momentum: bool = False
) -> Mapping[str, Setting]:
    """Find the settings of the group that is most like the one that is asked for; one of Muon's if `momentum`."""

    def unlike(settings: Mapping[str, Setting]) -> tuple[bool, bool]:
        has_decay = settings.get("wd_mult", settings.get("weight_decay", 0.0)) != 0.0
        return has_decay != decayed, bool(settings.get("is_expert_parallel")) != expert

    mine = (group.settings for group in training.groups if has_momentum(group.settings) == momentum)
    return min(mine, key=unlike, default={})


def build_schedule(training: TrainingState) -> dict[str | int, Value]:
    """Build the state of the learning rate's schedule, with what is known of it."""
    settings = find_settings(training, expert=False, decayed=True)
    rate, decay = settings.get("initial_lr", settings.get("lr", 0.0)), settings.get("weight_decay", 0.0)
    found: dict[str | int, Value] = {
        "max_lr": rate,
        "lr_warmup_steps": 0,
        "num_steps": 0,
        "lr_decay_style": "constant",
        "lr_decay_steps": 1,
        "min_lr": 0.0,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": 1,
    }
    before = f"{SCHEDULE}/"
    return found | {k.removeprefix(before): v for k, v in training.progress.items() if k.startswith(before)}


def note_unknown_progress(training: TrainingState) -> Iterator[str]:
    """Note what Megatron-LM has to be told, because the source does not say it, or what is assumed."""
    if training.step is None:
        yield (
            f"no single number of steps is known: {TITLE} gets 0, so that Adam corrects its averages as in a first step"
        )
    if not training.progress:
        rate = find_settings(training, expert=False, decayed=True)
        yield (
            f"the schedule of the learning rate and the samples seen are not known: start {TITLE} with "
            "--override-opt_param-scheduler, and from core 0.19 on with --min-lr 0 and --lr "
            f"{rate.get('initial_lr', rate.get('lr', 0.0))}, by which it finds the groups of parameters"
        )
