"""Makes README and changelog pages of the documentation site, lists the errors, and leads links to the repository.

mkdocs calls these functions, as `.mkdocs.yml` tells it.
"""

from __future__ import annotations

import posixpath
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import errors
from addresses import ROOT, build_address, find_repository, replace_links

PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
"""What lies outside of `docs` and is a page all the same."""


def on_config(config: Any) -> Any:  # noqa: ANN401 - mkdocs' type checks itself
    """Name the repository, where it is known."""
    config.repo_url = find_repository()
    return config


def on_files(files: Files, config: Any) -> Files:  # noqa: ANN401
    """Add the pages that lie outside."""
    for path, place in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=place_links(text, path, place)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:  # noqa: ANN401
    """Place the links of a page of `docs`, and list the errors in theirs."""
    if page.file.src_uri == "errors.md":
        markdown = markdown.replace(errors.MARK, errors.build_tables())
    if page.file.src_uri in PAGES.values():
        return markdown
    return place_links(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def place_links(text: str, path: str, place: str) -> str:
    """Make the links of the file at `path` of the repository right for its `place` on the site."""
    repository = find_repository()

    def find_target(target: str, picture: bool) -> str | None:  # noqa: FBT001
        if inside := PAGES.get(target) or (target.startswith("docs/") and target.removeprefix("docs/")):
            return posixpath.relpath(inside, posixpath.dirname(place) or ".")
        return build_address(repository, target, raw=picture) if repository else None

    return replace_links(text, path, find_target)
