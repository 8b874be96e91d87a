"""From an opened checkpoint and a purpose to an estimate of what every device needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from shardctl.errors import UnsupportedError, UsageError
from shardctl.memory.forecast import forecast
from shardctl.memory.holding import hold
from shardctl.memory.inventory import Inventory, take_stock
from shardctl.memory.serving import largest_batch, longest_context
from shardctl.memory.workload import Serving, Training
from shardctl.models import Config, parameters
from shardctl.placement import Spec
from shardctl.verbs.drafting import chosen_dtypes, filtered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.memory.devices import Device
    from shardctl.memory.estimate import Estimate
    from shardctl.memory.workload import Offload, Profile, Recompute, Schedule
    from shardctl.mesh import Mesh
    from shardctl.models.anatomy import Anatomy
    from shardctl.verbs.drafting import Wish
    from shardctl.verbs.opening import Checkpoint

Use = Literal["serve", "train"]
USUAL_CONTEXT: Final = 8192
"""Tokens per sequence if nobody says, unless the model was made for fewer."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """What the devices are for; every field is an option of the command line, and None is its default."""

    use: Use | None = None
    """By default `train` where something is asked that only training has, such as an optimizer or fsdp ranks."""
    device: Device | None = None
    """What each rank runs on; without one, needs are stated and nothing is said to fit."""
    seq_len: int | None = None
    """Tokens per sequence."""
    batch: int | None = None
    """Sequences: in serving those held at once, in training those of one forward pass of a data-parallel rank."""
    kv_dtype: str | None = None
    """Of the key/value cache, as `--kv-dtype` spells it."""
    microbatches: int | None = None
    profile: Profile | None = None
    optimizer: str | None = None
    zero: int | None = None
    recompute: Recompute | None = None
    schedule: Schedule | None = None
    virtual_stages: int | None = None
    offload: Offload | None = None

    devices: int | None = None
    """How many there are to search over; by default the ranks of the mesh."""
    search: bool = False
    """Whether all meshes of them are compared."""

    def decided(self, mesh: Mesh) -> Use:
        """What they are for: as said, else training where something is asked that only training has."""
        if self.use is not None:
            return self.use
        asked = (self.microbatches, self.profile, self.optimizer, self.zero, self.recompute, self.schedule)
        more = (self.virtual_stages, self.offload)
        trains = mesh.degree("fsdp") > 1 or any(option is not None for option in (*asked, *more))
        return "train" if trains else "serve"


@dataclass(frozen=True, slots=True)
class Forecast:
    """What every device needs for a purpose."""

    estimate: Estimate
    work: Serving | Training | None
    """None if only the weights are stated."""
    dtype: str
    """Of activations; safetensors' name."""
    device: Device | None = None
    unmodelled: str = ""
    """Why only the weights are stated, if so."""
    longest_context: int | None = None
    """In serving, the most tokens per sequence that fit the device at this batch; None if memory does not limit it."""
    largest_batch: int | None = None
    """The most sequences that fit at this context; None likewise."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What an estimate is about, whatever the mesh."""

    inventory: Inventory
    parameters: int
    """Elements that can be trained, however they are stored."""
    anatomy: Anatomy | None
    unmodelled: str
    """Why there is no anatomy, if so."""
    dtype: str
    """Of activations; safetensors' name."""


def subject(checkpoint: Checkpoint, wish: Wish) -> Subject:
    """The tensors of a checkpoint by kind, as `wish` would write them, and what its model is made of."""
    have = filtered(checkpoint.manifest, wish)
    model = checkpoint.model
    if model is None:
        specs: Mapping[str, Spec] = {n: Spec(((),) * len(t.shape), (("first", 0),)) for n, t in have.tensors.items()}
        inventory = take_stock(have.tensors.values(), specs, 0, dtypes=chosen_dtypes(have, wish))
        elements = inventory.elements
    else:
        specs = {name: model.tensors[name].spec for name in have.tensors}
        buffers = frozenset(n for n in have.tensors if model.tensors[n].row.buffer)
        inventory = take_stock(
            have.tensors.values(), specs, model.layers, dtypes=chosen_dtypes(have, wish), buffers=buffers
        )
        elements = parameters(model, checkpoint.config, have.tensors)
    found, why = _anatomy(checkpoint)
    dtype = Config(checkpoint.config).dtype().name if checkpoint.config is not None else ""
    return Subject(inventory, elements, found, why, dtype)


def foresee(about: Subject, mesh: Mesh, stages: tuple[int, ...], purpose: Purpose | None) -> Forecast:
    """What every rank of `mesh` needs; without a purpose, the weights alone.

    Raises CutError for a mesh that does not fit the tensors, UsageError for options that contradict each other.
    """
    work = workload(about, purpose, purpose.decided(mesh)) if purpose is not None else None
    holdings = hold(about.inventory, mesh, stages)
    estimate = forecast(holdings, about.anatomy, mesh, stages, work, dtype=about.dtype)
    if purpose is None:
        return Forecast(estimate, None, about.dtype)
    seen = Forecast(estimate, work, about.dtype, purpose.device, about.unmodelled)
    if purpose.device is None:
        return seen
    budget = purpose.device.usable_bytes
    seen = replace(seen, estimate=estimate.within(budget))
    if not isinstance(work, Serving) or about.anatomy is None:
        return seen
    limits = [
        most(about.anatomy, holdings, mesh, work, dtype=about.dtype, budget=budget)
        for most in (longest_context, largest_batch)
    ]
    return replace(seen, longest_context=limits[0], largest_batch=limits[1])


def _anatomy(checkpoint: Checkpoint) -> tuple[Anatomy | None, str]:
    if checkpoint.config is None:
        return None, "there is no config.json"
    if checkpoint.model is None or not checkpoint.model.family:
        return None, "the architecture is not known"
    from shardctl.models import anatomy as module

    if not hasattr(module, "anatomy"):
        return None, "not written yet"
    try:
        return module.anatomy(checkpoint.config), ""
    except UnsupportedError as error:
        return None, error.message


def workload(about: Subject, purpose: Purpose, use: Use) -> Serving | Training | None:
    """What the devices do, with the defaults that the model decides; None for one whose layers are not described.

    Raises UsageError for options that contradict each other.
    """
    if about.anatomy is None:
        return None
    limit = about.anatomy.positions or USUAL_CONTEXT
    tokens = purpose.seq_len or min(limit, USUAL_CONTEXT)
    if use == "serve":
        return Serving(context=tokens, batch=purpose.batch or 1, kv_dtype=purpose.kv_dtype)
    if purpose.kv_dtype is not None:
        raise UsageError("--kv-dtype is about serving, and this is about training", hint="add --for serve")
    usual = Training(sequence=tokens, micro_batch=purpose.batch or 1, dtype=_compute(about.dtype))
    given: dict[str, Any] = {
        "microbatches": purpose.microbatches,
        "profile": purpose.profile,
        "optimizer": purpose.optimizer,
        "zero": purpose.zero,
        "recompute": purpose.recompute,
        "schedule": purpose.schedule,
        "virtual_stages": purpose.virtual_stages,
        "offload": purpose.offload,
    }
    return replace(usual, **{key: value for key, value in given.items() if value is not None})


def _compute(dtype: str) -> str:
    """The type that training computes in: mixed precision, unless the model itself is half."""
    return dtype if dtype in {"F16", "BF16"} else "BF16"
