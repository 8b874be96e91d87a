"""Lists every error message of the program with its hint, read from the source code: `python docs/errors.py`.

The site puts the list in place of the mark in errors.md when it is built, so that it is never older than the code.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

from shardctl.base.errors import (
    AccessError,
    DestinationError,
    HostileError,
    Mismatch,
    SourceError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from shardctl.report.failure import describe_failure

PACKAGE = Path(__file__).parents[1] / "shardctl"
MARK = "<!-- errors -->"
KINDS = {
    "2": ("Usage", UsageError),
    "3": ("The answer is no", Mismatch),
    "4": ("Source", SourceError),
    "5": ("Access", AccessError),
    "6": ("Destination", DestinationError),
    "7": ("Network and machine", TransientError),
}
"""The title of each exit code, and the kind of error that has it."""
HINTED = {kind.__name__: describe_failure(kind("")).hint for kind in (UnsupportedError, HostileError)}
"""Kinds with a default hint of their own."""


@dataclass
class SourceText:
    """What the modules of the package define: bases and exit codes of classes, texts that have a name."""

    trees: dict[str, ast.Module] = field(default_factory=dict)
    bases: dict[str, list[str]] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)
    texts: dict[tuple[str, str], ast.expr] = field(default_factory=dict)
    texts_anywhere: dict[str, ast.expr] = field(default_factory=dict)

    @classmethod
    def read(cls) -> SourceText:
        """Read every module."""
        found = cls()
        for path in sorted(PACKAGE.rglob("*.py")):
            module = path.relative_to(PACKAGE).as_posix()
            tree = found.trees[module] = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found.bases[node.name] = [ast.unparse(base) for base in node.bases]
                    codes = [ast.unparse(one.value) for one in node.body if is_exit_code(one)]
                    found.codes |= dict.fromkeys([node.name] if codes else [], "".join(codes))
            for node in tree.body:
                target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
                if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                    found.texts[module, target.id] = node.value
                    found.texts_anywhere.setdefault(target.id, node.value)
        return found

    def find_code(self, name: str) -> str | None:
        """Find the exit code of an error class; None for a class that is not an error of the program."""
        if name in self.codes:
            return self.codes[name]
        return next((code for base in self.bases.get(name, ()) if (code := self.find_code(base))), None)

    def find_hint(self, name: str) -> str:
        """Find the default hint of an error class; empty if it has that of its exit code."""
        return HINTED.get(name) or next(
            (hint for base in self.bases.get(name, ()) if (hint := self.find_hint(base))), ""
        )

    def format_text(self, node: ast.expr, module: str, depth: int = 0) -> str:
        """Format a message as it appears; what varies is the name of the value in angle brackets."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            return "".join(
                self.format_text(one.value if isinstance(one, ast.FormattedValue) else one, module, depth)
                for one in node.values
            )
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.format_text(node.left, module, depth) + self.format_text(node.right, module, depth)
        if isinstance(node, ast.IfExp):
            return " / ".join(filter(None, (self.format_text(one, module, depth) for one in (node.body, node.orelse))))
        if isinstance(node, ast.Name) and depth < 3:
            known = self.texts.get((module, node.id)) or (node.id.isupper() and self.texts_anywhere.get(node.id))
            if known and isinstance(known, ast.Constant | ast.JoinedStr | ast.BinOp):
                return self.format_text(known, module, depth + 1)
        return f"<{name_value(node)}>"


def is_exit_code(node: ast.stmt) -> bool:
    """Return whether a statement of a class sets its exit code."""
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "exit_code"


def name_value(node: ast.expr) -> str:
    """Name a value that varies, by the last name in the expression that computes it."""
    if isinstance(node, ast.Call) and node.args:
        return name_value(node.args[0])
    if isinstance(node, ast.Subscript):
        return name_value(node.value)
    names = re.findall(r"[a-z]\w+", ast.unparse(node).split(" for ")[0])
    return names[-1] if names else "value"


def list_errors() -> dict[str, dict[str, str]]:
    """List each message with its hint, by exit code."""
    source = SourceText.read()
    found: dict[str, dict[str, str]] = {code: {} for code in KINDS}
    for module, tree in source.trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            code = source.find_code(name) if name in source.bases else None
            if code not in found:
                continue
            message = source.format_text(node.args[0], module)
            if not re.search(r"\w{3}", re.sub(r"<[^>]*>", "", message)):
                continue
            hints = [source.format_text(one.value, module) for one in node.keywords if one.arg == "hint"]
            if hints and not re.search(r"\w{3}", re.sub(r"<[^>]*>", "", hints[0])):
                hints = []
            found[code][message] = "".join(hints) or found[code].get(message) or source.find_hint(name)
    return found


def escape(text: str) -> str:
    """Text as a cell of a table has it."""
    text = re.sub(r"\s+", " ", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([|*_`\[\]])", r"\\\1", text)


def build_tables() -> str:
    """Build a table of messages and hints for each exit code."""
    lines = []
    for code, messages in list_errors().items():
        title, kind = KINDS[code]
        lines += [
            f"## {title}: exit code {code}",
            "",
            f"Where the hint is empty: {describe_failure(kind('')).hint}.",
            "",
        ]
        lines += ["| error | hint |", "|---|---|"]
        lines += [f"| {escape(message)} | {escape(hint)} |" for message, hint in sorted(messages.items())]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(build_tables())
