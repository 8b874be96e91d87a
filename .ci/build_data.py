"""Gives the wheel its manual pages and JSON Schemas, which are made of the declarations in the package."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GeneratedData(BuildHookInterface):
    """Writes `share/man/man1` and `share/shardctl/schemas`; an editable install has neither."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the files, and name where they go."""
        if version == "editable":
            return
        sys.path[:0] = [self.root, str(Path(self.root, "docs"))]
        from man_pages import write_pages

        from shardctl.cli.schema import SCHEMA_VERBS
        from shardctl.report.schemas import build_schema

        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        shared = build_data["shared_data"]
        for page in write_pages(folder / "man"):
            shared[str(page)] = f"share/man/man1/{page.name}"
        for verb in SCHEMA_VERBS:
            path = folder / f"{verb}.schema.json"
            path.write_text(json.dumps(build_schema(verb), indent=2) + "\n", encoding="utf-8")
            shared[str(path)] = f"share/shardctl/schemas/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - its name
        """Remove the files."""
        if version != "editable":
            self._folder.cleanup()
