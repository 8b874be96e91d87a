"""Makes of an opened checkpoint one into which adapters are merged, as PEFT's `merge_and_unload` does.

What follows, from the plan of a conversion to the comparison of its result, takes it for any other checkpoint.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.base.value import state_class
from shardctl.checkpoint.adapters.adapted_base import find_base_name, find_tables, fit_base
from shardctl.libraries.files.impostors import (
    ADAPTER_CONFIG,
    NEW_EMBEDDINGS,
    list_adapter_files,
    warn_of_adapter,
)
from shardctl.tensors.box import Box
from shardctl.tensors.copyplan import cover_tensor
from shardctl.tensors.manifest import CheckpointFile, Chunk, ConstantFill, Region, Tensor, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from shardctl.checkpoint.adapters.merge_targets import MergeTarget
    from shardctl.checkpoint.computed_source import ComputedArray
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.libraries.peft.adapter import Adapter, NewRows
    from shardctl.libraries.peft.modules import AdaptedModule
    from shardctl.models.adaptation.strided_view import StridedView

MERGED: Final = "merge"
"""The option of a record that names the adapters that were merged into what its checkpoint holds."""

MERGE_ARITHMETIC: Final = "merge_arithmetic"
"""The option of a record that names the version of the arithmetic of that merge."""
ARITHMETIC_VERSION: Final = 2
"""The version of `models.adaptation`; raise it with every change there that can change a bit of a merge.

Version 1, which records do not name, depended on the processor.
"""


def merge_adapters(
    checkpoint: OpenedCheckpoint, paths: Sequence[Path], threads: int, *, partial: bool = False
) -> OpenedCheckpoint:
    """Return `checkpoint` with adapters merged into it one after the other, which is done when weights are read.

    What an adapter lacks of what its config lists is a warning if it may be `partial`, or if it lies next to the model:
    transformers applies what it has then, and the result computes the same. Raises SourceError otherwise, and where an
    adapter does not fit the checkpoint, UnsupportedError for one of a kind that cannot be merged, and for a checkpoint
    whose weights are quantized.
    """
    if not paths:
        return checkpoint
    from shardctl.libraries.peft.adapter import open_adapter

    for number, path in enumerate(paths):
        adapter = checkpoint.resources.enter_context(open_adapter(path))
        label = adapter.folder.resolve().name + (f" ({number + 1})" if number else "")
        folder = checkpoint.source.folder
        beside = folder is not None and path.samefile(folder)
        checkpoint = _AdapterMerge(checkpoint, adapter, label).merge(threads, partial=partial or beside)
        if beside:
            checkpoint = _drop_merged_files(checkpoint)
    return checkpoint


def _drop_merged_files(checkpoint: OpenedCheckpoint) -> OpenedCheckpoint:
    """Leave out an adapter that lay next to the model and is merged, because transformers would apply it again."""
    manifest, own = checkpoint.manifest, {*list_adapter_files(checkpoint.source), ADAPTER_CONFIG}
    objects = tuple(replace(each, policy="drop") if each.name in own else each for each in manifest.objects)
    said = warn_of_adapter(checkpoint.source)
    warnings = tuple(text for text in manifest.warnings if text not in said)
    return replace(checkpoint, manifest=replace(manifest, objects=objects, warnings=warnings))


@state_class
class _AdapterMerge:
    """One adapter on its way into a checkpoint."""

    checkpoint: OpenedCheckpoint
    adapter: Adapter
    label: str
    """What the adapter is called in the paths of its files."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    arrays: dict[str, ComputedArray] = field(default_factory=dict)
    layer: str = ""
    """Tells the files of tensors that are computed of other computed ones from the files of those."""

    @property
    def file(self) -> str:
        """The path that the adapter's tensors have in the result's source."""
        return f"{self.label}/{self.adapter.file}"

    def merge(self, threads: int, *, partial: bool) -> OpenedCheckpoint:
        """Return the checkpoint with the adapter merged into it; see `merge_adapters`."""
        from shardctl.checkpoint.computed_source import ComputedSource
        from shardctl.models.adaptation.adapted_weight import ADAPTING_BYTES

        before, adapter = self.checkpoint, self.adapter
        if before.config is not None and models.find_quantization_config(before.config) is not None:
            raise UnsupportedError(
                "an adapter cannot be merged into quantized weights",
                hint="add --dtype bf16, which takes them back to numbers first",
            )
        self.checkpoint, whole = fit_base(before, adapter)
        self.tensors = dict(self.checkpoint.manifest.tensors)
        if adapter.new_rows is not None:
            self._append_rows(before, adapter.new_rows)
        before = replace(self.checkpoint, manifest=replace(self.checkpoint.manifest, tensors=dict(self.tensors)))
        self.checkpoint = before
        for name, tensor in whole.items():
            self._replace(name, tensor)
        self._require_rows(whole)
        known = before.model.tensors if before.model is not None else before.manifest.tensors
        for name, tensor in adapter.tensors.rows.items():
            if name in known or models.find_weight_name(before.model, name) not in adapter.tensors.rows:
                self._replace_rows(name, tensor)  # those of a tied head are the embedding's again
        others = {self.file: (adapter.source, adapter.file)}
        files = {**before.manifest.files, self.file: CheckpointFile(self.file, adapter.size)}
        if adapter.new_rows is not None:
            path = self._name_rows_file()
            others[path] = (adapter.new_rows.source, NEW_EMBEDDINGS)
            files[path] = CheckpointFile(path, adapter.new_rows.size)
        source, thread_bytes = before.source, threads * ADAPTING_BYTES
        targets = self._find_targets()
        if any(self._is_computed(chunk) for target in targets for chunk in self.tensors[target.name].chunks):
            # PEFT rounds a tensor that an adapter has whole to the type of the base's before it adds a product.
            source = ComputedSource(source, self.arrays, thread_bytes=thread_bytes, note="", others=others)
            self.arrays, self.layer = {}, "on its own copy, "
        for target in targets:
            self._replace_adapted_tensor(target)
        changed = {n: t for n, t in before.manifest.tensors.items() if self.tensors[n] is not t}
        warnings = self._find_gaps(changed, partial=partial)
        note = f"{len(changed):,} tensors have the adapter {self.label} merged into them ({adapter.settings.kind})"
        return replace(
            before,
            source=ComputedSource(source, self.arrays, thread_bytes=thread_bytes, note=note, others=others),
            manifest=replace(
                before.manifest,
                tensors=self.tensors,
                files=files,
                warnings=(*before.manifest.warnings, *warnings),
            ),
            adapted=(*before.adapted, *changed.values()),
        )

    def _find_gaps(self, changed: Collection[str], *, partial: bool) -> tuple[str, ...]:
        """Find what the adapter lacks, as warnings; raises SourceError unless it may be `partial`."""
        from shardctl.checkpoint.adapters.listed_modules import find_gaps

        before = self.checkpoint
        shapes = {name: tensor.shape for name, tensor in before.manifest.tensors.items()}
        gaps = find_gaps(self.adapter.settings, shapes, changed, model=before.model, config=before.config)
        if not partial:
            gaps.require_none()
        return (*gaps.notes, *((gaps.describe(),) if gaps.missing else ()))

    def _find_targets(self) -> list[MergeTarget]:
        """Find what each module of the adapter changes; raises SourceError for modules that the base does not have."""
        from shardctl.checkpoint.adapters.merge_targets import find_target

        found, missing = [], []
        for module in self.adapter.tensors.modules.values():
            targets = list(find_target(self.checkpoint, self.adapter.settings, module))
            found += targets
            if not targets:
                missing.append(module.module)
        self._refuse_missing(missing)
        return found

    def _refuse_missing(self, missing: Sequence[str]) -> None:
        if missing:
            base, names = self.adapter.settings.base, format_first_few(missing)
            raise SourceError(
                f"the adapter targets {names}, but {self.checkpoint.source.name} has no such module",
                hint=f"it was trained on {base}" if base else f"see base_model_name_or_path in {ADAPTER_CONFIG}",
            )

    def _replace(self, name: str, tensor: Tensor) -> None:
        """Put a tensor of the adapter in the place of one of the base."""
        from shardctl.models.adaptation.adapted_vector import AdaptedVector
        from shardctl.models.adaptation.strided_view import StridedView

        canonical = models.find_weight_name(self.checkpoint.model, name)
        base = self.tensors.get(canonical)
        if base is None:
            self._refuse_missing([name])
            return
        if base.shape != tensor.shape:
            raise SourceError(
                f"the adapter has a {name} of {list(tensor.shape)}, but the base has one of {list(base.shape)}",
                hint="it may have been trained on another model",
            )
        view = StridedView.of(tensor).in_file(self.file)
        if base.dtype == tensor.dtype:
            self.tensors[canonical] = _place(base, view.where)
            return
        self._check_computable(base, view)
        path = self._name_path(canonical)
        flat = replace(view, shape=(tensor.size,), where=Region(self.file, view.where.offset, (view.dtype.unit_bytes,)))
        self.arrays[path] = AdaptedVector(canonical, flat.index(), base.dtype)
        self.tensors[canonical] = _place(base, Region(path, 0, compute_dense_strides(base.dtype, base.shape)))

    def _append_rows(self, before: OpenedCheckpoint, rows: NewRows) -> None:
        """Append rows of further tokens to the tables of the base, which `before` has without them."""
        from shardctl.models.adaptation.adapted_vector import AdaptedVector
        from shardctl.models.adaptation.strided_view import StridedView

        for name, tensor in find_tables(before, self.checkpoint, rows).items():
            base, table = before.manifest.tensors[find_base_name(before, name)], self.tensors[name]
            view = StridedView.of(tensor).in_file(self._name_rows_file())
            where = view.where
            if tensor.dtype != base.dtype:
                self._check_computable(base, view)
                path = f"{self._name_path(name)}, rows"
                flat = replace(view, shape=(tensor.size,), where=replace(view.where, strides=(view.dtype.unit_bytes,)))
                self.arrays[path] = AdaptedVector(name, flat.index(), base.dtype)
                where = Region(path, 0, compute_dense_strides(base.dtype, tensor.shape))
            box = Box((base.shape[0], 0), tensor.shape)
            chunk = Chunk(box, base.dtype, where, tensor.name)
            self.tensors[name] = replace(table, chunks=(*base.chunks, chunk))

    def _require_rows(self, whole: Collection[str]) -> None:
        """Raise SourceError for a table of tokens that the adapter's vocabulary leaves without rows."""
        filled = (
            name
            for name, tensor in self.tensors.items()
            if any(isinstance(c.where, ConstantFill) for c in tensor.chunks)
        )
        lacking = [name for name in filled if name not in whole]
        if lacking:
            raise SourceError(
                f"the adapter has another vocabulary than the base, but no {format_first_few(lacking)}",
                hint="save it with save_embedding_layers=True, or resize the base and give that",
            )

    def _replace_rows(self, name: str, rows: Tensor) -> None:
        """Put rows of the adapter in the place of some of a table of tokens."""
        from shardctl.models.adaptation.adapted_rows import AdaptedRows
        from shardctl.models.adaptation.strided_view import StridedView
        from shardctl.tensors.bands import ChunkIndex

        canonical = models.find_weight_name(self.checkpoint.model, name)
        base = self.tensors.get(canonical)
        if base is None:
            self._refuse_missing([name])
            return
        module = name.removesuffix(".weight")
        tokens = self.adapter.settings.tokens
        numbers = next((found for end, found in tokens if not end or f".{module}".endswith(f".{end}")), ())
        if (len(numbers), *base.shape[1:]) != rows.shape or max(numbers, default=0) >= base.shape[0]:
            raise SourceError(
                f"the adapter has rows of {list(rows.shape)} for {name} of {list(base.shape)}, but {ADAPTER_CONFIG} "
                f"names {len(numbers)} rows (trainable_token_indices), up to {max(numbers, default=0)}",
                hint="the config may belong to another adapter",
            )
        view = StridedView.of(rows).in_file(self.file)
        self._check_computable(base, view)
        if any(self._is_computed(chunk) for chunk in base.chunks):
            raise UnsupportedError(f"the adapter updates {base.name} twice, in different ways")
        path = self._name_path(canonical)
        self.arrays[path] = AdaptedRows(canonical, base.shape, ChunkIndex(cover_tensor(base)), view.index(), numbers)
        self.tensors[canonical] = _place(base, Region(path, 0, compute_dense_strides(base.dtype, base.shape)))

    def _replace_adapted_tensor(self, target: MergeTarget) -> None:
        """Put a tensor, and a bias, in the place of what is adapted of them."""
        base = self.tensors[target.name]
        if any(self._is_computed(chunk) for chunk in base.chunks):
            raise UnsupportedError(f"the adapter updates {base.name} twice, in different ways")
        chunks = []
        for part, weight in target.build_weights(base, self._find_views(target.module)):
            self._check_computable(base)
            path = self._name_path(weight.name)
            self.arrays[path] = weight
            lead = len(base.shape) - len(weight.shape)
            strides = (*(weight.nbytes,) * lead, *compute_dense_strides(base.dtype, weight.shape))
            chunks.append(Chunk(part, base.dtype, Region(path, 0, strides), base.chunks[0].name))
        self.tensors[target.name] = replace(base, chunks=tuple(chunks))
        if target.module.bias is not None:
            self._add_bias(target)

    def _add_bias(self, target: MergeTarget) -> None:
        from shardctl.models.adaptation.adapted_vector import AdaptedVector
        from shardctl.tensors.bands import ChunkIndex

        name = target.bias_name
        base = self.tensors.get(name)
        added = self._find_views(target.module)["bias"]
        if base is None or base.shape != added.shape:
            raise SourceError(f"the adapter adds a bias to {target.module.module}, which has none in the base")
        self._check_computable(base, added)
        path = self._name_path(name)
        stored = ChunkIndex(cover_tensor(base))
        self.arrays[path] = AdaptedVector(name, stored, base.dtype, added.index(), target.scaling)
        self.tensors[name] = _place(base, Region(path, 0, compute_dense_strides(base.dtype, base.shape)))

    def _find_views(self, module: AdaptedModule) -> dict[str, StridedView]:
        from shardctl.models.adaptation.strided_view import StridedView

        parts = {"down": module.down, "up": module.up, "bias": module.bias, "magnitude": module.magnitude}
        return {name: StridedView.of(part).in_file(self.file) for name, part in parts.items() if part is not None}

    def _name_path(self, name: str) -> str:
        """Name the file of a tensor that is worked out, which tells other settings of an adapter apart."""
        return f"{name} (with {self.label}, {self.layer}{self.adapter.config_hash[:8]})"

    def _name_rows_file(self) -> str:
        return f"{self.label}/{NEW_EMBEDDINGS}"

    def _is_computed(self, chunk: Chunk) -> bool:
        return isinstance(chunk.where, Region) and chunk.where.file in self.arrays

    def _check_computable(self, *stored: Tensor | StridedView) -> None:
        """Raise UnsupportedError for types that PEFT does not compute with in F32."""
        from shardctl.models.adaptation.numbers import COMPUTABLE

        for each in stored:
            if each.dtype.name not in COMPUTABLE:
                raise UnsupportedError(f"{each.name} is {each.dtype}, into which no adapter can be merged")


def _place(base: Tensor, where: Region) -> Tensor:
    """Return a tensor whose elements lie elsewhere."""
    chunk = Chunk(Box.whole(base.shape), base.dtype, where, base.chunks[0].name)
    return replace(base, chunks=(chunk,))


def describe_adapters(paths: Sequence[Path]) -> str:
    """Return what a record calls adapters: paths are the business of one machine."""
    return ", ".join(path.resolve().name for path in paths)
