"""Mutants of every text that the program reads, and the command lines that read them.

Each case is decided by its seed alone: which text, how it is changed, which command line reads it. What a case must
come to is one of the exit codes that mean something; 1 and a traceback do not.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from cli_checkpoints import CONFIGS, llama, told
from hub_server import HubServer
from safetensors.numpy import load_file, save_file
from typer.main import get_command

from shardctl.cli.program import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ALLOWED = frozenset({0, 2, 3, 4, 5, 6, 7})
SLOW = 20.0
"""Seconds in which a hostile text has its verdict."""
_DEEP = "@deep@"
"""Stands for brackets within brackets, which `json.dumps` could not write."""
_HUGE = 10**400
ATOMS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 8, 64, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, -(2**63), _HUGE),
    *(0.5, -0.0, 1e30, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "a", "0", "-1", "1e400", "\ud800", "caf\udce9", "\0", "\n", "x" * 5000, "../x", "/etc/passwd", "s3://b/k"),
    *("float32", "torch.bfloat16", "F8_E4M3", "llama", "LlamaForCausalLM", "model.norm.weight", "fp8", "gptq", "awq"),
    *([], {}, [[]], [{}], {"": None}, [0] * 300, ["a", "a"], {"a": {"a": {}}}, _DEEP),
)


@dataclass(frozen=True)
class FuzzCase:
    """One text, changed, and the command line that reads it."""

    kind: str
    args: tuple[str, ...]
    text: bytes
    environment: dict[str, str]


@dataclass(frozen=True)
class FuzzOutcome:
    """What a command line came to."""

    code: int | None
    """None if it raised."""
    seconds: float
    out: str
    err: str
    json: bool = False
    """Whether JSON was asked for."""

    @property
    def wrong(self) -> str:
        """Why this is a fault of the program; empty if it is none."""
        if self.code not in ALLOWED:
            return f"exit code {self.code}"
        if "this is a bug" in self.err + self.out:
            return "a bug, it says"
        if self.json and not _is_strict_json(self.out):
            return "stdout is no JSON"
        return "slow" if self.seconds > SLOW else ""


def _is_strict_json(text: str) -> bool:
    """Whether a text is one JSON document or one a line, as readers demand that know no NaN and no lone surrogate."""
    try:
        for document in [text] if text.startswith("{\n") else text.splitlines():
            json.dumps(json.loads(document, parse_constant=_refuse), ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)


class _NoVerdictError(BaseException):
    """The time is over."""


def mutated_json(draw: random.Random, value: Any, others: list[Any]) -> bytes:
    """A JSON text like that of `value`, changed in a few places; `others` are texts to take parts from."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        value = _changed_value(draw, value, others)
    text = json.dumps(value, indent=draw.choice((None, 1)))
    return changed_text(draw, _with_depth(draw, text).encode("utf-8", "surrogatepass"), often=0.1)


def _with_depth(draw: random.Random, text: str) -> str:
    if _DEEP not in text:
        return text
    depth = draw.choice((20, 70, 900, 5000, 100_000))
    opened, closed = draw.choice((("[", "]"), ('{"a":', "}")))
    inside = "0" if opened != "[" else ""
    return text.replace(json.dumps(_DEEP), opened * depth + inside + closed * depth, 1)


def changed_text(draw: random.Random, data: bytes, *, often: float) -> bytes:
    """The bytes, with a probability of `often` damaged as files are: cut, flipped, of another encoding, repeated."""
    if draw.random() > often:
        return data
    at = draw.randrange(len(data) + 1)
    to = min(len(data), at + draw.choice((1, 2, 10, 100)))
    noise = draw.choice(
        (b"\0", b"\xff", b"\xed\xa0\x80", b'"', b"{", b"]", b",", b":", b"\\", b"NaN", b"-", b"9" * 5000)
    )
    return draw.choice(
        (
            lambda: b"",
            lambda: data[:at],
            lambda: data[:at] + data[to:],
            lambda: data[:at] + noise + data[at:],
            lambda: data[:at] + noise + data[to:],
            lambda: b"\xef\xbb\xbf" + data,
            lambda: data.decode("utf-8", "replace").encode("utf-16"),
            lambda: data + data[at:],
            lambda: data[:at] + data[at:to] * 3 + data[to:],
            lambda: b" " * 1000,
            lambda: b"null",
            lambda: draw.randbytes(200),
        )
    )()


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every container of a tree with each of its keys or positions."""
    if depth > 12:
        return
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key], depth + 1)


def _changed_value(draw: random.Random, value: Any, others: list[Any]) -> Any:
    places = list(_places(value))
    if not places or draw.random() < 0.01:
        return copy.deepcopy(draw.choice(ATOMS))
    holder, key = draw.choice(places)
    found = holder[key]

    def other() -> Any:
        elsewhere = list(_places(draw.choice(others)))
        return copy.deepcopy(_at(draw.choice(elsewhere))) if elsewhere else None

    how = draw.randrange(9)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[draw.choice((str(key) + "x", str(key).upper(), "", "\ud800", "x" * 300))] = holder.pop(key)
    elif how == 2 and isinstance(holder, list):
        holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(found))
    elif how == 3:
        there, place = draw.choice(places)
        with contextlib.suppress(LookupError):  # one may lie in the other
            holder[key], there[place] = copy.deepcopy(there[place]), copy.deepcopy(found)
    elif how == 4:
        holder[key] = other()
    elif how in (5, 6):
        holder[key] = _bent(draw, found)
    else:
        holder[key] = copy.deepcopy(draw.choice(ATOMS))
    return value


def _at(place: tuple[Any, Any]) -> Any:
    return place[0][place[1]]


def _bent(draw: random.Random, found: Any) -> Any:
    """A value near the one that was there."""
    if isinstance(found, int) and not isinstance(found, bool):
        return draw.choice(
            (
                found + 1,
                found - 1,
                found * 2,
                found // 2,
                -found,
                found * 1000,
                found / 1 if abs(found) < 2**1000 else 0.5,
                str(found),
            )
        )
    if isinstance(found, str):
        return draw.choice(
            (found + "x", found[:-1], found.upper(), [found], {found: found}, found * 50, found + "\ud800")
        )
    if isinstance(found, list):
        return draw.choice((found[:1], found[::-1], found * 2, {str(i): each for i, each in enumerate(found)}))
    if isinstance(found, dict):
        return draw.choice((list(found), list(found.values()), [found], {**found, "extra": 1}))
    return [found]


def toml_of(value: Any) -> str:
    """A tree as TOML; what TOML has no word for is written as it is, which a parser refuses."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {toml_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    return {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(text := json.dumps(value), text)


def resealed(raw: Any) -> bytes:
    """A record with a seal that fits it."""
    if not isinstance(raw, dict):
        return json.dumps(raw).encode()
    body = json.dumps({key: value for key, value in raw.items() if key != "seal"}, indent=1)[:-2].encode()
    return body + b',\n "seal": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


class TextFuzzer:
    """Real examples of every kind of text, in a directory of its own, and cases made of them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.hub = HubServer()
        self.source = llama(place / "source", num_hidden_layers=1)
        self.quantised = told(quantization_config=json.loads(_GPTQ), num_hidden_layers=1)
        self._make()
        self.configs = [json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))]
        self.configs.append(self.quantised)
        self.kinds: dict[str, Callable[[random.Random], FuzzCase]] = {
            "config": self._config,
            "stored config": self._stored_config,
            "index": self._index,
            "record": self._record,
            "plan": self._plan,
            "rules": self._rules,
            "listing": self._listing,
            "environment": self._environment,
            "params.json": self._params,
            "trtllm config": self._trtllm,
            "calibration": self._calibration,
            "arguments": self._arguments,
        }

    def _make(self) -> None:
        place, source = self.place, self.source
        self._quietly("reshard", source, place / "cut", "--tp", 2)
        self._quietly("reshard", source, place / "whole", "--hash", "sha256")
        self._quietly("reshard", source, place / "meta", "--to", "meta")
        self._quietly("reshard", source, place / "trtllm", "--to", "trtllm", "--tp", 2)
        self._quietly("plan", source, "--tp", 2, "--out", place / "plan.json")
        for name in ("meta", "trtllm"):
            (place / name / "shardctl.json").unlink()
        (place / "meta" / "config.json").unlink(missing_ok=True)
        sharded = place / "sharded"
        shutil.copytree(source, sharded)
        tensors = load_file(sharded / "model.safetensors")
        (sharded / "model.safetensors").unlink()
        names = sorted(tensors)
        halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, mine in halves.items():
            save_file({name: tensors[name] for name in mine}, sharded / file)
        weight_map = {name: file for file, mine in halves.items() for name in mine}
        total = sum(t.nbytes for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
        (place / "rules.toml").write_text(_RULES)
        jax = place / "jax"
        jax.mkdir()
        save_file(
            {
                "params.embed.embedding": np.zeros((8, 4), np.float32),
                "params.layers.up.kernel": np.zeros((2, 4, 6), np.float32),
            },
            jax / "model.safetensors",
        )
        self.hub.add("me/model", {file.name: file.read_bytes() for file in source.iterdir()})

    def _quietly(self, *args: object) -> None:
        outcome = self._run([str(arg) for arg in args])
        assert outcome.code == 0, (args, outcome)

    def close(self) -> None:
        """Stop the server."""
        self.hub.close()

    def case(self, seed: int, number: int) -> FuzzCase:
        """The case of a number; the same whatever cases came before."""
        draw = random.Random(f"{seed}:{number}")
        kind = list(self.kinds)[number % len(self.kinds)]
        return self.kinds[kind](draw)

    def outcome(self, case: FuzzCase) -> FuzzOutcome:
        """Run a case; what it writes is removed."""
        try:
            with self._hub_says(case), _commands_kept(), mock.patch.dict(os.environ, case.environment):
                return self._run(list(case.args))
        finally:
            for name in ("out", ".out.shardctl", "out.json"):
                shutil.rmtree(self.place / name, ignore_errors=True)
                (self.place / name).unlink(missing_ok=True)

    def _run(self, args: list[str]) -> FuzzOutcome:
        out, err = io.StringIO(), io.StringIO()
        began = time.monotonic()
        code: int | None = None

        def end(*_: object) -> None:
            raise _NoVerdictError

        before = signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, 3 * SLOW)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run(args)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the finding
            err.write(f"Traceback: {type(error).__name__}: {error}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return FuzzOutcome(code, time.monotonic() - began, out.getvalue(), err.getvalue(), "--json" in args)

    @contextlib.contextmanager
    def _hub_says(self, case: FuzzCase) -> Iterator[None]:
        from huggingface_hub import close_session, constants

        from shardctl.storage import retries as patience

        with (
            mock.patch.object(constants, "ENDPOINT", self.hub.url),
            mock.patch.object(
                constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.hub.url + "/{repo_id}/resolve/{revision}/{filename}"
            ),
            mock.patch.object(constants, "HF_HUB_CACHE", str(self.place / "cache")),
            mock.patch.object(constants, "HF_TOKEN_PATH", str(self.place / "token")),
            mock.patch.object(constants, "HF_HUB_OFFLINE", new=False),
            mock.patch.object(patience, "FIRST_WAIT", 0.0001),
        ):
            if case.kind == "environment":
                close_session()  # it keeps the proxies and certificates that it was made with
            if case.kind == "listing":
                route = case.environment.get("FUZZED_ROUTE", "tree")
                self.hub.fail(route, *[_saying(case.text)] * 8)
            yield
            self.hub._faults.clear()
        if case.kind == "environment":
            close_session()

    def _written(self, folder: str, name: str, text: bytes) -> Path:
        """A copy of a directory, in which one file has another text."""
        copied = self.place / f"{folder}-changed"
        if not copied.exists():
            shutil.copytree(self.place / folder, copied, copy_function=os.link)
        target = copied / name
        target.unlink(missing_ok=True)
        target.write_bytes(text)
        return copied

    def _reading(self, draw: random.Random, place: Path, *, light: float = 0.7) -> tuple[str, ...]:
        """A command line that reads a checkpoint."""
        out, path = str(self.place / "out"), str(place)
        if draw.random() < light:
            return draw.choice(
                (
                    ("inspect", path),
                    ("inspect", path, "--json"),
                    ("inspect", path, "--show-rules"),
                    ("plan", path),
                    ("plan", path, "--tp", "2", "--json"),
                    ("plan", path, "--for", "serve", "--gpu", "h100-80g"),
                    ("verify", path),
                )
            )
        return draw.choice(
            (
                ("reshard", path, out, "--dry-run"),
                ("reshard", path, out, "--tp", "2", "--dry-run", "--json"),
                ("reshard", path, out, "--to", "hf"),
                ("reshard", path, out, "--tp", "2", "--kv-heads", "replicate"),
                ("reshard", path, out, "--dtype", "bf16", "--json"),
                ("verify", path, "--level", "full", "--json"),
                ("diff", path, str(self.source)),
                ("digest", path),
                ("plan", path, "--out", str(self.place / "out.json")),
            )
        )

    def _config(self, draw: random.Random) -> FuzzCase:
        text = mutated_json(draw, draw.choice(self.configs), self.configs)
        path = self.place / "config.json"
        path.write_bytes(text)
        more = draw.choice(
            (
                ("inspect",),
                ("inspect", "--show-rules"),
                ("plan",),
                ("plan", "--json"),
                ("plan", "--tp", "2", "--pp", "2"),
                ("plan", "--for", "train", "--gpu", "h100-80g"),
                ("plan", "--for", "serve", "--seq-len", "4096", "--detail", "tensor"),
                ("plan", "--mesh", "fsdp=2,tp=2", "--for", "train", "--recompute", "full", "--json"),
                ("plan", "--to", "vllm", "--tp", "2"),
            )
        )
        return FuzzCase("config", (more[0], str(path), *more[1:]), text, {})

    def _stored_config(self, draw: random.Random) -> FuzzCase:
        text = mutated_json(draw, json.loads((self.source / "config.json").read_text()), self.configs)
        place = self._written("source", "config.json", text)
        return FuzzCase("stored config", self._reading(draw, place), text, {})

    def _index(self, draw: random.Random) -> FuzzCase:
        name = "model.safetensors.index.json"
        index = json.loads((self.place / "sharded" / name).read_text())
        text = mutated_json(draw, index, [index, *self.configs])
        return FuzzCase("index", self._reading(draw, self._written("sharded", name, text)), text, {})

    def _record(self, draw: random.Random) -> FuzzCase:
        folder = draw.choice(("cut", "whole"))
        value = json.loads((self.place / folder / "shardctl.json").read_text())
        others = [copy.deepcopy(value)]
        for _ in range(draw.choice((1, 1, 2, 4))):
            value = _changed_value(draw, value, others)
        text = (
            _with_depth(draw, resealed(value).decode()).encode() if draw.random() < 0.9 else json.dumps(value).encode()
        )
        text = changed_text(draw, text, often=0.05)
        place = self._written(folder, "shardctl.json", text)
        return FuzzCase("record", self._reading(draw, place, light=0.4), text, {})

    def _plan(self, draw: random.Random) -> FuzzCase:
        plan = json.loads((self.place / "plan.json").read_text())
        text = mutated_json(draw, plan, [plan])
        path = self.place / "changed.json"
        path.write_bytes(text)
        more = draw.choice(((), ("--dry-run",), ("--dry-run", "--json")))
        return FuzzCase("plan", ("reshard", "--plan", str(path), str(self.place / "out"), *more), text, {})

    def _rules(self, draw: random.Random) -> FuzzCase:
        names = draw.random() < 0.4
        value = copy.deepcopy(_RULE_TREES[names])
        for _ in range(draw.choice((1, 1, 2, 4))):
            value = _changed_value(draw, value, list(_RULE_TREES))
        rows = value.items() if isinstance(value, dict) else [("rules", value)]
        written = "\n".join(
            f"[{json.dumps(str(k))}]\n" + "\n".join(f"{json.dumps(str(a))} = {toml_of(b)}" for a, b in v.items())
            if isinstance(v, dict)
            else f"{json.dumps(str(k))} = {toml_of(v)}"
            for k, v in sorted(rows, key=lambda row: isinstance(row[1], dict))
        )
        whole = draw.choice((written, written, _RULES))
        text = changed_text(
            draw, _with_depth(draw, whole).encode("utf-8", "surrogatepass"), often=1 if whole is _RULES else 0.1
        )
        path = self.place / "changed.toml"
        path.write_bytes(text)
        source = self.place / "jax" if names else self.source
        args = self._reading(draw, source)
        if args[0] == "digest":
            args = ("inspect", str(source))
        return FuzzCase("rules", (*args, "--rules", str(path)), text, {})

    def _listing(self, draw: random.Random) -> FuzzCase:
        route = draw.choice(("tree", "tree", "tree", "info"))
        if route == "tree":
            entries: Any = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
                for file in sorted(self.source.iterdir())
            ]
            entries[-1]["lfs"] = {"oid": "0" * 64, "size": entries[-1]["size"], "pointerSize": 134}
            entries.append({"type": "directory", "path": "folder", "size": 0, "oid": "0" * 40})
        else:
            commit = self.hub.repositories["me/model"].references["main"]
            entries = {"_id": "1", "id": "me/model", "modelId": "me/model", "sha": commit, "siblings": [], "tags": []}
        text = mutated_json(draw, entries, [entries])
        args = draw.choice((("inspect", "me/model"), ("plan", "hf://me/model"), ("inspect", "hf://me/model/folder")))
        if draw.random() < 0.2:
            args = ("reshard", "me/model", str(self.place / "out"), "--dry-run")
        return FuzzCase("listing", args, text, {"FUZZED_ROUTE": route})

    def _environment(self, draw: random.Random) -> FuzzCase:
        values = (
            "",
            "abc",
            "0",
            "-1",
            "1",
            "1e9",
            "99999999999999999999",
            "nan",
            " ",
            "\n",
            "caf\udce9",
            "/none",
            "x=y",
        )
        chosen = draw.sample(_VARIABLES, draw.choice((1, 1, 2, 4)))
        environment = {name: draw.choice(values) for name in chosen}
        out = str(self.place / "out")
        args = draw.choice(
            (
                ("inspect", str(self.source)),
                ("plan", str(self.source), "--tp", "2"),
                ("verify", str(self.source), "--level", "full"),
                ("inspect", "hf://me/model"),
                ("inspect", "me/model"),
                ("reshard", str(self.source), out, "--tp", "2"),
                ("reshard", str(self.source), out, "--worker", "auto", "--tp", "2"),
                ("--help",),
            )
        )
        return FuzzCase("environment", args, repr(environment).encode(), environment)

    def _params(self, draw: random.Random) -> FuzzCase:
        params = json.loads((self.place / "meta" / "params.json").read_text())
        text = mutated_json(draw, params, [params, *self.configs])
        return FuzzCase("params.json", self._reading(draw, self._written("meta", "params.json", text)), text, {})

    def _trtllm(self, draw: random.Random) -> FuzzCase:
        config = json.loads((self.place / "trtllm" / "config.json").read_text())
        text = mutated_json(draw, config, [config, *self.configs])
        return FuzzCase("trtllm config", self._reading(draw, self._written("trtllm", "config.json", text)), text, {})

    def _calibration(self, draw: random.Random) -> FuzzCase:
        lines = [mutated_json(draw, draw.choice(_MEASURED), list(_MEASURED)).replace(b"\n", b" ") for _ in range(2)]
        text = b"\n".join((lines[0], draw.choice((lines[1], *(json.dumps(row).encode() for row in _MEASURED)))))
        path = self.place / "log.txt"
        path.write_bytes(text)
        args = ("plan", str(self.source), "--for", "train", "--tp", "2", "--calibrate", str(path))
        return FuzzCase("calibration", args, text, {})

    def _arguments(self, draw: random.Random) -> FuzzCase:
        """Texts on the command line itself."""
        option = draw.choice(
            [
                "--mesh",
                "--stages",
                "--tp",
                "--to",
                "--include",
                "--exclude",
                "--keep-fp32",
                "--max-shard-size",
                "--memory",
                "--threads",
                "--megatron",
                "--from",
                "--config",
                "--rules",
                "--experts",
                "--worker",
                "--dtype",
            ]
        )
        known = (
            "tp=2",
            "pp=2,tp=2",
            "1",
            "1,1",
            "2",
            "hf",
            "ranks",
            ".*",
            "(",
            "[a-",
            "(a+)+$",
            "5GB",
            "1MiB",
            "virtual=2",
        )
        text = draw.choice((*known, *(str(atom) for atom in ATOMS[:40] if atom != "\0")))
        text = os.fsdecode(text.encode("utf-8", "surrogateescape" if "\ud800" not in text else "surrogatepass"))
        args = ("reshard", str(self.source), str(self.place / "out"), option, text)
        if draw.random() < 0.7:
            args = (*args, "--dry-run")
        return FuzzCase("arguments", args, text.encode("utf-8", "surrogateescape"), {})


@cache
def _command(app: Any) -> Any:
    return get_command(app)


def _commands_kept() -> contextlib.AbstractContextManager[object]:
    """The parser of the command line is made once: making it takes longer than reading most of the texts."""
    return mock.patch("typer.main.get_command", _command)


def _saying(text: bytes) -> Callable[..., None]:
    """A fault of the Hub's server that answers so."""
    return lambda handler, *_: handler.answer(200, text, Content_Type="application/json")


_VARIABLES = (
    *(
        "HF_HUB_DOWNLOAD_TIMEOUT",
        "HF_HUB_ETAG_TIMEOUT",
        "HF_TOKEN",
        "COLUMNS",
        "LINES",
        "TERM",
        "NO_COLOR",
        "FORCE_COLOR",
    ),
    *("SHARDCTL_DEBUG", "TMPDIR", "HOME", "LANG", "LC_ALL", "GITHUB_ACTIONS", "WORLD_SIZE", "RANK", "SLURM_PROCID"),
    *("SLURM_NTASKS", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
    *("JOB_COMPLETION_INDEX", "RAY_ADDRESS", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "SSL_CERT_FILE", "GROUP_RANK"),
)
_GPTQ = '{"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": false, "sym": true}'
_RULES = """
[rules]
"model.embed_tokens.weight" = ["tp", "fsdp"]
"model.layers.*.self_attn.*.weight" = [["tp", "fsdp"], ""]
"model.layers.*.mlp.down_proj.weight" = ["", "tp"]
"**" = []

[layers]
pattern = "model.layers.*"
last = ["lm_head.weight", "model.norm.weight"]
"""
_RULE_TREES: tuple[dict[str, Any], ...] = (
    {
        "rules": {
            "model.embed_tokens.weight": ["tp", "fsdp"],
            "model.layers.*.mlp.*.weight": [["tp", "fsdp"], ""],
            "**": [],
        },
        "layers": {"pattern": "model.layers.*", "last": ["lm_head.weight"]},
    },
    {
        "names": {
            "params.embed.embedding": "model.embed_tokens.weight",
            "params.layers.up.kernel": {"to": "model.layers.{n}.up.weight", "stacked": 0, "transposed": True},
            "opt_state.**": "",
        },
        "rules": {"**": ["tp"]},
    },
)
_MEASURED = (
    {"sequence": 64, "micro_batch": 1, "mesh": "tp=2", "peak": 20000000000},
    {"sequence": 32, "micro_batch": 2, "mesh": "tp=1", "recompute": "full", "peak": 10000000000},
)
