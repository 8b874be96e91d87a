"""Holds what is known of a checkpoint once its headers are read."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from shardctl import models
from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.base.value import value_class
from shardctl.checkpoint.config_files import CONFIG
from shardctl.libraries.files.extra_tensors import add_extra_tensors
from shardctl.models.names.binding import is_maxtext
from shardctl.tensors.training import add_states, split_state_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from shardctl.models import Model, UntabledModel
    from shardctl.models.names.extra_names import ExtraTensor
    from shardctl.models.quantization.stored_weight import StoredQuantization
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest, Tensor
    from shardctl.tensors.mesh import Mesh
    from shardctl.tensors.placement import PartitionSpec
    from shardctl.tensors.record import CheckpointRecord

_MAX_NAME_PATTERNS_SHOWN: Final = 12
"""Kinds of tensors in one message; a real model has about that many."""


@value_class
class OpenedCheckpoint:
    """An opened source: headers read, nothing else."""

    source: Source
    stored: Manifest
    """Under the names of the files."""
    manifest: Manifest
    """Under canonical names, where the family is known; else the stored ones."""
    model: Model | None
    """None if the source has no config and no rules were given."""
    model_error: UnsupportedError | None
    """Why there is no model although there is a config."""
    config: Mapping[str, Any] | None
    record: CheckpointRecord | None
    """What `shardctl.json` says, if shardctl wrote this."""
    untabled: Callable[[], UntabledModel] | None = None
    """Where no table knows the model, what its names and shapes tell of it; None where they are no model's."""
    derived: Callable[[], Model] | None = None
    """The same with cuts that are derived; None without a config, or where that is refused."""
    hypothetical: bool = False
    """Whether there is only a config: the tensors are those that it describes, and no chunk of them is stored."""
    allow_unverified: bool = False
    """Whether bytes are taken that cannot be compared with the hash that their place promises."""
    unselected: tuple[Tensor, ...] = ()
    """The stored tensors that were left out before names were bound, because the others are a whole model."""
    subtree: str = ""
    """The prefix below which the model was in the source, if it was named."""
    ruled: bool = False
    """Whether a rule file or rules of transformers say how tensors are cut."""
    given_mesh: Mesh | None = None
    """The mesh whose ranks the files are, if a caller says it and no record does."""
    given_stages: tuple[int, ...] = ()
    encoded: tuple[Tensor, ...] = ()
    """The arrays that the weights are worked out of, if they were quantized and are taken for numbers."""
    adapted: tuple[Tensor, ...] = ()
    """The tensors as they are stored of which adapters have changed some."""
    resources: ExitStack = field(default_factory=ExitStack)
    """What is closed together with the checkpoint: adapters that are merged into it."""
    part: str = ""
    """Which part of a model this is, as `--only` calls it, if it was split off."""
    completed: str = ""
    """From which checkpoint it was completed, and with what, if it was."""
    averaged: str = ""
    """Of which checkpoints it is the sum, and with which weights, if it is one."""
    inputs: Mapping[str, OpenedCheckpoint] = field(default_factory=dict)
    """The others, by the first component of the paths that their files have in `source`."""
    applied: str = ""
    """Which weight deltas were applied to it, in order."""
    adapter: bool = False
    """Whether it is an adapter (such as LoRA) by itself, and no model."""
    base_config: Mapping[str, Any] | None = None
    """Of an adapter: the config of its base, if anybody says which that is."""
    remade_config: bool = False
    """Whether `config` is not what the file says, but follows from what was made of the checkpoint."""
    dropped_rows: int = 0
    """Rows of padding that the stored vocabulary has and `manifest` does not."""
    untied: bool = False
    """Whether the head is a weight of its own although the source's config ties it, because the two differ."""
    remade_files: Mapping[str, bytes] = field(default_factory=dict)
    """Auxiliary files that say something else than the source's, by name."""
    stored_quantization: StoredQuantization | None = None
    """How the weights are quantized, if stored names show it and no method that the config names explains them."""
    rebind: Callable[[Source, Manifest, Mapping[str, Any] | None], OpenedCheckpoint] | None = None
    """Binds other tensors under stored names to the model, with the options that this checkpoint was opened with."""

    @property
    def mesh(self) -> Mesh | None:
        """The mesh whose ranks the files are: the recorded one, else the given one; None where nobody says it."""
        return self.record.mesh if self.record is not None else self.given_mesh

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers per pipeline stage of that mesh."""
        return self.record.stages if self.record is not None else self.given_stages

    def prove(self) -> None:
        """Compare files that were read whole with the hashes that their place promises; raises as `Source.prove`."""
        self.source.prove(allow_unverified=self.allow_unverified)

    def list_unverified_files(self, equal: Collection[str] = ()) -> Iterator[str]:
        """Yield the files that were read and not compared with the hash that their place promises, as warnings.

        But for those of which an `equal` file has that hash.
        """
        for path, reason in self.source.proofs().unverified.items():
            if path in equal:
                continue
            yield f"{path} was not compared with its hash: {reason}"

    @property
    def whole(self) -> Manifest:
        """The manifest with optimizer states and extra tensors among its tensors."""
        return add_extra_tensors(add_states(self.manifest))

    def list_extra_tensors(self, kept: Mapping[str, Tensor] | None = None) -> tuple[ExtraTensor, ...]:
        """List the tensors that the model's class does not have, but for those that transformers ignores.

        Those in `kept` travel along; by default, those of the file that holds such tensors are.
        """
        if self.model is None or not self.manifest.extra:
            return ()
        from shardctl.models.names.extra_names import ExtraTensor, list_reported_extra

        reported = list_reported_extra(self.model, self.manifest.extra.values())
        apart = self.stored.extra if kept is None else kept
        return tuple(ExtraTensor(t.name, t.dtype.name, t.shape, t.nbytes, t.name in apart) for t in reported)

    def require_model(self, purpose: str) -> Model:
        """Return the model, or raise an error that says why it is needed and how to supply rules for the tensors."""
        if self.model is not None:
            return self.model
        if self.model_error is not None and self.config is not None and models.find_family(self.config) is not None:
            raise self.model_error  # the model is known, and names the tensors that do not fit
        example = f'[rules], "{self._find_largest_matrix()}" = ["tp", "fsdp"] and so on, "**" = [] for what stays whole'
        example += "; fsdp, pp, dp and cp need none" if self.untabled is not None else ""
        if self.model_error is not None:
            raise UnsupportedError(
                f"{self.model_error.message}, and {purpose} needs to know how to cut {self._group_tensors()}",
                hint=f"write a rule file and give it with --rules FILE: {example}",
            )
        raise SourceError(
            f"{self.source.name} has no {CONFIG}, and {purpose} needs to know how to cut {self._group_tensors()}",
            hint=f"name a config with --config PATH, or write a rule file for --rules FILE: {example}",
        )

    def require_placement(self, mesh: Mesh) -> Model:
        """Return the model, to place its tensors on a mesh.

        Where no table knows it, one that suffices for axes without.

        Cuts by other axes are derived. Raises as `require_model` where they cannot be.
        """
        if self.model is None and self.untabled is not None and self.untabled().places_on(mesh):
            return self.untabled().model
        if self.model is None and self.derived is not None:
            from shardctl.models.derived import can_divide

            if can_divide(self.derived(), mesh):
                return self.derived()
        return self.require_model(f"a mesh of {mesh}")

    def find_placement(self, mesh: Mesh) -> Model | None:
        """Find the same, or None where nobody knows how a mesh divides the tensors."""
        try:
            return self.require_placement(mesh)
        except (SourceError, UnsupportedError):
            return None

    def find_spec(self, name: str) -> PartitionSpec | None:
        """Find how a tensor, or the parameter of an optimizer state, is cut; None where nobody knows."""
        model = self.model or (self.find_placement(self.mesh) if self.mesh is not None else None)
        known = model.tensors.get((split_state_name(name) or ("", name))[1]) if model is not None else None
        return known.spec if known is not None else None

    def note_placement(self, mesh: Mesh) -> tuple[str, ...]:
        """Return what was taken from names and shapes to place tensors on a mesh, as warnings.

        None where a table knows.
        """
        if self.model is not None and self.model.counted and mesh.degree("pp") > 1:
            return (f"layers are counted by names, because no rule says where they are: {self.model.counted}",)
        if self.model is not None or self.untabled is None:
            return ()
        config = self.config or {}
        known = models.find_family(config) is not None or models.has_text_half(config)
        why = (self.model_error.message,) if self.model_error is not None and known else ()
        derivation = self.require_placement(mesh).derivation
        return *why, *((derivation.describe(),) if derivation is not None else ()), *self.untabled().notes(mesh)

    def note_names(self) -> tuple[str, ...]:
        """Return why the class that the config names will not find its tensors under the stored names, as warnings.

        None where a table knows them, or where no table knows the class.
        """
        config = self.config or {}
        if self.model is not None or self.model_error is None or models.find_family(config) is None:
            return ()
        why = self.model_error.message
        if self.stored_quantization is not None:
            return (f"{why}, and stay so, under the names that they have",)
        if is_maxtext(self.stored.tensors):
            why += f"; {self.model_error.hint}"
        return (f"the names do not fit the class in {CONFIG}, and are written as they are: {why}",)

    def _get_named_tensors(self) -> Mapping[str, Tensor]:
        """Get the tensors by the names of files, or by those that a config alone gives them."""
        return self.manifest.tensors if self.hypothetical else self.stored.tensors

    def _group_tensors(self) -> str:
        """Return the tensors, layers taken together."""
        return format_first_few(models.list_name_patterns(self._get_named_tensors()), _MAX_NAME_PATTERNS_SHOWN)

    def _find_largest_matrix(self) -> str:
        """Return the pattern of the largest matrix, as an example of what is worth cutting."""
        tensors = list(self._get_named_tensors().values())
        matrices = [tensor for tensor in tensors if len(tensor.shape) > 1] or tensors
        largest = max(matrices, key=lambda t: t.nbytes, default=None)
        return models.list_name_patterns([largest.name])[0] if largest else "**.weight"
