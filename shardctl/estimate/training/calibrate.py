"""Fits the uncertain parts of an estimate to measured peaks: a factor on activations, a constant overhead."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast, get_args

from shardctl.base.errors import ShardctlError, SourceError, UsageError
from shardctl.base.value import value_class
from shardctl.estimate.term import COUNTERS, Counter, MemoryTerm, sum_terms
from shardctl.estimate.workload import (
    PROFILES,
    Allocator,
    AttentionKernel,
    ChunkedLoss,
    CompiledPart,
    Float8Recipe,
    Offload,
    OptimizerKernel,
    Recompute,
    RecomputedModule,
    Schedule,
    TrainingWorkload,
)
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json
from shardctl.tensors.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

UNKNOWNS: Final = 2
"""Coefficients that are fitted, and so the least measurements that can be fitted to."""
_CALIBRATED_CATEGORIES: Final = frozenset({"activations", "workspace"})
_INTEGER_KEYS: Final = frozenset({"sequence", "micro_batch", "microbatches", "virtual_stages", "recompute_every"})
_BOOLEAN_KEYS: Final = frozenset(
    {
        "sequence_parallel",
        "offload_parameters",
        "dropout",
        "fused_gradients",
        "fused_loss",
        "exchanged_heads",
        "offload_checkpoints",
        "step_in_backward",
        "float8_gathered",
    }
)
_CHOICES_BY_KEY: Final[Mapping[str, tuple[object, ...]]] = {
    "profile": PROFILES,
    "attention": get_args(AttentionKernel),
    "recompute": get_args(Recompute),
    "schedule": get_args(Schedule),
    "offload": get_args(Offload),
    "compiled": get_args(CompiledPart),
    "float8": get_args(Float8Recipe),
    "chunked_loss": get_args(ChunkedLoss),
    "optimizer_kernel": get_args(OptimizerKernel),
    "allocator": get_args(Allocator),
    "zero": (0, 1, 2, 3),
}
_RECOMPUTED_MODULE_NAMES: Final = get_args(RecomputedModule)
"""What `recompute_modules`, a list, may name."""
_MOMENT_DTYPE_NAMES: Final = ("F32", "F16", "BF16", "F8_E4M3")
"""What `moment_dtypes`, a list of two, may name."""
_STRING_KEYS: Final = frozenset({"optimizer", "dtype", "gradient_dtype"})


@value_class
class PeakMeasurement:
    """The peak of one run."""

    mesh: Mesh
    work: TrainingWorkload
    peak: int
    """Bytes of the heaviest rank, such as `torch.cuda.max_memory_allocated()`."""
    line: int
    """Of the log, from 1."""
    counter: Counter = "allocated"
    """Who counted them."""


@value_class
class CalibrationLine:
    """What became of one measurement."""

    measurement: PeakMeasurement
    before: int
    """Bytes that were estimated."""
    after: int
    """Bytes that the fitted coefficients make of it."""

    @property
    def error_before(self) -> float:
        """Relative to the measured peak; positive where too much was estimated."""
        return self.before / self.measurement.peak - 1

    @property
    def error_after(self) -> float:
        """The same, fitted."""
        return self.after / self.measurement.peak - 1


@value_class
class FittedCalibration:
    """The fitted coefficients, and how well they do."""

    scale: float
    """What activations and what is alive beside them are multiplied by."""
    overhead: int
    """Bytes that are allocated besides."""
    lines: tuple[CalibrationLine, ...]

    @property
    def worst_before(self) -> float:
        """The greatest relative error before, as a positive number."""
        return max(abs(line.error_before) for line in self.lines)

    @property
    def worst_after(self) -> float:
        """The greatest relative error after."""
        return max(abs(line.error_after) for line in self.lines)

    def apply(self, terms: Sequence[MemoryTerm]) -> tuple[MemoryTerm, ...]:
        """Return the same terms with the fitted coefficients.

        The interval is what the worst of the measurements leaves.
        """
        source = f"fitted to {len(self.lines)} measured peaks"
        off = self.worst_after * max((line.measurement.peak for line in self.lines), default=0)
        found = []
        for term in terms:
            if term.tier == "device" and term.category in _CALIBRATED_CATEGORIES:
                size = term.nbytes * self.scale
                spread = min(1, off / size) if size else 0
                interval = (round(size * (1 - spread)), round(size * (1 + spread)))
                formula = f"{self.scale:.4g} * ({term.formula})"
                found.append(
                    replace(
                        term, nbytes=round(size), formula=formula, source=f"{term.source}; {source}", interval=interval
                    )
                )
            else:
                found.append(term)
        if self.overhead:
            interval = (self.overhead, self.overhead)
            found.append(MemoryTerm("overhead", "workspace", self.overhead, source=source, interval=interval))
        before, after = (sum_terms(some, counter="allocated").nbytes for some in (terms, found))
        return tuple(_scale_slack(term, after, before) if _is_slack(term) else term for term in found)


def _is_slack(term: MemoryTerm) -> bool:
    """Return whether it is what the allocator keeps beside whatever is allocated."""
    return term.counter == "reserved" and not term.spared


def _scale_slack(term: MemoryTerm, after: int, before: int) -> MemoryTerm:
    """Return what the allocator keeps beside `after` bytes, if beside `before` bytes it is `term`."""
    interval = (term.low * after // before, term.high * after // before)
    return replace(
        term, nbytes=term.nbytes * after // before, inputs={**term.inputs, "allocated": after}, interval=interval
    )


def parse_measurements(text: str, work: TrainingWorkload, mesh: Mesh | None = None) -> tuple[PeakMeasurement, ...]:
    """Parse the measurements of a log: JSON objects, one a line; empty lines and those that begin with # do not count.

    Each has ``peak``, in bytes, and may have ``counter``, which of `COUNTERS` counted them (by default ``allocated``),
    ``mesh``, such as ``"pp=2,tp=4"``, and any field of `TrainingWorkload`, such as ``sequence``, ``micro_batch`` and
    ``recompute``; what a line leaves out is that of `work` and `mesh`.

    Raises SourceError, naming the line, for what is none of these.

    >>> log = '{"sequence": 4096, "recompute": "full", "mesh": "tp=2", "peak": 20000000000}'
    >>> run = parse_measurements(log, TrainingWorkload(2048))[0]
    >>> run.work.sequence, str(run.mesh), run.peak
    (4096, 'tp2', 20000000000)
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            found.append(_parse_measurement(line, number, work, mesh or Mesh.of()))
    return tuple(found)


def _parse_measurement(text: str, number: int, work: TrainingWorkload, mesh: Mesh) -> PeakMeasurement:
    where = f"line {number} of the measurements"
    values = parse_json(text.encode(), where, CONFIG_TEXT, hint=_MEASUREMENT_FORMAT_HINT)
    if not isinstance(values, dict):
        raise SourceError(f"{where} is not a JSON object", hint=_MEASUREMENT_FORMAT_HINT)
    peak = values.pop("peak", None)
    if not _is_positive_integer(peak):
        raise SourceError(
            f"{where} has peak = {peak!r} where a number of bytes is expected", hint=_MEASUREMENT_FORMAT_HINT
        )
    counter = values.pop("counter", "allocated")
    if counter not in COUNTERS:
        raise SourceError(
            f"{where} has counter = {counter!r} where one of {', '.join(COUNTERS)} is expected",
            hint="allocated is torch.cuda.max_memory_allocated, reserved max_memory_reserved, device nvidia-smi",
        )
    if "mesh" in values:
        axes = values.pop("mesh")
        if not isinstance(axes, str):
            raise SourceError(f"{where} has mesh = {axes!r} where text such as 'pp=2,tp=4' is expected")
        try:
            mesh = Mesh.parse(axes) if axes.strip() else Mesh.of()
        except ShardctlError as error:
            raise SourceError(f"{where}: {error.message}", hint=error.hint) from None
    for key, value in values.items():
        _check_field(key, value, where)
    values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    if values.get("virtual_stages", 1) > 1:  # as --vp does
        values.setdefault("schedule", "interleaved")
    return PeakMeasurement(mesh, replace(work, **values), cast("int", peak), number, cast("Counter", counter))


_MEASUREMENT_FORMAT_HINT: Final = (
    'a line is such as {"sequence": 4096, "micro_batch": 1, "mesh": "tp=2", "peak": 20000000000}'
)


_MAX_INTEGER_VALUE: Final = 2**63 - 1
"""No number of bytes, tokens or steps is beyond."""


def _is_positive_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_INTEGER_VALUE


def _check_field(key: str, value: object, where: str) -> None:
    """Raise SourceError unless `value` is one that the field `key` of `TrainingWorkload` may have."""
    if key in _INTEGER_KEYS:
        good, expected = _is_positive_integer(value), "a positive whole number"
    elif key in _BOOLEAN_KEYS:
        good, expected = isinstance(value, bool), "true or false"
    elif key in _CHOICES_BY_KEY:
        good = value in _CHOICES_BY_KEY[key] and not isinstance(value, bool)
        expected = f"one of {', '.join(map(str, _CHOICES_BY_KEY[key]))}"
    elif key in _STRING_KEYS:
        good, expected = isinstance(value, str), "a string"
    elif key == "recompute_modules":
        good = isinstance(value, list) and bool(value) and all(name in _RECOMPUTED_MODULE_NAMES for name in value)
        expected = f"a list of {', '.join(_RECOMPUTED_MODULE_NAMES)}"
    elif key == "moment_dtypes":
        good = isinstance(value, list) and len(value) == len(("exp_avg", "exp_avg_sq"))
        good = good and all(name in _MOMENT_DTYPE_NAMES for name in cast("list[object]", value))
        expected = f"a list of two of {', '.join(_MOMENT_DTYPE_NAMES)}"
    else:
        lists = ("recompute_modules", "moment_dtypes")
        known = sorted(
            {"mesh", "peak", "counter", *lists, *_INTEGER_KEYS, *_BOOLEAN_KEYS, *_CHOICES_BY_KEY, *_STRING_KEYS}
        )
        raise SourceError(f"{where} has an unknown key {key!r}", hint=f"the keys are {', '.join(known)}")
    if not good:
        raise SourceError(f"{where} has {key} = {value!r} where {expected} is expected")


def fit_calibration(
    measurements: Sequence[PeakMeasurement], estimate: Callable[[PeakMeasurement], Iterable[MemoryTerm]]
) -> FittedCalibration:
    """Return the factor on activations and the overhead that come closest to `measurements`, neither of them negative.

    `estimate` gives the terms of the heaviest rank of a run. Each peak is compared with what its own counter counts.
    What is exact stays as it is, and so does what a runtime needs: fitted is ``peak = others + scale * activations +
    overhead``, by least squares of the relative errors, so that small runs count as much as large ones.

    Raises UsageError for fewer measurements than coefficients, for runs whose activations are all alike, which cannot
    tell a factor from an overhead, and for peaks by which activations would take nothing.
    """
    if len(measurements) < UNKNOWNS:
        peaks = "1 measured peak" if len(measurements) == 1 else f"{len(measurements)} measured peaks"
        raise UsageError(
            f"{peaks} cannot determine {UNKNOWNS} coefficients",
            hint="measure at least two runs that differ in sequence or micro batch",
        )
    guesses = [tuple(estimate(measurement)) for measurement in measurements]
    modelled = [_sum_modelled(terms) for terms in guesses]
    if max(modelled) - min(modelled) <= _MIN_RELATIVE_DIFFERENCE * max(modelled):
        raise UsageError(
            "the measured runs have activations of one size, so their factor cannot be told from a constant overhead",
            hint="measure runs that differ in sequence or micro batch",
        )
    whole = [sum_terms(terms, counter=run.counter).nbytes for run, terms in zip(measurements, guesses, strict=True)]
    exact = [size - part for size, part in zip(whole, modelled, strict=True)]
    rows = [
        (size / run.peak, 1 / run.peak, 1 - rest / run.peak)
        for run, size, rest in zip(measurements, modelled, exact, strict=True)
    ]
    scale, overhead = _solve_least_squares(rows)
    if not scale:
        raise UsageError(_explain_no_fit(measurements, exact), hint=_MEASUREMENT_MISMATCH_HINT)
    lines = tuple(
        CalibrationLine(run, before, round(rest + scale * size + overhead))
        for run, before, rest, size in zip(measurements, whole, exact, modelled, strict=True)
    )
    return FittedCalibration(scale, round(overhead), lines)


def _explain_no_fit(measurements: Sequence[PeakMeasurement], exact: Sequence[int]) -> str:
    """Return why activations would take nothing."""
    run, rest = min(zip(measurements, exact, strict=True), key=lambda pair: pair[0].peak - pair[1])
    if run.peak < rest:
        return f"line {run.line} measured {run.peak:,} bytes, less than the {rest:,} of all but activations"
    return "the measured peaks do not grow with the activations"


_MEASUREMENT_MISMATCH_HINT: Final = (
    "peaks are bytes of the heaviest rank; each line says where its run differs from the options"
)
_MIN_RELATIVE_DIFFERENCE: Final = 0.01
"""Differences of activations below this, relative to the largest, are within what measurements vary by."""


def _sum_modelled(terms: Iterable[MemoryTerm]) -> int:
    return sum(term.nbytes for term in terms if term.tier == "device" and term.category in _CALIBRATED_CATEGORIES)


def _solve_least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the `x, y >= 0` that make the sum of `(a x + b y - c)**2` over `rows` of `(a, b, c)` least.

    With two unknowns the least is inside, where the gradient is zero, or on an edge, where one of them is.
    """
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ac, bc = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 0:  # else one peak is so far from the others that rounding leaves nothing of them
        x, y = (ac * bb - bc * ab) / determinant, (aa * bc - ab * ac) / determinant
        if x >= 0 and y >= 0:
            return x, y
    edges = ((max(0.0, ac / aa), 0.0), (0.0, max(0.0, bc / bb)))
    return min(edges, key=lambda at: sum((a * at[0] + b * at[1] - c) ** 2 for a, b, c in rows))
