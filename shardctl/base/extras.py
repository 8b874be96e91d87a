"""Says how to install what only some commands need: the extras of pyproject.toml."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

_PYPROJECT_PATH: Final = Path(__file__).parents[2] / "pyproject.toml"
_EXTRA_MARKER_PATTERN: Final = re.compile(r"""\s*;\s*extra\s*==\s*['"]([\w-]+)['"]$""")


def format_install_command(extra: str) -> str:
    """Format the command that installs the packages of an extra.

    It names the packages themselves, so that it works wherever shardctl itself came from, an index or a clone.

    >>> format_install_command("cloud")
    "pip install 'obstore>=0.6'"
    """
    packages = _read_installed(extra) or _read_project(extra) or [f"shardctl[{extra}]"]
    return shlex.join(["pip", "install", *packages])


def _read_installed(extra: str) -> list[str]:
    """Read the packages of an extra from what was installed; none where shardctl runs without being installed."""
    from importlib.metadata import PackageNotFoundError, requires  # loads email and calendar

    try:
        needed = requires("shardctl") or []
    except PackageNotFoundError:
        return []
    found = ((line, _EXTRA_MARKER_PATTERN.search(line)) for line in needed)
    return [line[: marker.start()] for line, marker in found if marker and marker[1] == extra]


def _read_project(extra: str) -> list[str]:
    """Read the packages of an extra from the clone that this module lies in, if it does."""
    import tomllib  # only a message needs it

    try:
        project = tomllib.loads(_PYPROJECT_PATH.read_text(encoding="utf-8"))["project"]
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        return []
    if project.get("name") != "shardctl":
        return []
    found: list[str] = project.get("optional-dependencies", {}).get(extra, [])
    return found
