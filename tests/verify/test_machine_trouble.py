"""Trouble of the machine is no verdict: exit code 7 or 2, what happened and what to do, never NOT OK and never ok."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from fake_cuda import GIB, FakeCuda
from forward_models import config_of, cut, save

import shardctl.running.device_levels
from shardctl.base.errors import MachineError
from shardctl.cli.program import run
from shardctl.options import VerifyOptions
from shardctl.running import loaded
from shardctl.running.forward import by_processes, executor
from shardctl.running.forward.streamed_modules import StreamedLinear
from shardctl.running.machine_failure import find_machine_error
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.find_newest import find_newest
from shardctl.verbs.verify import verify
from shardctl.verify import content

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the devices of these tests are none")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    base = tmp_path_factory.mktemp("trouble")
    save(base / "source", config_of("llama"))
    cut(base / "source", base / "ranks", Mesh.of(tp=2))
    return base


@pytest.fixture
def source(kept):
    return kept / "source"


@pytest.fixture
def ranks(kept, tmp_path):
    return shutil.copytree(kept / "ranks", tmp_path / "ranks")


@pytest.fixture
def say(capfd, monkeypatch):
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)

    def call(*args):
        code = run([str(arg) for arg in args])
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def cuda(monkeypatch):
    """Make devices that are none."""

    def make(*free: int, **told: Any) -> FakeCuda:
        return FakeCuda(free, **told).install(monkeypatch.setattr)

    return make


def damage(ranks):
    """Change a byte of the last rank's file."""
    file = max(ranks.glob("shard-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def level(found, name):
    return next(each for each in found.levels if each.name == name)


class TestLoad:
    def test_a_device_that_others_use_is_no_verdict(self, say, ranks, source, cuda, tmp_path):
        cuda(5000, 5000)
        code, out, err = say("verify", ranks, "--load", "cuda", "--against", source, "--junit", tmp_path / "j.xml")
        assert code == 7
        assert "load       unfinished" in out
        assert out.splitlines()[0] == "NOT VERIFIED: load could not be finished"
        assert "NOT OK" not in out
        assert "do not fit on cuda:" in err
        assert "bytes 5,000 are free" in err
        assert err.splitlines()[-1] == "hint:  end what else uses the device, or use --load auto or cpu"
        root = ET.parse(tmp_path / "j.xml").getroot()  # noqa: S314 - our own file
        assert (root.get("errors"), root.get("failures"), root.get("skipped")) == ("1", "0", "0")

    def test_it_is_so_in_json_too(self, say, ranks, cuda):
        cuda(5000)
        code, out, _ = say("verify", ranks, "--load", "cuda", "--json")
        said = json.loads(out)
        assert (code, said["exit_code"], said["status"], said["ok"]) == (7, 7, "error", False)
        assert "do not fit on cuda:0" in said["error"]
        assert "cpu" in said["hint"]
        load = said["levels"][-1]
        assert (load["status"], load["findings"]) == ("unfinished", [])
        assert "rank 0 (tp0): " in load["reason"]

    def test_what_the_device_could_never_hold_is_the_wrong_device(self, say, ranks, cuda):
        cuda(5000, total=10_000)
        code, out, err = say("verify", ranks, "--load", "cuda")
        assert code == 2
        assert "NOT OK" not in out
        assert "of whose 10,000 bytes 5,000 are free" in err

    def test_what_is_wrong_on_a_device_that_has_the_memory_is_found(self, ranks, source, cuda):
        damage(ranks)
        cuda(5000, GIB)
        found = level(verify(ranks, VerifyOptions(level="load", against=source, device="cuda:1")), "load")
        assert found.status == "failed"

    def test_a_real_difference_counts_more(self, say, ranks, source, cuda):
        damage(ranks)
        cuda(5000, 5000)
        code, out, _ = say("verify", ranks, "--load", "cuda", "--against", source)
        assert code == 3, "the levels before found it"
        assert "NOT OK: " in out

    def test_a_rank_that_was_not_loaded_is_not_compared_by_digest(self, ranks, cuda):
        cuda(5000)
        found = level(verify(ranks, VerifyOptions(level="load", device="cuda")), "load")
        assert (found.status, found.findings) == ("unfinished", [])

    def test_a_busy_device_that_nobody_named_is_left_for_the_next(self, ranks, source, cuda, monkeypatch):
        monkeypatch.setattr(shardctl.running.device_levels, "_LOAD_BATCH_BYTES", 5000)
        cuda(10, GIB)
        found = verify(ranks, VerifyOptions(level="load", against=source))
        assert found.ok, found.findings
        load = level(found, "load")
        assert [rank.device for rank in load.ranks] == ["cuda:1", "cuda:1"]
        (note,) = [note for note in load.notes if "rank 0 (tp0) was loaded on cuda:1, because" in note]
        assert "cuda:0" in note

    def test_where_all_are_busy_the_cpu_is_taken(self, say, ranks, source, cuda):
        cuda(10, 10)
        code, out, _ = say("verify", ranks, "--load", "auto", "--against", source)
        assert code == 0
        assert out.splitlines()[0] == f"ok: every byte read, equal to {source}, load passed"
        assert "was loaded on cpu, because" in out

    def test_a_device_that_nobody_named_is_used_in_parts(self, ranks, cuda, monkeypatch):
        monkeypatch.setattr(shardctl.running.device_levels, "_LOAD_BATCH_BYTES", 5000)
        fake = cuda(12_000)  # a whole rank takes more
        load = level(verify(ranks, VerifyOptions(level="load")), "load")
        assert {rank.device for rank in load.ranks} == {"cuda:0"}
        assert all(rank.nbytes > 12_000 for rank in load.ranks)
        assert max(fake.peak.values()) <= 12_000
        assert any("--load cuda loads it whole" in note for note in load.notes)

    def test_a_device_that_fails_is_no_verdict(self, say, ranks, cuda):
        cuda(GIB, broken={0: "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"})
        code, out, err = say("verify", ranks, "--load", "cuda:0")
        assert code == 7
        assert "NOT OK" not in out
        assert "error: rank 0 (tp0): cuda:0 failed: CUDA error: an illegal memory access was encountered\n" in err
        assert verify(ranks, VerifyOptions(level="load")).ok, "nobody named it"

    def test_memory_that_is_short_in_the_comparison(self, say, ranks, source, cuda, monkeypatch):
        def short(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        cuda(GIB)
        monkeypatch.setattr(loaded.HostStaging, "find_difference", short)
        code, out, err = say("verify", ranks, "--load", "cuda", "--against", source)
        assert code == 7
        assert "NOT OK" not in out
        assert "bug" not in err
        assert "cuda:0 has too little free memory: CUDA out of memory" in err

    def test_memory_of_the_host(self, say, ranks, monkeypatch):
        def short(*_, **__):
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
            )

        monkeypatch.setattr(torch, "empty", short)
        code, out, err = say("verify", ranks, "--load", "cpu")
        assert code == 7
        assert "NOT OK" not in out
        assert "this machine has too little free memory" in err

    def test_memory_of_the_host_where_elements_are_read(self, say, ranks, monkeypatch, tmp_path):
        def short(*_, **__):
            raise MemoryError

        monkeypatch.setattr(content, "measure_content", short)
        code, _, err = say("verify", ranks, "--level", "full", "--junit", tmp_path / "j.xml")
        assert code == 7
        assert "error: this machine has too little free memory\n" in err
        assert ET.parse(tmp_path / "j.xml").getroot().get("errors") == "1"  # noqa: S314 - our own file

    def test_the_other_devices_stay_untouched(self, ranks, source, cuda):
        """Pinned memory, streams and events belong to the current device of a thread, which is the first by default."""
        fake = cuda(GIB, GIB, GIB)
        assert verify(ranks, VerifyOptions(level="load", against=source, device="cuda:2")).ok
        assert fake.contexts == {2}


class TestForward:
    @pytest.fixture
    def in_ranks(self, monkeypatch):
        """Have the processes of ranks do their work in another way."""

        def use(change):
            usual = by_processes.run_ranks
            monkeypatch.setattr(
                by_processes, "run_ranks", lambda work, *args, **kwargs: usual(change(work), *args, **kwargs)
            )

        return use

    @pytest.mark.parametrize("how", ["killed", "memory", "device"])
    def test_a_rank_that_ends_is_no_verdict(self, say, ranks, source, in_ranks, how):
        in_ranks(lambda work: RankWithTrouble(work, how))
        code, out, err = say(
            "verify", ranks, "--forward", "--against", source, "--load", "cpu", "--processes", 2, "--json"
        )
        assert code == 7, out
        said = json.loads(out)
        assert said["levels"][-1]["status"] == "unfinished"
        assert not said["levels"][-1]["findings"]
        told = {
            "killed": "rank 1 was killed by SIGKILL",
            "memory": "rank 1: this machine has too little free memory: MemoryError",
            "device": "rank 1: cpu failed: CUDA error: uncorrectable ECC error encountered",
        }
        assert told[how] in said["error"]
        assert "--virtual" in said["hint"] or how == "device"
        assert err.splitlines()[-1].startswith("hint:  ")

    def test_a_rank_that_hangs_is_no_verdict(self, say, ranks, source, in_ranks, monkeypatch):
        monkeypatch.setattr(by_processes, "_MAX_IDLE_SECONDS", 3.0)
        in_ranks(lambda work: RankWithTrouble(work, "hangs"))
        code, out, err = say("verify", ranks, "--forward", "--against", source, "--load", "cpu", "--processes", 2)
        assert code == 7
        assert "NOT OK" not in out
        assert "hung: no rank has done anything for 3 s" in err
        assert "--virtual" in err.splitlines()[-1]

    def test_a_rank_that_is_slow_to_start_is_waited_for(self, ranks, source, in_ranks):
        in_ranks(lambda work: RankWithTrouble(work, "late"))
        found = verify(ranks, VerifyOptions(level="forward", against=source, device="cpu", processes=2))
        assert found.ok, found.findings
        assert level(found, "forward").forward.engine == "2 processes over gloo (tp2)"

    def test_a_bug_in_a_rank_is_a_bug(self, say, ranks, source, in_ranks):
        in_ranks(lambda work: RankWithTrouble(work, "bug"))
        code, _, err = say("verify", ranks, "--forward", "--against", source, "--load", "cpu", "--processes", 2)
        assert code == 1
        assert "rank 1 raised KeyError" in err

    def test_processes_that_nobody_asked_for_are_left_out_then(self, ranks, source, in_ranks, monkeypatch):
        in_ranks(lambda work: RankWithTrouble(work, "killed"))
        monkeypatch.setattr(by_processes, "_MAX_SINGLE_PROCESS_BYTES", 0)
        monkeypatch.setattr(os, "cpu_count", lambda: 2)
        found = verify(ranks, VerifyOptions(level="forward", against=source, device="cpu"))
        assert found.ok, found.findings
        forward = level(found, "forward")
        assert forward.forward.engine.startswith("2 virtual ranks")
        assert any("rank 1 was killed by SIGKILL" in note for note in forward.notes)

    @pytest.mark.parametrize(
        "said",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            torch.AcceleratorError("CUDA error: device-side assert triggered"),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            MemoryError(),
        ],
        ids=lambda error: f"{type(error).__name__}: {str(error)[:24]}",
    )
    @pytest.mark.parametrize("where", ["linear", "put"])
    def test_a_part_that_lacks_memory_is_not_put_together_from_all_ranks(
        self, say, ranks, source, monkeypatch, said, where
    ):
        def fail(*_, **__):
            raise said

        if where == "linear":
            monkeypatch.setattr(StreamedLinear, "linear", fail)
        else:
            monkeypatch.setattr(executor.ModelExecutor, "_put", fail)
        code, out, err = say("verify", ranks, "--forward", "--against", source, "--load", "cpu", "--virtual")
        assert code == 7, out
        assert "forward    unfinished" in out
        assert "NOT OK" not in out
        assert "ranks cannot run it" not in out
        assert "computes something else" not in out
        assert "hint: " in err

    def test_a_busy_device_that_nobody_named_is_left_for_the_next(self, ranks, source, cuda):
        cuda(5000, GIB)
        found = verify(ranks, VerifyOptions(level="forward", against=source, virtual=True))
        assert found.ok, found.findings
        forward = level(found, "forward")
        assert forward.forward.device == "cuda:1"
        assert any("the model was run on cuda:1, in one process, because cuda:0" in note for note in forward.notes)

    def test_where_all_are_busy_the_cpu_is_taken(self, ranks, source, cuda):
        cuda(5000, 5000)
        found = verify(ranks, VerifyOptions(level="forward", against=source, virtual=True))
        assert found.ok, found.findings
        assert level(found, "forward").forward.device == "cpu"

    def test_and_not_where_a_device_was_named(self, say, ranks, source, cuda):
        cuda(GIB, 5000, GIB)
        code, out, _ = say("verify", ranks, "--forward", "--against", source, "--load", "cuda:1", "--virtual")
        assert code == 7
        assert out.splitlines()[0] == "NOT VERIFIED: load, forward could not be finished"
        assert "not finished: forward: cuda:1 has too little free memory" in out

    def test_the_other_devices_stay_untouched(self, ranks, source, cuda):
        fake = cuda(GIB, GIB, GIB)
        found = verify(ranks, VerifyOptions(level="forward", against=source, device="cuda:1"))
        assert found.ok, found.findings
        assert level(found, "forward").forward.device == "cuda:1"
        assert fake.contexts == {1}


@dataclass
class RankWithTrouble:
    """What a rank's process does, of which the second ends before its time."""

    work: Any
    how: str

    def __call__(self, rank):
        if rank.number == 1:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how in {"hangs", "late"}:
                time.sleep(600 if self.how == "hangs" else 10)
                return self.work(rank)
            by_processes.attach_readers = self.fail
        return self.work(rank)

    def fail(self, *_):
        raise {
            "memory": MemoryError(),
            "device": RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might"),
            "bug": KeyError("rank"),
        }[self.how]


def test_the_newest_checkpoint_is_not_passed_over(ranks, cuda):
    """A script that resumes would take an older one."""
    cuda(10)
    with pytest.raises(MachineError, match="do not fit on cuda:0"):
        find_newest(ranks.parent, VerifyOptions(level="load", device="cuda"))


def test_a_conversion_is_not_refused_for_it(say, source, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(StreamedLinear, "linear", fail)
    code, _, err = say("reshard", source, tmp_path / "out", "--tp", 2, "--prove")
    assert code == 7
    assert "too little free memory" in err
    assert not (tmp_path / "out").exists()


def test_a_device_that_does_not_answer_cannot_be_planned_for(say, source, cuda, monkeypatch):
    def fail(_):
        raise torch.AcceleratorError(
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors"
        )

    cuda(GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    code, _, err = say("plan", source, "--gpu", "auto")
    assert code == 7
    assert "torch cannot ask the GPUs here: CUDA error: CUDA-capable device(s) is/are busy" in err
    assert "bug" not in err


def test_causes_are_followed_and_other_errors_are_not_taken_for_trouble():
    outer = ValueError("a part failed")
    outer.__cause__ = MemoryError()
    assert find_machine_error(outer) is not None
    for innocent in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("CUDA error"),
        KeyError("w"),
    ):
        assert find_machine_error(innocent) is None
