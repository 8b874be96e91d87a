"""Engines load what shardctl wrote and say what the source says; faults are found; what cannot be asked is told."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from docs.engines import CASES, KEPT, PAGE, build_page, make
from shardctl.base.errors import UsageError
from shardctl.cli.program import run
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.report.documents import build_verify_document
from shardctl.report.junit import build_junit_report
from shardctl.report.summary import format_summary
from shardctl.running.engines import engine_client as asking
from shardctl.running.engines.engine_client import EngineError, list_prompts
from shardctl.running.engines.score_check import BOUND, compare_scores, measure_rounding
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify
from shardctl.verify.engine_result import TokenScores

VLLM = os.environ.get("SHARDCTL_VLLM_PYTHON", sys.executable if importlib.util.find_spec("vllm") else "")
"""A Python that has vLLM."""
engine = pytest.mark.engine
with_vllm = pytest.mark.skipif(
    not VLLM, reason="vLLM is not installed; SHARDCTL_VLLM_PYTHON may name a Python that has it"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Small models by name, each made once."""
    folder = tmp_path_factory.mktemp("models")

    def source(model: str) -> Path:
        if not (folder / model).exists():
            make(model, folder / model)
        return folder / model

    return source


def converted(source: Path, target: Path, **options) -> Path:
    """A conversion without its record, so that an engine alone tells what is wrong with it."""
    reshard(source, target, ReshardOptions(**options))
    (target / "shardctl.json").unlink()
    return target


def asked(target: Path, source: Path, name: str, **options):
    """The level of the engine."""
    result = verify(target, VerifyOptions(against=source, engine=name, **options))
    return next(level for level in result.levels if level.name == "engine")


def change(path: Path, *, exchanged: tuple[str, str] = ("", ""), rows: str = "") -> None:
    """Exchange two arrays of a file, or the halves of the rows of one."""
    arrays = load_file(path)
    one, other = exchanged
    if one:
        arrays[one], arrays[other] = arrays[other], arrays[one]
    if rows:
        arrays[rows] = arrays[rows].roll(len(arrays[rows]) // 2, 0)
    save_file(arrays, path, {"format": "pt"})


def scores(*following: list[float], tokens: tuple[int, ...] = ()) -> TokenScores:
    """What a model says after a prompt of one token."""
    return TokenScores((), tokens, tuple(np.array(each) for each in following))


def said(*following: dict[int, float], tokens: tuple[int, ...] = ()) -> TokenScores:
    return TokenScores((), tokens, following)


def test_the_page_is_what_was_kept():
    kept = json.loads(KEPT.read_text())
    assert build_page(kept) == PAGE.read_text()
    assert kept.keys() <= {case.name for case in CASES}


class TestJudging:
    source = (scores([-1.0, -2.0, -3.0], [-0.5, -1.5, -4.0], tokens=(0, 0)),)

    @pytest.mark.parametrize(
        ("answer", "apart", "same", "ties", "other"),
        [
            (said({0: -1.0, 1: -2.0}, {0: -0.5}, tokens=(0, 0)), 0.0, 2, 0, ""),
            (said({0: -1.25}, {0: -0.5}, tokens=(0, 0)), 0.25, 2, 0, ""),
            (said({0: nan}, {0: -0.5}, tokens=(0, 0)), inf, 2, 0, ""),
            (said({1: -2.0}, {0: -9.0}, tokens=(1, 0)), 0.0, 0, 0, "token 1 at step 0, where the source has 0"),
        ],
    )
    def test_every_log_probability_until_the_tokens_part(self, answer, apart, same, ties, other):
        found = compare_scores(self.source, [answer], BOUND)
        assert (found.apart, found.same, found.ties) == (apart, same, ties)
        assert other in found.other if other else not found.other

    def test_two_tokens_that_are_as_likely(self):
        source = (scores([-1.0, -1.0005], [-1.0, -2.0], tokens=(0, 0)),)
        found = compare_scores(source, [said({1: -1.0005}, {0: -9.0}, tokens=(1, 0))], BOUND)
        assert (found.apart, found.ties, found.other, found.tokens) == (0.0, 1, "", 1)

    def test_rounding_is_that_of_likely_tokens(self):
        exact = (TokenScores((np.array([-1.0, -2.0, -3.0, -4.0, -5.0, -60.0]),), (), ()),)
        rounded = (TokenScores((np.array([-1.0, -2.0, -3.25, -4.0, -5.0, -70.0]),), (), ()),)
        assert measure_rounding(exact, rounded) == 0.25

    def test_prompts_are_the_same_each_time_and_have_no_special_tokens(self):
        prompts = list_prompts(8, [0, 1, 2], 3, 40)
        assert prompts == list_prompts(8, [0, 1, 2], 3, 40)
        assert {token for prompt in prompts for token in prompt} == {3, 4, 5, 6, 7}
        assert {token for prompt in list_prompts(2, [0, 1], 1, 40) for token in prompt} == {0, 1}


class TestAnswers:
    """What an engine says is given; how it is judged and shown is looked at."""

    @pytest.fixture
    def answer(self, monkeypatch):
        """Have engines say what a function says; it is called with the question."""

        def given(say) -> list:
            questions = []

            def ask(question, *_):
                questions.append(question)
                return say(question), {"vllm": "0.32.0", "torch": "2.13.0"}

            monkeypatch.setattr(asking, "find_engine", lambda *_: "0.32.0")
            monkeypatch.setattr(asking, "ask_engine", ask)
            return questions

        return given

    def test_mesh_and_loader_follow_from_the_directory(self, made, tmp_path, answer):
        def refuse(question):
            raise EngineError("KeyError: 'x'", stage="load", versions={}) if not question.empty else UsageError("held")

        questions = answer(refuse)
        shards = converted(made("qwen3_moe"), tmp_path / "out", to="vllm", mesh=Mesh.of(tp=2, ep=2))
        with pytest.raises(UsageError, match="held"):
            asked(shards, made("qwen3_moe"), "vllm")
        assert [(each.tp, each.pp, each.ep, each.sharded, each.empty) for each in questions] == [
            (2, 1, True, True, False),
            (2, 1, True, True, True),
        ]
        assert len(questions[0].prompts) == 4

    def test_a_refusal_is_a_finding_if_the_engine_can_hold_the_model(self, made, answer):
        def refuse(question):
            if not question.empty:
                raise EngineError("KeyError: 'model.norm'", stage="load", versions={"vllm": "0.32.0"})

        answer(refuse)
        level = asked(made("llama"), made("llama"), "vllm")
        assert [finding.message for finding in level.errors] == [
            "vllm 0.32.0 refuses the files: KeyError: 'model.norm'"
        ]

    def test_an_assertion_without_words_is_told_by_its_line(self, tmp_path):
        (tmp_path / "vllm.py").write_text(
            "__version__ = '0.32.0'\ndef LLM(*_, dtype, **__):\n    assert dtype == 'bfloat16'\n"
        )
        question = {"path": "", "prompts": [[1, 2]], "tokens": 1, "dtype": "fp32", "tp": 1, "pp": 1, "ep": False}
        (tmp_path / "question.json").write_text(json.dumps(question | {"empty": False, "sharded": False}))
        files = [str(tmp_path / name) for name in ("question.json", "answer.json")]
        given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        program = Path(asking.__file__).with_name("run_vllm.py")
        assert subprocess.run([sys.executable, program, *files], env=given, capture_output=True, check=False).returncode
        said = json.loads((tmp_path / "answer.json").read_text())
        assert (said["stage"], said["error"]) == ("load", "AssertionError: assert dtype == 'bfloat16'")

    def test_a_model_that_the_engine_cannot_hold_is_no_finding(self, made, answer):
        def refuse(question):
            raise EngineError(f"no kernel {question.empty}", stage="load", versions={})

        answer(refuse)
        with pytest.raises(UsageError, match=r"vllm cannot hold this model here.*: no kernel True"):
            asked(made("llama"), made("llama"), "vllm")

    def test_an_engine_that_differs_from_transformers_about_the_source_too_is_warned_of(self, made, tmp_path, answer):
        """The files are judged by what the engine itself says of the source; then a difference from that is found."""
        off = dict.fromkeys(range(128), -5.0)

        def say(question):
            other = off if question.path == str(made("llama").resolve()) else worse
            return [TokenScores((other,) * 23, (3,) * 8, (other,) * 8) for _ in question.prompts]

        answer(say)
        shards, worse = converted(made("llama"), tmp_path / "out", to="vllm"), off
        level = asked(shards, made("llama"), "vllm")
        assert level.status == "passed"
        assert "says the same of the files and of the source" in level.findings[0].message
        worse = dict.fromkeys(range(128), -6.0)
        level = asked(shards, made("llama"), "vllm")
        assert level.status == "failed"
        assert "from the source's, at most 1e-03" in level.errors[0].message

    def test_every_report_says_what_was_asked(self, made, answer):
        from shardctl.running.engines.reference import SourceReference

        def say(question):
            from shardctl.checkpoint.opening import open_checkpoint

            with open_checkpoint(made("llama")) as found:
                own = SourceReference(found.manifest, found.source, found.model, found.config, "LlamaForCausalLM")
            given = own.score_prompts(question.prompts, question.tokens, "fp32")
            return [
                TokenScores(
                    tuple({0: float(row[0])} for row in one.prompt),
                    one.tokens,
                    tuple({token: float(row[token])} for token, row in zip(one.tokens, one.following, strict=True)),
                )
                for one in given
            ]

        answer(say)
        result = verify(made("llama"), VerifyOptions(against=made("llama"), engine="vllm"))
        assert result.ok
        told = build_verify_document(result)["levels"][-1]["engine"]
        assert (told["engine"], told["same"], told["tokens"], told["compared"]) == ("vllm", 32, 32, 4 * 31)
        assert told["apart"] == 0
        for report in (build_junit_report(result).decode(), format_summary(result)):
            assert "32 of 32 that follow 4 prompts are the source" in report


class TestRefusals:
    def test_an_engine_that_is_not_installed(self, made, monkeypatch, capsys):
        monkeypatch.setitem(asking._PACKAGES_BY_ENGINE, "vllm", ("no-such-engine",))
        assert run(["verify", str(made("llama")), "--engine", "vllm"]) == 2
        err = capsys.readouterr().err
        assert f"no-such-engine is not installed in {sys.executable}" in err
        assert "--engine-python" in err

    def test_a_python_that_is_none(self, made):
        with pytest.raises(UsageError, match="/no/python cannot be run"):
            verify(made("llama"), VerifyOptions(engine="vllm", engine_python=Path("/no/python")))

    @pytest.mark.parametrize(
        ("name", "to", "message"),
        [
            ("transformers", "dcp", "transformers does not load .*, which is dcp"),
            ("fsdp2", "hf", "fsdp2 does not load .*, which is hf"),
            ("vllm", "ranks", "vllm does not load .*, which is ranks"),
        ],
    )
    def test_a_directory_that_the_engine_does_not_load(self, name, to, message, made, tmp_path, monkeypatch):
        monkeypatch.setattr(asking, "find_engine", lambda *_: "1")
        reshard(made("llama"), tmp_path / "out", ReshardOptions(to=to, mesh=Mesh.of(tp=2) if to != "hf" else Mesh.of()))
        with pytest.raises(UsageError, match=message):
            asked(tmp_path / "out", made("llama"), name)

    def test_a_source_of_quantized_weights(self, made, tmp_path):
        shutil.copytree(made("llama"), tmp_path / "hf")
        config = json.loads((tmp_path / "hf" / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match="nothing can be compared with the engine: the weights are quantized"):
            asked(tmp_path / "hf", tmp_path / "hf", "transformers")

    def test_a_program_that_dies_without_an_answer(self, tmp_path):
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho trouble\nexit 5\n")
        python.chmod(0o755)
        question = asking_question()
        with pytest.raises(EngineError, match="it ended with exit code 5: trouble"):
            asking.ask_engine(question, python, 60)
        python.write_text("#!/bin/sh\necho 'Fatal Python error: Segmentation fault'\nkill -SEGV $$\n")
        with pytest.raises(EngineError, match="Fatal Python error: Segmentation fault; it was ended by SIGSEGV"):
            asking.ask_engine(question, python, 60)
        died = "[executor.py:1] Worker proc W-1 died unexpectedly (exit code: -11), shutting down"
        raised = "(Worker_TP0 pid=7) ERROR 11-23 [executor.py:9] KeyError: 'model.norm'"
        for line, said in ((died, "Worker proc W-1 died unexpectedly"), (raised, "KeyError: 'model.norm'")):
            python.write_text(f'#!/bin/sh\necho "{line}"\nfor n in 1 2 3 4 5; do echo "in frame $n"; done\nexit 1\n')
            with pytest.raises(EngineError, match=rf"^{re.escape(said)}"):
                asking.ask_engine(question, python, 60)
        python.write_text("#!/bin/sh\nkill -9 $$\n")
        with pytest.raises(UsageError, match="vllm was killed, as the system does when memory is short"):
            asking.ask_engine(question, python, 60)
        python.write_text("#!/bin/sh\nsleep 60\n")
        with pytest.raises(UsageError, match="vllm had not answered after 1 s"):
            asking.ask_engine(question, python, 1)


def asking_question():
    from shardctl.verify.engine_result import EngineQuestion

    return EngineQuestion("vllm", "/nowhere", ((1, 2),), 1)


@engine
@pytest.mark.slow
class TestTorch:
    """The two engines that come with what the tests need anyway."""

    def test_fsdp2_computes_what_the_source_does(self, made, tmp_path):
        shards = converted(made("qwen3_moe"), tmp_path / "out", to="dcp", mesh=Mesh.of(tp=2))
        level = asked(shards, made("qwen3_moe"), "fsdp2")
        assert level.status == "passed"
        assert level.engine.ranks == 2
        assert 0 <= level.engine.apart < BOUND

    def test_fsdp2_finds_two_layers_exchanged(self, made, tmp_path):
        source = tmp_path / "changed"
        shutil.copytree(made("llama"), source)
        names = (f"model.layers.{number}.mlp.down_proj.weight" for number in range(2))
        change(source / "model.safetensors", exchanged=tuple(names))
        level = asked(converted(source, tmp_path / "out", to="dcp"), made("llama"), "fsdp2")
        assert "log-probabilities that are" in level.errors[0].message

    def test_transformers_computes_what_the_source_does(self, made):
        level = asked(made("mixtral"), made("mixtral"), "transformers")
        assert level.status == "passed"
        assert level.engine.ranks == 2

    def test_transformers_finds_two_experts_exchanged(self, made, tmp_path):
        source = tmp_path / "changed"
        shutil.copytree(made("mixtral"), source)
        names = tuple(sorted(name for name in load_file(source / "model.safetensors") if ".experts." in name))
        one = next(name for name in names if ".0.w2" in name or "experts.0.down" in name)
        change(source / "model.safetensors", exchanged=(one, one.replace("experts.0", "experts.1")))
        level = asked(source, made("mixtral"), "transformers")
        assert "log-probabilities that are" in level.errors[0].message

    def test_transformers_has_no_plan_for_every_model(self, made):
        with pytest.raises(UsageError, match=r"transformers cannot hold this model here.*no base_model_tp_plan"):
            asked(made("bloom"), made("bloom"), "transformers")


RANK_FILES = """
import glob, json, os, sys
from types import SimpleNamespace

from vllm import distributed
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
from vllm.transformers_utils.s3_utils import glob as s3_glob

folder, (stages, ranks) = sys.argv[1], map(int, sys.argv[2:])
listed = {"Contents": [{"Key": f"models/llama/{name}"} for name in sorted(os.listdir(folder))]}
bucket = SimpleNamespace(list_objects_v2=lambda **_: listed)
found = []
for stage in range(stages):
    for rank in range(ranks):
        for axis, at, world in (("pp", stage, stages), ("tp", rank, ranks)):
            long = {"pp": "pipeline", "tp": "tensor"}[axis]
            setattr(distributed, f"get_{axis}_group", lambda world=world: SimpleNamespace(world_size=world))
            setattr(distributed, f"get_{long}_model_parallel_rank", lambda at=at: at)
        pattern = ShardedStateLoader._render_default_pattern(part="*")
        local = glob.glob(os.path.join(folder, pattern))
        remote = s3_glob(bucket, "s3://models/llama", ["*" + pattern])
        found.append([sorted(map(os.path.basename, each)) for each in (local, remote)])
print(json.dumps(found))
"""
"""Prints what vLLM's loader of sharded state finds for each rank, in a directory and among the keys of a bucket."""


def wait_for_server(server: subprocess.Popen, address: str) -> None:
    """Wait until a server is ready."""
    for _ in range(300):
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=10):  # noqa: S310
            return
        assert server.poll() is None
        time.sleep(1)
    raise AssertionError(f"{address} is not ready")


@engine
@pytest.mark.slow
@with_vllm
class TestVllm:
    @pytest.mark.parametrize(
        ("model", "mesh"),
        [
            ("llama", Mesh.of()),
            ("gemma", Mesh.of()),
            ("qwen3_moe", Mesh.of(tp=2)),
            ("deepseek_v3", Mesh.of(tp=2)),
            ("llama", Mesh.of(tp=2)),
        ],
    )
    def test_it_says_what_the_source_says(self, model, mesh, made, tmp_path):
        shards = converted(made(model), tmp_path / "out", to="vllm", mesh=mesh)
        level = asked(shards, made(model), "vllm", engine_python=Path(VLLM))
        assert (level.status, level.engine.ranks) == ("passed", mesh.world)

    def test_rows_of_a_slice_that_are_exchanged_are_found(self, made, tmp_path):
        shards = converted(made("llama"), tmp_path / "out", to="vllm")
        change(shards / "model-rank-0-part-0.safetensors", rows="model.layers.1.mlp.gate_up_proj.weight")
        level = asked(shards, made("llama"), "vllm", engine_python=Path(VLLM))
        assert "log-probabilities that are" in level.errors[0].message

    def test_an_array_that_is_missing_is_refused_in_its_own_words(self, made, tmp_path):
        """Without the record, and with what shardctl would refuse to read: a name that vLLM does not know."""
        shards = converted(made("llama"), tmp_path / "out", to="vllm", vllm_profile="0.11")
        level = asked(shards, made("llama"), "vllm", engine_python=Path(VLLM))
        assert "vllm 0.32.0 refuses the files" in level.errors[0].message
        assert "Missing keys" in level.errors[0].message

    @pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(pp=2, tp=2)])
    def test_its_loader_finds_the_files_of_each_rank_in_a_directory_and_on_s3(self, mesh, made, tmp_path):
        shards = converted(made("llama"), tmp_path / "out", to="vllm", mesh=mesh, max_shard_size=20_000)
        names = sorted(path.name for path in shards.glob("model-*.safetensors"))
        said = subprocess.run(
            [VLLM, "-c", RANK_FILES, str(shards), str(mesh.degree("pp")), str(mesh.degree("tp"))],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        found = json.loads(said.stdout.splitlines()[-1])
        assert len(found) == mesh.world
        for number, (local, remote) in enumerate(found):
            place = mesh.coordinate(number)
            prefix = f"pp-{place['pp']}-tp-{place['tp']}" if mesh.degree("pp") > 1 else f"rank-{number}"
            assert local == remote == [name for name in names if name.startswith(f"model-{prefix}-part-")]
            assert len(local) > 1

    def test_a_server_says_which_weights_it_holds(self, made, tmp_path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", str(made("llama")), "--port", port]
        command += ["--host", "127.0.0.1", "--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "128"]
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        address = f"http://127.0.0.1:{port}"
        with (tmp_path / "log").open("w") as log:
            server = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log)
            try:
                wait_for_server(server, f"{address}/health")
                level = verify(made("llama"), VerifyOptions(engine=address)).levels[-1]
            finally:
                server.terminate()
                server.wait(60)
        assert (level.name, level.status) == ("engine", "passed")
        assert any("are the checkpoint's, by SHA-256" in note for note in level.notes)
