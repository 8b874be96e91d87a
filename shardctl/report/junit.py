"""Renders the result of `verify` as JUnit XML: a suite and one case per level."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

from shardctl.report.verification import build_engine_rows, build_forward_rows, build_loaded_row

if TYPE_CHECKING:
    from shardctl.verify.finding import CheckFinding
    from shardctl.verify.level import LevelResult, VerifyResult

_NOT_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Everything but the characters of XML 1.0, section 2.2."""


def build_junit_report(verified: VerifyResult) -> bytes:
    """Build the document, in UTF-8."""
    root = ET.Element("testsuites", name="shardctl verify")
    totals = {"tests": 0, "failures": 0, "skipped": 0, "errors": 0}
    for level in verified.levels:
        suite = _build_suite(level, verified.path, required=level in verified.unmet)
        root.append(suite)
        for key in totals:
            totals[key] += int(suite.get(key, "0"))
    if verified.error:
        suite = ET.SubElement(root, "testsuite", name="verify", tests="1", failures="0", skipped="0", errors="1")
        case = ET.SubElement(
            suite, "testcase", name="verify", classname="shardctl.verify", file=_clean_text(verified.path)
        )
        ET.SubElement(case, "error", type="error", message=_clean_text(verified.error))
        totals |= {"tests": 1, "errors": 1}
    for key, total in totals.items():
        root.set(key, str(total))
    root.set("time", f"{sum(level.seconds for level in verified.levels):.3f}")
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'.encode()


def _build_suite(level: LevelResult, path: str, *, required: bool) -> ET.Element:
    suite = ET.Element("testsuite", name=level.name)
    _add_properties(suite, level)
    failed = [finding for finding in level.findings if finding.severity == "error"]
    warnings = [finding for finding in level.findings if finding.severity != "error"]
    case = _add_case(suite, level, path)
    if failed:
        more = f" (and {len(failed) - 1:,} more)" if len(failed) > 1 else ""
        message = _clean_text(failed[0].message + more)
        failure = ET.SubElement(case, "failure", type=_clean_text(failed[0].check), message=message)
        failure.text = _clean_text("\n".join(_format_line(finding) for finding in failed))
    else:
        _add_outcome(case, level, required=required)
    if warnings:
        ET.SubElement(suite, "system-out").text = _clean_text("\n".join(_format_line(finding) for finding in warnings))
    counts = {"tests": 1, "failures": int(bool(failed) or required), "errors": int(level.status == "unfinished")}
    for key, count in (counts | {"skipped": int(level.status == "skipped" and not required)}).items():
        suite.set(key, str(count))
    suite.set("time", f"{level.seconds:.3f}")
    case.set("time", f"{level.seconds:.3f}")
    return suite


def _add_outcome(case: ET.Element, level: LevelResult, *, required: bool) -> None:
    """Add why a level has no verdict; nothing if it passed."""
    reason = _clean_text(level.reason)
    if required:
        message = f"{level.name} is required and was skipped: {reason}"
        ET.SubElement(case, "failure", type="required", message=message)
    elif level.status == "unfinished":
        ET.SubElement(case, "error", type="machine", message=reason)
    elif level.status == "skipped":
        ET.SubElement(case, "skipped", message=reason)


def _add_properties(suite: ET.Element, level: LevelResult) -> None:
    """Add what a level says besides its outcome, as properties."""
    ranks = [
        (f"rank {r.rank}" if r.rank is not None else "whole", " ".join(build_loaded_row(r)[1:])) for r in level.ranks
    ]
    forward = build_forward_rows(level.forward) if level.forward is not None else []
    engine = build_engine_rows(level.engine) if level.engine is not None else []
    said = [
        *ranks,
        *forward,
        *engine,
        *(("read", line) for line in level.describe_reading()),
        *(("note", note) for note in level.notes),
    ]
    if said:
        properties = ET.SubElement(suite, "properties")
        for name, value in said:
            ET.SubElement(properties, "property", name=name, value=_clean_text(value))


def _add_case(suite: ET.Element, level: LevelResult, path: str) -> ET.Element:
    """Add the one case of a level: its name is the same in every run, so that servers can follow it."""
    return ET.SubElement(suite, "testcase", name=level.name, classname=f"shardctl.{level.name}", file=_clean_text(path))


def _format_line(finding: CheckFinding) -> str:
    place = {"file": finding.file, "tensor": finding.tensor, "box": finding.box}
    where = "".join(f"; {what} {value}" for what, value in place.items() if value)
    return f"{finding.severity}: {finding.message}{where}"


def _clean_text(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
