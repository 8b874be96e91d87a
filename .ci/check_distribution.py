"""Checks what was built before it is published: `python .ci/check_distribution.py dist [TAG]`.

The folder has one wheel and one source distribution of one version, which is that of the tag, and the wheel has all
that is used at run time: the package, data that is not Python, a manual page and a schema for each command.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED_IN_SOURCE = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    ".ci/build_data.py",
    "docs/man_pages.py",
    "tests/conftest.py",
)


def list_faults(folder: Path, tag: str | None = None) -> list[str]:
    """List what is wrong with the distributions in a folder."""
    wheels, sources = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        return [f"{folder} has {len(wheels)} wheels and {len(sources)} source distributions, not one of each"]
    version = wheels[0].name.split("-")[1]
    faults = [] if sources[0].name == f"shardctl-{version}.tar.gz" else [f"{sources[0].name} has another version"]
    if tag is not None and tag != f"v{version}":
        faults.append(f"the tag is {tag}, and the version is {version}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        held = set(wheel.namelist())
    with tarfile.open(sources[0]) as source:
        packed = {name.partition("/")[2] for name in source.getnames()}
    faults += [f"the wheel lacks {name}" for name in sorted(list_needed_files(f"shardctl-{version}.data/data") - held)]
    faults += [f"the wheel has {name}" for name in sorted(held) if not name.startswith("shardctl")]
    return faults + [f"the source distribution lacks {name}" for name in NEEDED_IN_SOURCE if name not in packed]


def list_needed_files(shared: str) -> set[str]:
    """List what the wheel must have; `shared` is its folder of files that go next to the environment's programs."""
    sys.path.insert(0, str(ROOT))
    from shardctl.cli.app import app
    from shardctl.cli.schema import SCHEMA_VERBS

    package = (path for path in (ROOT / "shardctl").rglob("*") if path.is_file() and path.suffix != ".pyc")
    pages = ("shardctl", *(f"shardctl-{each.name}" for each in app.registered_commands))
    return {
        *(str(path.relative_to(ROOT)) for path in package),
        *(f"{shared}/share/man/man1/{name}.1" for name in pages),
        *(f"{shared}/share/shardctl/schemas/{verb}.schema.json" for verb in SCHEMA_VERBS),
    }


if __name__ == "__main__":
    found = list_faults(Path(sys.argv[1]), *sys.argv[2:3])
    sys.stdout.write(("\n".join(found) or "the distributions are complete") + "\n")
    sys.exit(bool(found))
