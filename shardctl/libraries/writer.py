"""What shardctl must know of a layout to write it: its name, what it can express, and how tensors become files."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Literal

from shardctl.base.value import settings_class, value_class

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardctl.base.dtype import DType
    from shardctl.libraries.arrays.form import ArrayForm
    from shardctl.models import Model
    from shardctl.tensors.manifest import Manifest
    from shardctl.tensors.mesh import Mesh
    from shardctl.tensors.naming_scheme import NamingScheme
    from shardctl.tensors.pieces import PlacedCheckpoint

RankKind = Literal["none", "optional", "always", "library"]
"""Whether a layout has files of ranks: none, one set for each rank if there is a mesh, or one set even for one device.

`library` means that the library cuts arrays of its own for its ranks, and that nothing is placed beforehand.
"""
StateKind = Literal["none", "on request", "by default"]
"""When a layout holds optimizer states."""


@settings_class
class PackRequest:
    """What is asked of a layout: the tensors, how they are cut and named, and the options that shape files."""

    have: Manifest
    """The tensors to write; optimizer states are among them if they travel along."""
    form: ArrayForm
    """The arrays that hold the tensors, under the names that are asked for."""
    dtypes: dict[str, DType]
    """By tensor, as a cast asks for."""
    mesh: Mesh
    placed: PlacedCheckpoint | None
    """Which rank holds what; None without a mesh, and for layouts whose library cuts arrays of its own."""
    config: Mapping[str, object]
    """The decoded `config.json`; empty if there is none."""
    require_model: Callable[[], Model]
    """Gives the model, or raises the error that says that this layout needs one."""
    read: Callable[[str, int, int], bytes]
    """Reads bytes of the source: of a file, from an offset, how many."""
    stages: tuple[int, ...] | None = None
    """Layers per pipeline stage, if they were given."""
    max_shard_size: int | None = None
    """Bytes of tensors per file, if they were given."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options that only some layouts have, such as `vllm_profile`, if they were given."""

    @property
    def model(self) -> Model:
        """The model, for layouts that cannot be written without; raises as `require_model`."""
        return self.require_model()


def _give_no_prefix(dialect: NamingScheme, rank: int) -> str:
    """Return the prefix of layouts whose files belong to no rank."""
    del dialect, rank
    return ""


@value_class
class PackMeasure:
    """What a packed target takes, without where each tensor goes."""

    files: Mapping[str, int]
    """By path, the size of each file."""
    chunks: int
    """How many there are of all tensors together."""


@value_class
class Layout:
    """A layout that shardctl writes; every module that writes one ends in `LAYOUT = Layout(...)`."""

    name: str
    """What `--to` accepts."""
    pack: Callable[[PackRequest], Manifest]
    """The files for a request, yet to be written: their sizes, their own bytes, and where each tensor's boxes go.

    Raises UnsupportedError for tensors without a place in the layout, PartitionError for a mesh that does not fit, and
    UsageError for options that the layout cannot have.
    """
    ranks: RankKind = "none"
    options: frozenset[str] = frozenset()
    """Those fields of `ReshardOptions` that only some layouts have and that mean something to this one."""
    states: StateKind = "none"
    own_settings: bool = False
    """Whether it has a place of its own for steps and groups even if states have to be asked for."""
    trainer: str = ""
    """The library that resumes from it, as `TrainingState.writer` begins; empty if there are several."""
    own_steps: bool = False
    """Whether its trainers look for a number of steps beside the states of every parameter."""
    served: bool = False
    """Whether `from_pretrained` or an engine loads a directory of it, with the tokenizer and the settings in it."""
    source_names: bool = False
    """Whether arrays keep the names and the form that they have in the source, whatever `--names` says."""
    prefix: Callable[[NamingScheme, int], str] = _give_no_prefix
    """What the paths of a rank's files begin with; the dialect says the mesh, and what the library's own names need."""
    measure: Callable[[PackRequest], PackMeasure | None] | None = None
    """Measures what `pack` would give of tensors that are stored whole, in a fraction of the time, and may return None
    for what only packing can tell."""
