"""Lets results show themselves: as the text and the JSON of their command, and as HTML in notebooks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_RESULT_VIEWS_MODULE = "shardctl.report.result_views"
"""What makes the views; it is in a layer above that of the results, and is loaded when a view is asked for."""
_MAX_SHOWN = 200
"""Characters of a verdict in a `repr`."""


class ResultView:
    """A result that `print` shows as its command prints it, and notebooks as HTML."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Keep this `repr`: the decorators of dataclasses give one of all fields to a class that has none itself."""
        cls.__repr__ = ResultView.__repr__  # type: ignore[method-assign]

    @property
    def verdict(self) -> str:
        """The answer in one line: the first that the command prints."""
        return str(self).partition("\n")[0]

    def __str__(self) -> str:
        """Return what the command prints, without colours."""
        text: str = import_module(_RESULT_VIEWS_MODULE).render_result_text(self)
        return text

    def __repr__(self) -> str:
        """Return the class and the verdict."""
        said = self.verdict
        return f"<{type(self).__name__} {said if len(said) <= _MAX_SHOWN else said[: _MAX_SHOWN - 3] + '...'}>"

    def to_dict(self) -> dict[str, Any]:
        """Return the document that the command prints with `--json`."""
        document: dict[str, Any] = import_module(_RESULT_VIEWS_MODULE).build_result_document(self)
        return document

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        shown: str = import_module(_RESULT_VIEWS_MODULE).render_notebook_view(self)
        return shown
