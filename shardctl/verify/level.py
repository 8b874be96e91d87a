"""Describes the result of a verification, level by level."""

from __future__ import annotations

import re
from dataclasses import field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.amounts import format_plural
from shardctl.base.errors import Mismatch
from shardctl.base.result_view import ResultView
from shardctl.base.value import state_class, value_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.base.errors import ShardctlError
    from shardctl.verify.cast_losses import UnroundedDistance
    from shardctl.verify.consumer import ConsumerVerdict
    from shardctl.verify.download_hashes import DownloadHashes
    from shardctl.verify.engine_result import EngineResult
    from shardctl.verify.finding import CheckFinding
    from shardctl.verify.forward_result import ForwardResult
    from shardctl.verify.library_headers import LibraryHeaders

ATTESTATION: Final = "attestation"
"""The level that checks a signature, if one is asked for; it comes before all others."""
LEVELS: Final[dict[str, tuple[str, ...]]] = {
    "quick": ("structure",),
    "full": ("structure", "content", "identity"),
    "load": ("structure", "content", "identity", "load"),
    "forward": ("structure", "content", "identity", "load", "forward"),
}
"""What can be asked for, each with what it implies; `identity` only where there is something to compare with."""


@value_class
class LoadedRank:
    """What one rank took to load."""

    rank: int | None
    """None for a checkpoint that is not cut."""
    label: str
    """Its place in the mesh, such as ``pp0 tp1``."""
    device: str
    nbytes: int
    """Bytes of its tensors as they are stored; both copies of a tie that is stored twice."""
    seconds: float
    peak_bytes: int
    """The most that was allocated on the device while they were loaded; on the CPU what they take."""
    planned_bytes: int | None
    """What `plan` says that its weights take, ties counted once; None where the mesh or the model is not known."""


@value_class
class BlockPlacement:
    """Where a block of a checkpoint that is not cut into ranks was placed."""

    block: str
    """Such as `model.layers.3`."""
    place: str
    """A device, `cpu` for host memory, or `disk` for the folder of `--offload-folder`."""
    nbytes: int


@value_class
class SignatureCheck:
    """What a signature that holds says of a directory."""

    signer: str
    """Whose trusted signature it is."""
    files: int
    """Files that it covers."""
    source_digest: str = ""
    """Of the source, as the statement has it; empty without a statement of shardctl."""
    digest: str = ""
    """Of the elements, as the statement has it; empty without one."""


@state_class
class LevelResult:
    """The outcome of one level of checks."""

    name: str
    """`attestation`, `structure`, `policy`, `content`, `identity`, `load`, `forward` or `engine`."""
    status: Literal["passed", "failed", "skipped", "unfinished"] = "passed"
    """Unfinished is no verdict: the machine lacked what the level needs."""
    reason: str = ""
    """Why it was skipped, or could not be finished."""
    findings: list[CheckFinding] = field(default_factory=list)
    tensors: int = 0
    """Tensors checked."""
    nbytes: int = 0
    """Bytes of tensors read."""
    seconds: float = 0.0
    strict: bool = False
    """Makes every warning an error."""
    notes: list[str] = field(default_factory=list)
    """What was done otherwise than asked, and with what."""
    ranks: list[LoadedRank] = field(default_factory=list)
    """Of `load`."""
    placement: list[BlockPlacement] = field(default_factory=list)
    """Of `load`: where each block went, if blocks were placed one by one."""
    forward: ForwardResult | None = None
    """Of `forward`."""
    trouble: ShardctlError | None = None
    """What of the machine kept it from being finished."""
    engine: EngineResult | None = None
    """Of `engine`."""
    library: LibraryHeaders | None = None
    """Of `content`."""
    downloads: DownloadHashes | None = None
    """Of `content`."""
    unrounded: list[UnroundedDistance] = field(default_factory=list)
    """Of `identity`: how far the weights are from those before a cast or a quantization, for information."""
    equal_files: tuple[str, ...] = ()
    """Of `identity`: files that were compared by their hashes, and not element by element."""
    attestation: SignatureCheck | None = None
    """Of `attestation`, if the signature holds."""

    def add(self, findings: Iterator[CheckFinding]) -> None:
        """Note findings; an error fails the level."""
        self.findings += (replace(found, severity="error") if self.strict else found for found in findings)
        if self.errors:
            self.status = "failed"

    def skip(self, reason: str) -> LevelResult:
        """Return the level, skipped, unless something has failed already."""
        self.reason = reason
        if self.status != "failed":
            self.status = "skipped"
        return self

    def give_up(self, trouble: ShardctlError) -> None:
        """Note what of the machine kept the level from being finished; what has failed already stays failed."""
        if self.trouble is not None:
            return
        self.trouble = trouble
        self.reason = f"{trouble.message}; {trouble.hint}" if trouble.hint else trouble.message
        if self.status != "failed":
            self.status = "unfinished"

    def describe_reading(self) -> Iterator[str]:
        """Describe who else has read the files, with which hashes they were compared, and what rounding changed."""
        if self.library is not None:
            yield from self.library.describe()
        if self.downloads is not None:
            yield from self.downloads.describe()
        yield from map(str, self.unrounded)

    @property
    def errors(self) -> list[CheckFinding]:
        """The findings that fail the level."""
        return [finding for finding in self.findings if finding.severity == "error"]


@value_class
class VerifyResult(ResultView):
    """Everything `verify` found."""

    path: str
    against: str
    digest: str
    """Of the elements as they are now; empty below level full."""
    levels: tuple[LevelResult, ...]
    required: tuple[str, ...] = ()
    """Levels that must not be skipped."""
    unchecked: tuple[str, ...] = ()
    """What was not looked at, in words: a checkpoint may be wrong there and `ok`."""
    consumer: ConsumerVerdict | None = None
    """Whether the consumer that `--for` names should load it."""
    error: str = ""
    """Why the checkpoint could not be verified at all, in a report; then nothing is known of it."""

    @property
    def unmet(self) -> tuple[LevelResult, ...]:
        """The required levels that were skipped, unless something was found wrong: then they mean nothing."""
        if any(level.status == "failed" for level in self.levels):
            return ()
        return tuple(level for level in self.levels if level.status == "skipped" and level.name in self.required)

    @property
    def unfinished(self) -> tuple[LevelResult, ...]:
        """The levels without a verdict."""
        return tuple(level for level in self.levels if level.status == "unfinished")

    @property
    def trouble(self) -> ShardctlError | None:
        """What kept a level from being finished; None where another level says that something is wrong."""
        failed = any(level.status == "failed" for level in self.levels)
        return None if failed else next((level.trouble for level in self.unfinished), None)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, every required level was run and finished, and the consumer should load it."""
        wrong = any(level.status in {"failed", "unfinished"} for level in self.levels)
        loads = self.consumer is None or self.consumer.loads
        return not self.error and not wrong and not self.unmet and loads

    @property
    def exit_code(self) -> int:
        """That of the program: 0, 3 if something is wrong or skipped that is required, else that of the trouble."""
        if self.trouble is not None:
            return self.trouble.exit_code
        return 0 if self.ok else Mismatch.exit_code

    @property
    def verdict(self) -> str:
        """The answer in one line: ``ok`` and what that rests on, ``NOT OK`` and what is wrong, or ``NOT VERIFIED``."""
        warnings = sum(finding.severity == "warning" for finding in self.findings)
        noted = f"; {format_plural(warnings, 'warning')}" if warnings else ""
        if self.error:
            return "NOT VERIFIED"
        if self.trouble is not None:
            return f"NOT VERIFIED: {', '.join(level.name for level in self.unfinished)} could not be finished{noted}"
        return (f"ok{self._describe_grounds()}" if self.ok else f"NOT OK: {self._describe_faults()}") + noted

    def _describe_grounds(self) -> str:
        """Describe what was read and compared, where nothing was found wrong."""
        skipped = [level.name for level in self.levels if level.status == "skipped"]
        if skipped:
            return f", but skipped: {', '.join(skipped)}"
        passed = {level.name: level for level in self.levels}
        signature, policy = passed.pop(ATTESTATION, None), passed.pop("policy", None)
        allowed = ["within the policy"] if policy else []
        signed = f"signed by {signature.attestation.signer}" if signature and signature.attestation else ""
        if (signed or allowed) and len(passed) == 1 and self.consumer is None:
            first = ", ".join(filter(None, [signed, *allowed]))
            return f": {first}; of tensors only headers were read; add --level full"
        if len(passed) == 1:
            loads = f"{self.consumer.describe()}; add --level full to read values" if self.consumer is not None else ""
            return f": {loads}" if loads else " (headers only: values were not read; add --level full)"
        grounds = [*([signed] if signed else []), *allowed]
        grounds += ["every byte read"] if "content" in passed else []
        if "identity" in passed:
            rounded = " after rounding" if passed["identity"].unrounded else ""
            grounds.append(f"equal to {self.against}{rounded}")
        elif "content" in passed:
            alone = any(found.check == "digest" for found in passed["content"].findings)
            grounds.append("but compared with nothing: add --against SRC" if alone else "equal to what was recorded")
        further = [name for name in passed if name in {"load", "forward", "engine"}]
        grounds += [f"{' and '.join(further)} passed"] if further else []
        return f": {', '.join(grounds)}"

    def _describe_faults(self) -> str:
        """Describe the tensors that are wrong and where the first is; without tensors, the first finding."""
        errors = [finding for finding in self.findings if finding.severity == "error"]
        if not errors and self.unmet:
            return ", ".join(f"{level.name} is required and was skipped" for level in self.unmet)
        if not errors and self.consumer is not None:
            return self.consumer.describe()
        first = errors[0]
        wrong = {finding.tensor for finding in errors if finding.tensor}
        if not all(finding.tensor for finding in errors):
            more = f"; {format_plural(len(errors) - 1, 'more finding')}" if len(errors) > 1 else ""
            return f"{first.message}{more}"
        checked = max((level.tensors for level in self.levels), default=0)
        verb = "changed" if {finding.check for finding in errors} <= {"digest", "identity", "crc32"} else "wrong"
        places = (each.file for each in errors if each.tensor == first.tensor and _names_one_file(each))
        file = next((f" in {place}" for place in places if place), "")
        lead = "" if len(wrong) == 1 else "first "
        count = f"{len(wrong):,} of {format_plural(max(checked, len(wrong)), 'tensor')}"
        return f"{count} {verb}: {lead}{first.tensor}{file}"

    @property
    def findings(self) -> list[CheckFinding]:
        """All findings, errors first."""
        return sorted((f for level in self.levels for f in level.findings), key=lambda f: f.severity)


def _names_one_file(finding: CheckFinding) -> bool:
    """Return whether the message names no second file: of a tensor in two files, nobody knows which one changed."""
    suffix = PurePath(finding.file).suffix
    return len({word for word in re.split(r"[\s,;]+", finding.message) if suffix and word.endswith(suffix)}) <= 1
