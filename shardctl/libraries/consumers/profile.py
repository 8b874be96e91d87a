"""Loads the profile of a consumer: what one version of a program that loads checkpoints supports.

Each profile is a JSON file in this folder, which `docs/consumer_profiles.py` generates from the consumer's source code.

>>> profile = find_profile("vllm")
>>> profile.label, "LlamaForCausalLM" in profile.architectures
('vllm 0.33', True)
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from shardctl.base.errors import UsageError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_PROFILE_SUFFIX: Final = ".json"


class ConsumerProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one version of a consumer loads, as its source code says."""

    consumer: str
    version: str
    """The full version that was read, such as ``0.32.0``; a commit where a project has no versions."""
    read: tuple[str, ...]
    """The files of its source that the facts come from."""
    quantization: frozenset[str]
    """Values of `quant_method` in `quantization_config` that it loads."""
    transformers_backend: frozenset[str] | None
    """Classes that it has not, and runs with transformers' own code; None where nobody listed them."""
    extra_tensors: Literal["reject", "ignore", "unknown"]
    """What it does with a tensor that its class does not have."""
    quantized_head: frozenset[str]
    """Methods with which it loads a quantized `lm_head`; ``*`` stands for all."""
    state_names: bool
    """Whether it loads the names that transformers 5 gives its classes in memory, in addition to those of the Hub."""
    rope_parameters: bool
    """Whether it reads `rope_parameters` in a config, as transformers 5 does, and not `rope_theta` alone."""
    command: str
    """The command that loads a directory, with ``{path}``; transformers' has ``{auto_class}`` too."""
    degrees: dict[str, str]
    """By mesh axis, the option of that command, with ``{degree}``; other axes do not exist there."""
    expert_parallel: str
    """The option that divides experts over ranks; empty where there is none."""
    tokenizer: str
    """The option that names a tokenizer elsewhere; empty where there is none."""
    sharded: str
    """The option that loads files of ranks (`sharded_state`); empty where there is none."""
    architectures: frozenset[str] = frozenset()
    """Classes that it has; empty where `model_types` decides instead."""
    model_types: frozenset[str] = frozenset()
    """Values of `model_type` that it has."""
    removed: dict[str, str] = {}
    """Classes that it no longer has, with the last version that had them."""
    read_ranks: str = ""
    """The compared version with the same arrays per rank, where this version was read and not run; empty elsewhere."""

    @property
    def rank_profile(self) -> str:
        """What `--vllm-profile` calls the files of ranks that it loads; empty where it loads none."""
        if not self.sharded:
            return ""
        if self.consumer == "sglang":
            return self.consumer
        return self.read_ranks or _shorten_version(self.consumer, self.version)

    @property
    def option(self) -> str:
        """What `--for` takes for exactly this profile, such as ``vllm@0.32``."""
        return f"{self.consumer}@{_shorten_version(self.consumer, self.version)}"

    @property
    def label(self) -> str:
        """The name and the short version, such as ``vllm 0.32``."""
        return f"{self.consumer} {_shorten_version(self.consumer, self.version)}"


@cache
def list_consumers() -> tuple[str, ...]:
    """List every profile as `--for` takes it, such as ``vllm@0.32``; of each consumer the newest version first."""
    names = [
        path.name.removesuffix(_PROFILE_SUFFIX).rpartition("-")
        for path in _profile_folder().iterdir()
        if _is_profile(path)
    ]
    ordered = sorted(names, key=lambda one: _parse_version(one[2]), reverse=True)
    return tuple(f"{name}@{version}" for name, _, version in sorted(ordered, key=lambda one: one[0]))


def find_profile(text: str) -> ConsumerProfile:
    """Find the profile that ``NAME`` or ``NAME@VERSION`` means; a name alone means the newest version that is known.

    Raises UsageError for a consumer or a version that no profile is of; the hint lists those that there are.
    """
    name, _, version = text.partition("@")
    known = [one.partition("@")[2] for one in list_consumers() if one.partition("@")[0] == name]
    if not known:
        raise UsageError(f"unknown consumer {name!r}", hint=f"use one of {', '.join(list_consumers())}")
    found = next((one for one in known if not version or one == version or version.startswith(f"{one}.")), None)
    if found is None:
        raise UsageError(
            f"{name} {version} was not compared with anything here",
            hint=f"use {', '.join(f'{name}@{one}' for one in known)}, whichever is nearest",
        )
    return _load_profile(f"{name}-{found}{_PROFILE_SUFFIX}")


def has_profile(text: str) -> bool:
    """Return whether ``NAME@VERSION`` is a version that a profile describes, such as ``vllm@0.32.1``."""
    name, _, version = text.partition("@")
    known = [one.partition("@")[2] for one in list_consumers() if one.partition("@")[0] == name]
    return any(version == one or version.startswith(f"{one}.") for one in known)


def list_rejecting_consumers() -> tuple[str, ...]:
    """List the consumers, each with its newest version here, that reject tensors that a class does not have."""
    names = dict.fromkeys(one.partition("@")[0] for one in list_consumers())
    return tuple(found.label for name in names if (found := find_profile(name)).extra_tensors == "reject")


@cache
def _load_profile(file: str) -> ConsumerProfile:
    return msgspec.json.decode(_profile_folder().joinpath(file).read_bytes(), type=ConsumerProfile)


def _profile_folder() -> Traversable:
    return files("shardctl.libraries.consumers")


def _is_profile(path: Traversable) -> bool:
    return path.name.endswith(_PROFILE_SUFFIX)


def _shorten_version(consumer: str, version: str) -> str:
    """Return the version as the file's name has it."""
    return next(
        (
            short
            for name, _, short in (one.partition("@") for one in list_consumers())
            if name == consumer and version.startswith(short)
        ),
        version,
    )


def _parse_version(version: str) -> tuple[int, ...]:
    """Return a version as numbers, so that 0.9 comes before 0.11; a commit comes before all."""
    parts = version.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()
