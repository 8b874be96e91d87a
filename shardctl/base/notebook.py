"""Lets results show themselves in notebooks."""

from importlib import import_module


class NotebookView:
    """A result that notebooks show as HTML.

    What makes the HTML is in a layer above that of the results, and is loaded when a notebook asks for it.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        shown: str = import_module("shardctl.report.notebook_views").render_notebook_view(self)
        return shown
