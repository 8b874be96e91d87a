"""Gives the package its links when it is built: the README with absolute links, and `[project.urls]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from addresses import ROOT, build_address, find_repository, make_links_absolute

PAGES = {"Documentation": "docs/tutorial.md", "Changelog": "CHANGELOG.md", "Security": "docs/SECURITY.md"}


class PackagePage(MetadataHookInterface):
    """Fills in what pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write the README and the addresses; without a known repository there are none."""
        repository = find_repository()
        text = make_links_absolute((ROOT / "README.md").read_text(encoding="utf-8"), "README.md", repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = build_urls(repository) if repository else {}


def build_urls(repository: str) -> dict[str, str]:
    """Return what the package index links to beside the page."""
    pages = {name: build_address(repository, path) for name, path in PAGES.items()}
    return {"Repository": repository, "Issues": f"{repository}/issues"} | pages
