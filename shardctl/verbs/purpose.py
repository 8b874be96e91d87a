"""What the devices of a plan are for: the options, and the workload that they come to for a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from shardctl.errors import UsageError
from shardctl.memory.inventory import FLOATING
from shardctl.memory.workload import Serving, Training

if TYPE_CHECKING:
    from pathlib import Path

    from shardctl.memory.calibrate import Calibration
    from shardctl.memory.devices import Device
    from shardctl.memory.workload import Offload, Profile, Recompute, Schedule
    from shardctl.mesh import Mesh
    from shardctl.verbs.subject import Subject

Use = Literal["serve", "train"]
_OPTIONS: Final = {"virtual_stages": "vp", "sequence_parallel": "no-sequence-parallel", "flash": "attention"}
"""The options of the command line that are not called as the fields are."""
USUAL_CONTEXT: Final = 8192
"""Tokens per sequence if nobody says, unless the model was made for fewer."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """What the devices are for; every field is an option of the command line, and None is its default."""

    use: Use | None = None
    """By default `train` where something is asked that only training has, such as an optimizer or fsdp ranks."""
    device: Device | None = None
    """What each rank runs on; without one, needs are stated and nothing is said to fit."""
    devices: int | None = None
    """How many there are to search over; by default the ranks of the mesh."""
    search: bool = False
    """Whether all meshes of them are compared."""
    narrower: str | None = None
    """The type that weights would have if someone quantised them: `fp8`, `int8` or `int4`."""
    seq_len: int | None = None
    """Tokens per sequence."""
    batch: int | None = None
    """Sequences: in serving those held at once, in training those of one forward pass of a data-parallel rank."""
    kv_dtype: str | None = None
    """Of the key/value cache; safetensors' name."""
    encoder_len: int | None = None
    """Tokens per sequence that the encoder reads, in serving; by default `seq_len`."""
    batched_tokens: int | None = None
    """The most tokens of one forward pass, in serving."""
    max_seqs: int | None = None
    """The most sequences at once, for which the sampler makes room, in serving."""
    microbatches: int | None = None
    profile: Profile | None = None
    optimizer: str | None = None
    zero: int | None = None
    recompute: Recompute | None = None
    schedule: Schedule | None = None
    virtual_stages: int | None = None
    offload: Offload | None = None
    offload_parameters: bool | None = None
    sequence_parallel: bool | None = None
    flash: bool | None = None
    gradient_dtype: str | None = None
    """Of gradients that are kept; safetensors' name."""
    calibration: Path | Calibration | None = None
    """A log of measured peaks, which the estimate of training is fitted to, or what it was fitted to already."""

    def decided(self, mesh: Mesh) -> Use:
        """What they are for: as said, else training where something is asked that only training has."""
        if self.use is not None:
            return self.use
        return "train" if mesh.degree("fsdp") > 1 or self.calibration or self._of_training() else "serve"

    def _of_training(self) -> dict[str, Any]:
        """The options that only training has, as far as they were given; by the names of `Training`."""
        given = {
            "microbatches": self.microbatches,
            "profile": self.profile,
            "optimizer": self.optimizer,
            "zero": self.zero,
            "recompute": self.recompute,
            "schedule": self.schedule,
            "virtual_stages": self.virtual_stages,
            "offload": self.offload,
            "offload_parameters": self.offload_parameters,
            "gradient_dtype": self.gradient_dtype,
            "sequence_parallel": self.sequence_parallel,
            "flash": self.flash,
        }
        return {name: value for name, value in given.items() if value is not None}

    def _of_serving(self) -> dict[str, object]:
        """The options that only serving has, as far as they were given."""
        names = ("kv_dtype", "encoder_len", "batched_tokens", "max_seqs")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def _serving(self, about: Subject, tokens: int) -> Serving:
        """The work of a model that is described; raises UsageError for what it has not."""
        assert about.anatomy is not None  # noqa: S101 - there is no serving of others
        if self.encoder_len is not None and not any(layer.encoder for layer in about.anatomy.layers):
            raise UsageError("--encoder-len needs a model with an encoder and a decoder", hint="leave it out")
        if self.encoder_len is not None and about.anatomy.source_positions:
            raise UsageError(
                f"the encoder of this model always reads {about.anatomy.source_positions:,} positions",
                hint="leave --encoder-len out",
            )
        unkept = next((name for name in ("kv_dtype", "max_seqs") if getattr(self, name) is not None), "")
        if unkept and not about.anatomy.generates:
            raise UsageError(f"--{unkept.replace('_', '-')} needs a model that generates", hint="leave it out")
        if self.max_seqs is not None and (self.batch or 1) > self.max_seqs:
            raise UsageError(f"--batch {self.batch} is more than --max-seqs {self.max_seqs}", hint="raise --max-seqs")
        work = Serving(tokens, self.batch or 1, self.kv_dtype, source=self.encoder_len, rows=self.max_seqs)
        return work if self.batched_tokens is None else replace(work, batched_tokens=self.batched_tokens)

    def workload(self, about: Subject, mesh: Mesh) -> Serving | Training | None:
        """What the devices do, with the defaults that the model decides; None to serve one that is not described.

        Raises UsageError for options that contradict each other.
        """
        use, training = self.decided(mesh), self._of_training()
        if use == "serve" and (training or self.calibration):
            name = next(iter(training), "calibrate")
            option = _OPTIONS.get(name, name.replace("_", "-"))
            raise UsageError(f"--{option} is about training, and this is about serving", hint="add --for train")
        if use == "train" and self._of_serving():
            option = next(iter(self._of_serving())).replace("_", "-")
            raise UsageError(f"--{option} is about serving, and this is about training", hint="add --for serve")
        if use == "train" and self.narrower is not None:
            raise UsageError(
                f"--dtype {self.narrower} is about serving, and this is about training",
                hint="codes have no gradients; --optimizer adamw-8bit narrows what training keeps",
            )
        if use == "serve" and not self.search and self.devices not in {None, mesh.world}:
            raise UsageError(
                f"--gpus {self.devices} is about --search, and the mesh is of {mesh.world:,}",
                hint=f"add --search, or say what they do, such as --tp {self.devices}",
            )
        if about.anatomy is None and use == "serve":
            return None
        if about.anatomy is None and not about.dequantised:
            _check_no_codes(about)
        limit = about.anatomy.positions if about.anatomy is not None else None
        tokens = self.seq_len or min(limit or USUAL_CONTEXT, USUAL_CONTEXT)
        if use == "serve":
            return self._serving(about, tokens)
        computes = about.dtype if about.dtype in {"F16", "BF16"} else "BF16"
        if (self.virtual_stages or 1) > 1:
            training.setdefault("schedule", "interleaved")
        if (self.virtual_stages or 1) > 1 and training["schedule"] != "interleaved":
            raise UsageError(
                f"--vp {self.virtual_stages} is about interleaved pipelines, and this is about {self.schedule}",
                hint="give --schedule interleaved, or leave --schedule out",
            )
        return replace(Training(sequence=tokens, micro_batch=self.batch or 1, dtype=computes), **training)


def _check_no_codes(about: Subject) -> None:
    """Raises UsageError for matrices of codes where nobody knows which weights they stand for."""
    for kind in about.inventory.kinds:
        if kind.matrix and kind.dtype.name not in {*FLOATING, "I64", "BOOL"}:
            raise UsageError(
                f"{kind.example} is {kind.dtype}, and codes cannot be trained",
                hint="name the model's config with --config, which says what the codes stand for",
            )
