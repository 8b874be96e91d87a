"""Finds the address of the repository, and makes links of a page that leave its place lead there.

The address stands in no file: a fork, a mirror and a local clone each have their own. What builds the package page
(`package_page.py`) and the documentation site (`site_pages.py`) asks here.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def find_repository() -> str | None:
    """Return the address of the repository, `None` where it is not known.

    It is that of the clone's `origin`; `REPOSITORY_URL` says it where there is no clone, such as in a wheel that
    is built from a source distribution. What CI says of itself is no address of ours: it may only install shardctl.
    """
    return os.environ.get("REPOSITORY_URL") or normalise_remote(_ask_git())


def _ask_git() -> str:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():  # an unpacked source may lie in somebody else's repository
        return ""
    done = subprocess.run(
        [git, "-C", ROOT, "config", "--get", "remote.origin.url"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def normalise_remote(remote: str) -> str | None:
    """Return the web address of a remote, without whatever password it has; `None` for a path or another scheme.

    >>> normalise_remote("git@example.org:owner/name.git")
    'https://example.org/owner/name'
    >>> normalise_remote("https://me:secret@example.org/owner/name")
    'https://example.org/owner/name'
    >>> normalise_remote("/srv/git/name.git")
    """
    if short := re.fullmatch(r"[\w.-]+@([\w.-]+):(?!/)(.+)", remote):
        remote = f"ssh://{short[1]}/{short[2]}"
    parts = urlsplit(remote)
    if parts.scheme not in {"http", "https", "ssh"} or not parts.hostname:
        return None
    return f"https://{parts.hostname}{parts.path.rstrip('/').removesuffix('.git')}"


def build_address(repository: str, path: str, *, raw: bool = False) -> str:
    """Return where the newest version of a file of the repository is shown, or, `raw`, is served as it is."""
    between = "/-" if "gitlab" in urlsplit(repository).netloc else ""
    return f"{repository}{between}/{'raw' if raw else 'blob'}/HEAD/{path}"


def replace_links(text: str, page: str, find_target: Callable[[str, bool], str | None]) -> str:
    """Replace the relative links of a Markdown `page`, whose path in the repository this is.

    `find_target` is given the path in the repository that a link leads to and whether it is a picture; for `None` only
    the text of the link is left.
    """

    def replace(found: re.Match[str]) -> str:
        target, anchor = found["target"], found["anchor"] or ""
        if urlsplit(target).scheme:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        new = find_target(path, bool(found["image"]))
        return found["text"] if new is None else f"{found['image']}[{found['text']}]({new}{anchor})"

    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in _CODE.split(text))


def make_links_absolute(text: str, page: str, repository: str | None) -> str:
    """Make every relative link of a page lead to the repository, or, where no address is known, leave its text only."""

    def find_target(path: str, picture: bool) -> str | None:  # noqa: FBT001
        return build_address(repository, path, raw=picture) if repository else None

    return replace_links(text, page, find_target)
