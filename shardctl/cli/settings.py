"""Defines the command line of `shardctl settings`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer

from shardctl.cli import streams
from shardctl.cli.chosen_settings import read_settings
from shardctl.report.documents import build_document_head

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardctl.cli.chosen_settings import OptionSetting, ReadSettings

EXAMPLES = """
Examples:
  shardctl settings
  shardctl settings --json
"""

_JSON_OPTION: Any = typer.Option(False, "--json", metavar="", help="Print one JSON document instead of text.")


def build_settings_command(verbs: Mapping[str, Callable[..., int | None]]) -> Callable[..., int]:
    """Build the command, which shows the settings of these verbs."""

    def settings(*, json: bool = _JSON_OPTION) -> int:
        """Show which options files and variables set, for which verbs, and where settings were looked for."""
        read = read_settings(verbs, os.environ)
        chosen = {verb: list(read.choose(verb, each, ()).values()) for verb, each in verbs.items()}
        streams.print_warnings(read.warnings)
        if json:
            streams.print_document(_build_document(read, chosen))
        else:
            streams.print_text("".join(f"{line}\n" for line in _format_lines(read, chosen)))
        return 0

    return settings


def _build_document(read: ReadSettings, chosen: Mapping[str, list[OptionSetting]]) -> dict[str, Any]:
    return build_document_head("settings") | {
        "verbs": {verb: [each.document() for each in found] for verb, found in chosen.items()},
        "overridden": [each.document() for each in _list_overridden(read, chosen)],
        "files": [{"path": path, "found": found} for path, found in read.files.items()],
        "warnings": list(read.warnings),
    }


def _list_overridden(read: ReadSettings, chosen: Mapping[str, list[OptionSetting]]) -> list[OptionSetting]:
    used = [each for found in chosen.values() for each in found]
    return [setting for setting in read.settings if setting not in used]


def _format_lines(read: ReadSettings, chosen: Mapping[str, list[OptionSetting]]) -> list[str]:
    used = dict.fromkeys(each for found in chosen.values() for each in found)
    lines = []
    for setting in used:
        verbs = [verb for verb, found in chosen.items() if setting in found]
        lines.append(f"{setting} for {', '.join(verbs)}")
    lines += [f"{setting} is overridden" for setting in _list_overridden(read, chosen)]
    lines += [f"{'read' if found else 'not there'}: {path}" for path, found in read.files.items()]
    return lines if used else ["no option is set by a file or a variable", *lines]
