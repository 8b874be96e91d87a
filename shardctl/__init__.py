"""Converts model checkpoints between any two layouts: plans, reshards and verifies.

    import shardctl

    print(shardctl.plan("llama", tp=2, gpu="h100", seq_len=32768, users=50))
    shardctl.reshard("llama", "llama-tp2", tp=2, progress=True)
    assert shardctl.verify("llama-tp2", level="full", against="llama").ok

Each command is a function, whose keywords are the long options of the command line with underscores: `--seq-len` is
`seq_len`, and `--for` is `for_`. `help(shardctl.plan)` lists them. In a notebook, results show themselves as HTML.
`shardctl.api` has the same names and the rest of the public ones.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Final

from shardctl.base.former_modules import FormerModuleFinder
from shardctl.base.version import __version__

if sys.platform == "win32":
    raise ImportError("shardctl runs on Linux and macOS; on Windows, run it in WSL: it needs the file locks of POSIX")

if TYPE_CHECKING:
    from shardctl.api import (
        AttestResult,
        DiffResult,
        DigestResult,
        InspectResult,
        Mesh,
        PlanOptions,
        PlanResult,
        ProgressUpdate,
        ReshardOptions,
        ReshardResult,
        ShardctlError,
        SourceOptions,
        UsageError,
        VerifyOptions,
        VerifyResult,
        attest,
        diff,
        digest,
        inspect,
        lens,
        load,
        plan,
        reshard,
        verify,
    )

__all__ = [
    "AttestResult",
    "DiffResult",
    "DigestResult",
    "InspectResult",
    "Mesh",
    "PlanOptions",
    "PlanResult",
    "ProgressUpdate",
    "ReshardOptions",
    "ReshardResult",
    "ShardctlError",
    "SourceOptions",
    "UsageError",
    "VerifyOptions",
    "VerifyResult",
    "__version__",
    "attest",
    "diff",
    "digest",
    "inspect",
    "lens",
    "load",
    "plan",
    "reshard",
    "verify",
]
_LAZY_EXPORT_NAMES: Final = frozenset(__all__) - {"__version__"}


def __getattr__(name: str) -> object:
    """Import what is offered here when it is first asked for: what it needs is slow to import."""
    if name in _LAZY_EXPORT_NAMES:
        return getattr(import_module("shardctl.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _LazyPackage(ModuleType):
    """This package, in which the functions `verify` and `digest` do not give way to the modules of these names."""

    def __setattr__(self, name: str, value: object) -> None:
        """Leave out what the import of a submodule sets; `from shardctl.verify import ...` does not need it."""
        if not (name in _LAZY_EXPORT_NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _LazyPackage
sys.meta_path.insert(0, FormerModuleFinder())
