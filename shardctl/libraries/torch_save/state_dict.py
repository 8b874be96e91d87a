"""Finds the model's weights in what was saved, and lists what else there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.base.settings import is_text
from shardctl.base.value import value_class
from shardctl.libraries.torch_save.pickle_tree import CallNode, PersistentNode, as_mapping
from shardctl.libraries.torch_save.tensors import StorageView, as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WRAPPERS: Final = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts keep the weights, beside an epoch or an optimizer."""
_OPTIMIZER_KEYS: Final = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")
"""Keys under which they keep the optimizer; the last is Lightning's, a list of all."""
_RUN_MODEL: Final = "model"
_RUN_OPTIMIZERS: Final = "optimizers"
"""What Composer calls the model and its optimizers, by class, in the state of a run."""
STATE: Final = "state"
GROUPS: Final = "param_groups"
"""What the state dict of an optimizer has."""
_MAX_ENTRIES_SHOWN: Final = 5


@value_class
class StateDict:
    """The weights in one file."""

    views: dict[str, StorageView]
    """By name, in the order they were saved."""
    others: dict[str, str]
    """What is no tensor: its kind by its name."""
    warnings: tuple[str, ...]


def find_optimizer(tree: object) -> tuple[str, ...] | None:
    """Find the keys that lead to the one optimizer beside weights; None if there is none, or more than one."""
    top, run = as_mapping(tree) or {}, find_run_state(tree)
    found: list[tuple[str, ...]] = [(key,) for key in _OPTIMIZER_KEYS if get_optimizer(top.get(key)) is not None]
    named = as_mapping(run.get(_RUN_OPTIMIZERS)) or {} if run is not None else {}
    found += [(STATE, _RUN_OPTIMIZERS, str(key)) for key, node in named.items() if get_optimizer(node) is not None]
    return found[0] if len(found) == 1 else None


def find_run_state(tree: object) -> dict[Any, Any] | None:
    """Find what Composer keeps of a run under one key, the model among it (`composer/core/state.py`); else None."""
    run = as_mapping((as_mapping(tree) or {}).get(STATE))
    return run if run is not None and as_mapping(run.get(_RUN_MODEL)) is not None else None


def get_optimizer(node: object) -> dict[Any, Any] | None:
    """Return what `torch.optim.Optimizer.state_dict` made, by itself or alone in a list; None for anything else."""
    if isinstance(node, list) and len(node) == 1:
        node = node[0]
    held = as_mapping(node)
    if held is None or as_mapping(held.get(STATE)) is None or not isinstance(held.get(GROUPS), list):
        return None
    return held


def extract_state_dict(
    tree: object,
    path: str,
    is_excluded: Callable[[str], bool] = lambda _: False,
    optimizer: tuple[str, ...] | None = None,
) -> StateDict:
    """Extract the weights of `tree`: its own tensors if it has any, else those under the one well-known key.

    A tensor that cannot be read is passed over if `is_excluded` says of its name that nobody wants it. What is under
    the keys of an `optimizer` is read by somebody else. Beside the weights there may be counters and losses in tensors
    of one number, and states of random numbers.

    Names are never joined from several levels: a guess could collide or differ from what the model calls them.

    Raises:
        SourceError: there are no tensors in these places, or in several of them.
        UnsupportedError: a whole module was saved, or a tensor that cannot be read as it is.
    """
    run = find_run_state(tree)
    top = as_mapping(tree if run is None else run)
    if top is not None and optimizer is not None:
        inside = optimizer if run is None else optimizer[1:]
        top = {key: value for key, value in top.items() if key != inside[0]}
    if top is None:
        _refuse_module(tree, path)
        raise SourceError(f"{path} holds {_add_article(describe_node(tree))}, not a mapping of names to tensors")
    passed: dict[str, str] = {}
    own = _find_tensors(top, path, is_excluded, passed)
    found = {key: held for key in WRAPPERS if (held := as_mapping(top.get(key))) is not None}
    inner_views = {key: _find_tensors(held, path, is_excluded, passed) for key, held in found.items()}
    wrapped = [key for key, views in inner_views.items() if views]
    if len(wrapped) == 1:
        own = {key: view for key, view in own.items() if not _is_counter(view)}
    if len(wrapped) + bool(own) > 1:
        places = [repr(key) for key in wrapped] + ["the top level"] * bool(own)
        raise SourceError(
            f"{path} holds tensors in several places: {', '.join(places)}", hint="save only the one that is meant"
        )
    if not wrapped:
        if not own:
            for key in WRAPPERS:
                _refuse_module(top.get(key), path)
            raise SourceError(
                f"{path} holds no tensors, only {_format_entries(top) or 'an empty mapping'}",
                hint=f"tensors are looked for at the top level and under {', '.join(WRAPPERS)}",
            )
        return _build_state_dict(top, own, path, passed)
    held, views = found[wrapped[0]], inner_views[wrapped[0]]
    inner = _build_state_dict(held, views, path, passed)
    outer = {key: value for key, value in top.items() if key != wrapped[0]}
    place = wrapped[0]
    if run is not None:
        outer |= {key: value for key, value in (as_mapping(tree) or {}).items() if key != STATE}
        place = f"{STATE}.{place}"
    left = f"; left behind: {_format_entries(outer)}" if outer else ""
    warning = f"{path} holds its tensors under {place!r}{left}"
    return StateDict(views, {**inner.others, **_describe_entries(outer)}, (warning, *inner.warnings))


def _is_counter(view: StorageView) -> bool:
    """Return whether a tensor beside a model is no weight: one number, or bytes in a row, as generators have."""
    return not view.shape or view.shape == (1,) or (len(view.shape) == 1 and view.dtype.name == "U8")


def describe_node(node: object) -> str:
    """Return what a node is, for messages."""
    if isinstance(node, CallNode):
        return str(node.function) if not isinstance(node.function, CallNode) else "an object made by a call of a call"
    return "storage" if isinstance(node, PersistentNode) else type(node).__name__


def _find_tensors(
    held: dict[Any, Any], path: str, is_excluded: Callable[[str], bool], passed: dict[str, str]
) -> dict[Any, StorageView]:
    """Find the tensors of a mapping by key, and add to `passed` those that are passed over, with their kinds."""
    views = {}
    for key, value in held.items():
        try:
            view = as_tensor(value, _describe_place(path, key))
        except UnsupportedError as error:
            if isinstance(key, str) and is_excluded(key):
                passed[key] = describe_node(value)
                continue
            hint = f"{error.hint}, or leave it out with --exclude" if error.hint else "leave it out with --exclude"
            raise UnsupportedError(str(error), hint=hint) from error
        if view is not None:
            views[key] = view
    return views


def _build_state_dict(
    held: dict[Any, Any], views: dict[Any, StorageView], path: str, passed: dict[str, str]
) -> StateDict:
    for key in views:
        if not isinstance(key, str):
            raise SourceError(
                f"{path} has a tensor under the {type(key).__name__} {_format_key(key)[:100]}, not under a name"
            )
        if not is_text(key):
            raise SourceError(f"{path} has a tensor whose name {ascii(key)[:100]} is not Unicode text")
    others = {key: value for key, value in held.items() if key not in views}
    warnings = []
    plain = {key: value for key, value in others.items() if key not in passed}
    if plain:
        warnings.append(f"{path}: not tensors, and left behind: {_format_entries(plain)}")
    if passed:
        warnings.append(f"{path}: cannot be read, and left out by --exclude: {_format_pairs(passed.items())}")
    strange = {name: view.subclass for name, view in views.items() if view.subclass}
    if strange:
        warnings.append(
            f"{path}: tensors of a class of their own, read as plain ones: {_format_pairs(strange.items())}"
        )
    return StateDict(views, _describe_entries(others), tuple(warnings))


def _refuse_module(node: object, path: str) -> None:
    """Raise UnsupportedError for a pickled object of any class, which most often is a whole module."""
    if isinstance(node, CallNode) and as_tensor(node, path) is None and as_mapping(node) is None:
        raise UnsupportedError(
            f"{path} holds a whole object of the class {describe_node(node)}, not a mapping of names to tensors",
            hint="load it where its code is trusted, and torch.save(model.state_dict(), ...)",
        )


def _describe_entries(entries: dict[Any, Any]) -> dict[str, str]:
    return {_format_key(key): describe_node(value) for key, value in entries.items()}


def _format_entries(entries: dict[Any, Any]) -> str:
    return _format_pairs(_describe_entries(entries).items())


def _format_pairs(entries: Iterable[tuple[str, str]]) -> str:
    return format_first_few((f"{name!a} ({what})" for name, what in entries), _MAX_ENTRIES_SHOWN)


def _format_key(key: object) -> str:
    if isinstance(key, tuple):  # it may hold the same long text many times
        return f"({', '.join(_format_key(part) for part in key[:4])})"
    return key[:200] if isinstance(key, str) else ascii(key[:200] if isinstance(key, bytes) else key)[:200]


def _describe_place(path: str, key: object) -> str:
    return f"{path}: tensor {_format_key(key)!r}"


def _add_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
