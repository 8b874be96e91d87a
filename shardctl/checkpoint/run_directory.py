"""Finds the weights, the config and the tokenizer inside a directory that a trainer wrote.

Trainers put them into folders of their own: ``iter_0000003/model`` (slime), ``step_10/policy/weights/model`` (NeMo RL),
``global_step_100/actor`` (verl), ``checkpoint-500`` (Trainer), ``epoch=0-step=2.ckpt`` (Lightning).

>>> from pathlib import Path
>>> from tempfile import TemporaryDirectory
>>> with TemporaryDirectory() as run:
...     weights = Path(run, "step_10", "policy", "weights")
...     weights.mkdir(parents=True)
...     header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
...     _ = (weights / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
...     print(find_run_files(Path(run)).weights.relative_to(run))
step_10/policy/weights
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import ShardctlError, SourceError, TwoModelsError, format_first_few
from shardctl.base.value import value_class
from shardctl.checkpoint.config_files import CONFIG
from shardctl.libraries import registry
from shardctl.storage import HIDDEN
from shardctl.storage.addresses import open_source
from shardctl.verify.consumer import TOKENIZER_FILES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAX_DEPTH: Final = 4
"""Folders below the run in which weights are looked for; NeMo RL has them three below."""
_MAX_FOLDERS: Final = 4096
"""Folders that are looked into before the search is given up, so that a home directory is not searched."""
_NOT_WEIGHTS: Final = re.compile(
    r"^(?!model).*optim|rng|sched|scaler|dataloader|^logs?$|^wandb$|^runs$|^extra$|tensorboard", re.IGNORECASE
)
"""Folders and files of a run that hold other things than weights; OLMo's `model_and_optim` holds both."""
_WEIGHT_FOLDERS: Final = ("model", "weights", "policy", "actor", "module", "pytorch_model_fsdp_0", "model_and_optim")
"""Names of folders that trainers give to what is trained, where other models lie next to it."""
_CONFIG_FOLDERS: Final = (
    *("", ".hf_metadata", "model/.hf_metadata", "huggingface", "hf_config", "config", "hf", "hf_model"),
    "tokenizer",
)
"""Where trainers keep the model's config, from the weights up to the run."""
_TOKENIZER_FOLDERS: Final = ("tokenizer", "huggingface", "hf_config", "hf", "hf_model", "")
"""Where they keep its tokenizer."""
_TOKENIZER_MARKS: Final = (*sorted(TOKENIZER_FILES), "tokenizer_config.json")
_STEP_NUMBER_PATTERN: Final = re.compile(r"(\d+)(?:\.ckpt)?$")
_LIGHTNING_SUFFIX: Final = ".ckpt"


@value_class
class RunFiles:
    """Where the parts of a model lie in a run."""

    weights: Path
    config: Path | None
    """A `config.json`, or None where the weights have one of their own or there is none."""
    tokenizer: Path | None = None
    """A folder with the tokenizer, or None where it lies next to the weights or there is none."""
    newest_of: int = 1
    """How many steps there were to choose from."""


def find_run_files(run: Path, container: str | None = None) -> RunFiles:
    """Find the weights of a run and the config of their model; a directory of weights is returned as it is.

    The `container` is the format that the weights have to have, if it is given.

    Of steps that differ by a number the newest is taken. Raises SourceError where no folder holds weights, or where
    it cannot be told which of two does.
    """
    if not run.is_dir() or _holds_weights(run, container):
        return RunFiles(run, _find_config(run, run), _find_tokenizer(run, run))
    level, steps, looked = [run], 1, 0
    for _ in range(_MAX_DEPTH):
        inside = sorted(child for folder in level for child in _list_candidates(folder))
        looked += len(inside)
        if looked > _MAX_FOLDERS:
            break
        found = [child for child in inside if _holds_weights(child, container)]
        if found:
            chosen, count = _choose_weights(run, found)
            return RunFiles(chosen, _find_config(chosen, run), _find_tokenizer(chosen, run), max(steps, count))
        level, count = _keep_newest([child for child in inside if child.is_dir()])
        steps = max(steps, count)
    raise SourceError(
        f"no folder of {run} holds weights, down to {_MAX_DEPTH} levels", hint="give the folder that has the weights"
    )


def _list_candidates(folder: Path) -> Iterator[Path]:
    """Yield the folders, and the files of Lightning, in which weights may be."""
    for child in folder.iterdir():
        if child.name in HIDDEN or child.name.startswith(".") or _NOT_WEIGHTS.search(child.name):
            continue
        if child.is_dir() or child.suffix == _LIGHTNING_SUFFIX:
            yield child


def _holds_weights(path: Path, container: str | None) -> bool:
    """Return whether a format recognises the folder or file, and finds tensors of a model in it.

    Raises TwoModelsError for a folder with two, because which of them is meant is a guess.
    """
    try:
        source = open_source(path)
    except ShardctlError:
        return False
    try:
        return bool(registry.scan_checkpoint(source, override=container).tensors)
    except TwoModelsError:
        raise
    except ShardctlError:
        return False
    finally:
        source.close()


def _choose_weights(run: Path, found: list[Path]) -> tuple[Path, int]:
    """Choose the newest step, or the folder of the model that is trained, and count what there was to choose from."""
    newest, count = _keep_newest(found)
    if len(newest) == 1:
        return newest[0], count
    for name in _WEIGHT_FOLDERS:
        named = [path for path in newest if path.name == name or name in path.relative_to(run).parts]
        if len(named) == 1:
            return named[0], count
    names = [str(path.relative_to(run)) for path in newest]
    raise SourceError(
        f"{run} holds more than one model: {format_first_few(names)}", hint=f"give one of them, such as {newest[0]}"
    )


def _keep_newest(paths: list[Path]) -> tuple[list[Path], int]:
    """Keep, of paths in one folder that differ by the number at their ends, the one with the largest."""
    kept: dict[tuple[Path, str], list[Path]] = {}
    for path in paths:
        number = _STEP_NUMBER_PATTERN.search(path.name)
        kept.setdefault((path.parent, path.name[: number.start()] if number else f"/{path.name}"), []).append(path)
    best = [max(each, key=_read_number) for each in kept.values()]
    return best, max((len(each) for each in kept.values()), default=1)


def _read_number(path: Path) -> int:
    number = _STEP_NUMBER_PATTERN.search(path.name)
    return int(number[1]) if number else 0


def _find_config(weights: Path, run: Path) -> Path | None:
    """Find the config of the model whose weights are there: next to them, or in a folder on the way up to the run."""
    folders = list(_climb(weights, run))
    if (folders[0] / CONFIG).is_file():
        return None
    paths = (folder / name / CONFIG for folder in folders for name in _CONFIG_FOLDERS)
    return next((path for path in paths if path.is_file() and _is_model_config(path)), None)


def _find_tokenizer(weights: Path, run: Path) -> Path | None:
    """Find the folder with the tokenizer, as `_find_config` finds the config."""
    folders = list(_climb(weights, run))
    if any((folders[0] / name).is_file() for name in _TOKENIZER_MARKS):
        return None
    places = (folder / name for folder in folders for name in _TOKENIZER_FOLDERS)
    return next((place for place in places if any((place / name).is_file() for name in _TOKENIZER_MARKS)), None)


def _climb(weights: Path, run: Path) -> Iterator[Path]:
    """Yield the folder of the weights, and those above it up to the run."""
    folder = weights if weights.is_dir() else weights.parent
    yield folder
    while folder != run and run in folder.parents:
        folder = folder.parent
        yield folder


def _is_model_config(path: Path) -> bool:
    """Return whether a file named `config.json` is that of a model, and not of a trainer."""
    from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_file

    try:
        config = parse_json(read_file(path, CONFIG_TEXT), str(path), CONFIG_TEXT)
    except (OSError, ShardctlError):
        return False
    return isinstance(config, dict) and ("model_type" in config or "architectures" in config)
