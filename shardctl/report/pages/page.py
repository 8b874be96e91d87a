"""Makes pages of templates: what all of them have, and how values are shown."""

from __future__ import annotations

import os
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.amounts import format_file_size, format_memory_size, format_plural
from shardctl.base.errors import UsageError
from shardctl.base.version import __version__
from shardctl.planning.plan_result import format_amount
from shardctl.report.visible import escape_control_characters

if TYPE_CHECKING:
    from collections.abc import Sequence

_TEMPLATE_FOLDER: Final = Path(__file__).parent


def render_page(template: str, facts: dict[str, Any], command: Sequence[str]) -> str:
    """Return a whole page as HTML; the template escapes whatever it is given.

    `command` is the command line that made it. `SOURCE_DATE_EPOCH` sets the date (reproducible-builds.org).
    """
    from jinja2 import Environment, FileSystemLoader

    templates = Environment(
        loader=FileSystemLoader(_TEMPLATE_FOLDER), autoescape=True, finalize=_escape_controls, trim_blocks=True
    )
    templates.filters |= {
        "amount": format_amount,
        "file_size": format_file_size,
        "memory_size": format_memory_size,
        "plural": format_plural,
        "thousands": lambda number: f"{number:,}",
    }
    about = {"command": shlex.join(command), "date": _format_date(), "version": __version__}
    return templates.get_template(template).render(about | facts) + "\n"


def _escape_controls(value: object) -> object:
    """Write characters that steer a terminal or a browser as escapes; Jinja escapes the markup."""
    return escape_control_characters(value) if type(value) is str else value


def _format_date() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "").strip()
    try:
        now = datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(
            f"SOURCE_DATE_EPOCH is {epoch[:80]!r}, which is not a date",
            hint="unset it, or give whole seconds since 1970, such as those of date +%s",
        ) from error
    return now.strftime("%Y-%m-%d %H:%M UTC")
