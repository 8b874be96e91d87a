"""What vLLM's weight checker says of a model, computed from the checkpoint; and a running engine asked for it."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardctl.base.errors import AccessError, SourceError, TransientError, UnsupportedError
from shardctl.cli.program import run
from shardctl.conversion.engine_sums import sum_engine_arrays
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures" / "vllm_sums"
MODELS = ("llama", "qwen3", "qwen3_moe", "qwen2_moe")


def read_sums(model: str, tp: int, state: str = "loaded") -> dict[str, str]:
    """What vLLM itself said; see `fixtures/vllm_sums/make.py`."""
    return json.loads((FIXTURES / model / f"sums_tp{tp}.json").read_text())[state]


class Engine:
    """Answers on loopback as vLLM's server does (`entrypoints/rl/online/api_router.py`)."""

    def __init__(self):
        self.sums, self.status, self.key, self.body, self.location = {}, 200, "", None, ""
        self.seen = []
        """The path and the key of every request."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                engine.seen.append((self.path, self.headers.get("authorization")))

            def do_POST(self):
                self.do_GET()
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert (self.path, asked) == ("/weight_checker", {"action": "checksum"})
                allowed = not engine.key or self.headers.get("authorization") == f"Bearer {engine.key}"
                self.send_response(engine.status if allowed else 401)
                if engine.location:
                    self.send_header("Location", engine.location)
                self.end_headers()
                said = json.dumps({"checksums": engine.sums}) if engine.body is None else engine.body
                self.wfile.write(said.encode())

            def log_message(self, *_):
                """Stay silent."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    made = Engine()
    yield made
    made.server.shutdown()
    made.server.server_close()


def ask(path: Path, engine: Engine, **options):
    """The level of the engine."""
    result = verify(path, VerifyOptions(engine=engine.address, **options))
    return next(level for level in result.levels if level.name == "engine")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_sums_are_those_of_vllm(model, tp):
    """Every parameter, by its key; of a tie vLLM names one array only."""
    ours, theirs = sum_engine_arrays(FIXTURES / model, Mesh.of(tp=tp)), read_sums(model, tp)
    assert ours.sums == theirs
    experts = {key for key in theirs if "w13_weight" in key or "w2_weight" in key}
    assert ours.reordered == experts
    assert bool(experts) == model.endswith("_moe")


@pytest.mark.parametrize("model", MODELS)
def test_an_engine_that_holds_the_checkpoint(model, engine, tmp_path):
    """Whatever layout the checkpoint has; the mesh is the engine's own."""
    engine.sums = read_sums(model, 2)
    for place in (FIXTURES / model, tmp_path / "dcp"):
        if place.name == "dcp":
            reshard(FIXTURES / model, place, ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=2)))
        level = ask(place, engine)
        assert level.status == "passed"
        assert level.tensors == len(engine.sums)
        assert "are the checkpoint's, by SHA-256" in level.notes[0]


def test_replicas_are_all_compared(engine):
    engine.sums = {
        key.replace("dp0", f"dp{replica}"): value for replica in (0, 3) for key, value in read_sums("llama", 1).items()
    }
    assert "in 2 replicas" in ask(FIXTURES / "llama", engine).notes[0]
    engine.sums["dp3:pp0:pcp0:tp0:model.norm.weight"] = "0" * 64
    assert [finding.message for finding in ask(FIXTURES / "llama", engine).errors] == [
        (
            f"{engine.address} holds other elements of dp0:pp0:pcp0:tp0:model.norm.weight of replica 1, "
            "or in another type than the checkpoint's"
        )
    ]


def test_one_element_of_another_checkpoint_is_found(engine, tmp_path):
    engine.sums = read_sums("llama", 2)
    shutil.copytree(FIXTURES / "llama", tmp_path / "changed")
    tensors = load_file(tmp_path / "changed" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][20, 3] += 1
    save_file(tensors, tmp_path / "changed" / "model.safetensors", {"format": "pt"})
    result = verify(tmp_path / "changed", VerifyOptions(engine=engine.address))
    assert not result.ok
    assert [finding.tensor for finding in result.levels[-1].errors] == ["model.layers.0.mlp.gate_up_proj.weight"]
    assert "tp1:" in result.levels[-1].errors[0].message
    assert run(["verify", str(tmp_path / "changed"), "--engine", engine.address]) == 3


def test_arrays_that_one_side_lacks(engine):
    engine.sums = read_sums("llama", 1)
    engine.sums["dp0:pp0:pcp0:tp0:more.weight"] = engine.sums.pop("dp0:pp0:pcp0:tp0:model.norm.weight")
    assert [finding.message for finding in ask(FIXTURES / "llama", engine).errors] == [
        f"{engine.address} holds dp0:pp0:pcp0:tp0:more.weight, which the checkpoint does not have",
        f"{engine.address} does not have dp0:pp0:pcp0:tp0:model.norm.weight",
    ]


def test_what_a_kernel_reorders_is_unknown(engine):
    """A worker on the CPU keeps the weights of linear layers elsewhere, and says the sum of nothing."""
    engine.sums = read_sums("llama", 1, "running")
    level = ask(FIXTURES / "llama", engine)
    assert level.status == "passed"
    assert 0 < level.tensors < len(engine.sums)
    assert any(note.startswith("unknown: ") and "qkv_proj" in note for note in level.notes)
    engine.sums = read_sums("qwen3_moe", 1)
    engine.sums |= {key: "1" * 64 for key in engine.sums if "w13_weight" in key}
    level = ask(FIXTURES / "qwen3_moe", engine)
    assert level.status == "passed"
    assert any("unknown: 1 array" in note and "w13_weight" in note for note in level.notes)


def test_an_engine_of_which_nothing_is_known_is_no_success(engine):
    engine.sums = dict.fromkeys(read_sums("llama", 1), hashlib.sha256().hexdigest())
    level = ask(FIXTURES / "llama", engine)
    assert (level.status, level.tensors) == ("skipped", 0)


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (404, UnsupportedError, r"/weight_checker is not there \(HTTP 404\)"),
        (405, UnsupportedError, r"/weight_checker is not there \(HTTP 405\)"),
        (401, AccessError, r"is refused \(HTTP 401\)"),
        (403, AccessError, r"is refused \(HTTP 403\)"),
        (400, UnsupportedError, r"wants another request \(HTTP 400\): 'why it did so'"),
        (422, UnsupportedError, r"wants another request \(HTTP 422\): 'why it did so'"),
        (503, TransientError, r"is not ready \(HTTP 503\): 'why it did so'"),
        (502, TransientError, r"is not ready \(HTTP 502\)"),
        (500, TransientError, "answers HTTP 500: 'why it did so'"),
    ],
)
@pytest.mark.parametrize("words", ['{"detail": "why it did so"}', '{"error": {"message": "why it did so", "code": 1}}'])
def test_an_engine_that_does_not_answer_so(engine, status, error, message, words):
    engine.status, engine.body = status, words
    with pytest.raises(error, match=message) as raised:
        ask(FIXTURES / "llama", engine)
    assert raised.value.hint


@pytest.mark.parametrize("words", ["", "<html>", "[" * 100_000, "{}", "null"])
def test_a_status_without_words(engine, words):
    engine.status, engine.body = 503, words
    with pytest.raises(TransientError, match=r"is not ready \(HTTP 503\)") as raised:
        ask(FIXTURES / "llama", engine)
    assert raised.value.message.endswith("503)")


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", SourceError, "does not answer in HTTP: BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", TransientError, "ends 99 bytes before its answer does"),
    ],
)
def test_what_is_no_answer_of_http(answer, error, message):
    """A port of something else, and an engine that dies while it answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):  # what is unread when it closes resets the connection: no answer comes
                    pass

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(error, match=message):
            verify(FIXTURES / "llama", VerifyOptions(engine=f"http://127.0.0.1:{server.getsockname()[1]}"))


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"checksums": {}}', '{"checksums": {"a": "b"}}', "[" * 100_000])
def test_an_answer_of_another_form(engine, body):
    engine.body = body
    with pytest.raises(SourceError, match=r"no sums of weights|whose form is not known here"):
        ask(FIXTURES / "llama", engine)


def test_a_key_and_no_engine(engine, monkeypatch):
    engine.sums, engine.key = read_sums("llama", 1), "secret"
    with pytest.raises(AccessError):
        ask(FIXTURES / "llama", engine)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert ask(FIXTURES / "llama", engine).status == "passed"
    with pytest.raises(TransientError, match="does not answer"):
        verify(FIXTURES / "llama", VerifyOptions(engine="http://127.0.0.1:9"))
    assert run(["verify", str(FIXTURES / "llama"), "--engine", "sglang"]) == 2


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_is_sent_to_the_address_that_was_given_only(engine, monkeypatch, capsys, status):
    other = Engine()
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    try:
        for location in (f"{other.address}/weight_checker", f"{engine.address}/elsewhere", "file:///etc/passwd"):
            engine.status, engine.location = status, location
            assert run(["verify", str(FIXTURES / "llama"), "--engine", engine.address]) == 2
            assert "which is not asked" in capsys.readouterr().err
        assert (other.seen, engine.seen) == ([], [("/weight_checker", "Bearer secret")] * 3)
    finally:
        other.server.shutdown()
        other.server.server_close()


def test_a_key_that_no_header_can_hold_is_not_repeated(engine, monkeypatch, capsys):
    """Such as that of a file with line ends of Windows, of which http.client says all."""
    engine.sums = read_sums("llama", 1)
    for key, code in (("secret\r", 0), ("sec\rret", 2), ("sec\u00e9ret", 2)):
        monkeypatch.setenv("VLLM_API_KEY", key)
        assert run(["verify", str(FIXTURES / "llama"), "--engine", engine.address, "-v"]) == code
        assert "sec" not in capsys.readouterr().err.replace("seconds", "")


def test_the_program_prints_keys_and_sums(capsys):
    assert run(["digest", str(FIXTURES / "qwen3_moe"), "--as", "vllm", "--tp", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["checksums"] == read_sums("qwen3_moe", 2)
    assert len(said["unknown"]) == 4
    assert run(["digest", str(FIXTURES / "llama"), "--as", "vllm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split("  ")[1]: line.split("  ")[0] for line in lines} == read_sums("llama", 1)
    assert run(["digest", str(FIXTURES / "llama"), "--tp", "2"]) == 2
    assert run(["digest", str(FIXTURES / "llama"), "--as", "vllm", "--expect", "shardctl1:" + "0" * 32]) == 2


def test_stages_are_those_of_vllm(tmp_path):
    """Layers keep their numbers, and each stage has only its own."""
    tensors = load_file(FIXTURES / "llama" / "model.safetensors")
    more = {key.replace(".0.", ".1."): value.clone() for key, value in tensors.items() if ".layers.0." in key}
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((FIXTURES / "llama" / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = sum_engine_arrays(tmp_path, Mesh.of(pp=2)).sums
    one = {key.rpartition(":")[2]: value for key, value in read_sums("llama", 1).items()}
    norm = "model.layers.{}.input_layernorm.weight"
    assert found[f"dp0:pp1:pcp0:tp0:{norm.format(1)}"] == one[norm.format(0)]
    assert f"dp0:pp0:pcp0:tp0:{norm.format(1)}" not in found
    assert torch.equal(more[norm.format(1)], tensors[norm.format(0)])
