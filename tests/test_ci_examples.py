"""The examples for CI, clusters and containers: their shell steps are run, with what a launcher would set."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from shardctl.cli.program import run

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs/examples"
MODEL = ROOT / "fixtures/peft/hf/llama"
ACTION = ROOT / ".github/actions/verify/action.yml"


@pytest.fixture
def environment(tmp_path):
    """The program on the PATH, and none of the variables of launchers that this machine may have."""
    programs = tmp_path / "programs"
    programs.mkdir()
    write_program(programs / "shardctl", f'exec "{sys.executable}" -m shardctl "$@"')
    names = ("SLURM", "RANK", "WORLD_SIZE", "JOB_COMPLETION", "GITHUB", "TORCHELASTIC")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    return kept | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def write_program(path, line):
    path.write_text(f"#!/bin/bash\n{line}\n")
    path.chmod(0o755)


def execute(command, environment, folder, *, code=0):
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def cut(tmp_path):
    assert run(["reshard", str(MODEL), str(tmp_path / "cut"), "--tp", "2"]) == 0
    return tmp_path / "cut"


def damage(folder):
    path = next(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def run_action(folder, environment, inputs, *, code=0):
    """Run the action's second step as GitHub's runner does: `bash -eo pipefail`, the expressions of `env` replaced."""
    action = yaml.safe_load(ACTION.read_text())
    given = {name: one.get("default", "") for name, one in action["inputs"].items()} | inputs
    step = action["runs"]["steps"][1]
    values = {
        key: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: given[m[1]], text) for key, text in step["env"].items()
    }
    assert "${{" not in step["run"], "an expression within a script is an injection"
    assert not any("${{" in value for value in values.values())
    programs = folder / "runner/shardctl/bin"
    programs.mkdir(parents=True, exist_ok=True)
    shutil.copy(shutil.which("shardctl", path=environment["PATH"]), programs)
    files = {name: str(folder / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    runner = {"RUNNER_TEMP": str(folder / "runner"), "GITHUB_ACTIONS": "true", **files}
    (folder / "step.sh").write_text(step["run"])
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", folder / "step.sh"]
    said = execute(command, environment | values | runner, folder, code=code)
    lines = (line.partition("=") for line in (folder / "github_output").read_text().splitlines())
    return said, {key: value for key, _, value in lines}


def test_the_action_verifies_and_gives_the_digest(tmp_path, environment, cut):
    inputs = {"checkpoint": str(cut), "against": str(MODEL), "arguments": "--strict\n--threads\n1\n"}
    said, outputs = run_action(tmp_path, environment, inputs)
    assert "identity   passed" in said
    assert outputs["digest"].startswith("shardctl1:")
    assert Path(outputs["report"]).read_text().startswith("<?xml")
    assert "passed" in (tmp_path / "github_step_summary").read_text()
    run_action(tmp_path, environment, inputs | {"expect": outputs["digest"]})
    run_action(tmp_path, environment, inputs | {"expect": "shardctl1:" + "0" * 32}, code=3)


def test_the_action_fails_where_a_byte_has_changed(tmp_path, environment, cut):
    damage(cut)
    said, outputs = run_action(tmp_path, environment, {"checkpoint": str(cut)}, code=3)
    assert "::error file=" in said
    assert "digest" not in outputs
    assert "failed" in (tmp_path / "github_step_summary").read_text()


def test_the_action_installs_what_it_lies_in():
    step = yaml.safe_load(ACTION.read_text())["runs"]["steps"][0]
    assert step["env"] == {"HERE": "${{ github.action_path }}", "REQUIREMENT": "${{ inputs.requirement }}"}
    assert "$HERE/../../.." in step["run"]
    assert (ACTION.parent / "../../../pyproject.toml").exists()


def test_the_workflow_gives_the_action_inputs_that_it_has():
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    (used,) = [step for step in steps if step.get("uses") == "./.github/actions/verify"]
    inputs = yaml.safe_load(ACTION.read_text())["inputs"]
    assert {*used["with"]} <= {*inputs}
    assert any(step.get("run") == ".ci/run" for step in steps)
    assert (ROOT / used["with"]["against"]).exists()


def test_the_hook_of_pre_commit_verifies_folders_of_changed_files(tmp_path, environment, cut):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    shard, record, other = next(cut.glob("*.safetensors")), cut / "shardctl.json", tmp_path / "config.json"
    other.write_text("{}")
    given = [str(path.relative_to(tmp_path)) for path in (shard, record, other)]
    assert all(re.search(hook["files"], path) for path in given)
    assert not re.search(hook["files"], "src/model.py")
    command = [*shlex.split(hook["entry"]), *given]
    assert execute(command, environment, tmp_path).count("content    passed") == 1
    damage(cut)
    assert "NOT OK" in execute(command, environment, tmp_path, code=1)


def test_slurm(tmp_path, environment):
    """`srun` runs its command once for each task, with the variables of each."""
    tasks = 'for n in 0 1 2; do SLURM_JOB_ID=7 SLURM_PROCID=$n SLURM_NTASKS=3 "$@" & done; wait'
    write_program(tmp_path / "programs/srun", tasks)
    command = ["bash", EXAMPLES / "slurm.sh", MODEL, "out", "--tp", "2"]
    execute(command, environment, tmp_path)
    assert run(["verify", str(tmp_path / "out"), "--level", "full", "--against", str(MODEL)]) == 0
    execute(command, environment, tmp_path)  # a job that is queued again


def test_torchrun(tmp_path, environment):
    pytest.importorskip("torch", reason="torchrun comes with torch")
    write_program(tmp_path / "programs/torchrun", f'exec "{sys.executable}" -m torch.distributed.run "$@"')
    command = ["bash", EXAMPLES / "torchrun.sh", MODEL, "out", "--tp", "2"]
    execute(command, environment | {"WORKERS": "2"}, tmp_path)
    assert run(["verify", str(tmp_path / "out"), "--level", "full", "--against", str(MODEL)]) == 0


def test_kubernetes(tmp_path, environment):
    job = yaml.safe_load((EXAMPLES / "kubernetes-job.yaml").read_text())["spec"]
    assert job["completionMode"] == "Indexed"
    (container,) = job["template"]["spec"]["containers"]
    values = {one["name"]: one["value"] for one in container["env"]}
    assert values["SHARDCTL_WORKERS"] == str(job["completions"])
    values |= {"SOURCE": str(MODEL), "DESTINATION": str(tmp_path / "out")}
    command = [*container["command"], container["args"][0].replace("--tp 4", "--tp 2")]
    for index in range(job["completions"]):
        assert not (tmp_path / "out").exists()
        execute(command, environment | values | {"JOB_COMPLETION_INDEX": str(index)}, tmp_path)
    assert run(["verify", str(tmp_path / "out"), "--level", "full", "--against", str(MODEL)]) == 0
    missing = values | {"SOURCE": "/nowhere", "JOB_COMPLETION_INDEX": "0", "DESTINATION": str(tmp_path / "other")}
    execute(command, environment | missing, tmp_path, code=4)


def test_gitlab(tmp_path, environment, cut):
    job = yaml.safe_load((EXAMPLES / "gitlab-ci.yml").read_text())["verify-checkpoint"]
    assert job["artifacts"]["reports"]["junit"] == "shardctl.xml"
    values = {"CHECKPOINT": str(cut), "SOURCE": str(MODEL)}
    for line in job["script"]:
        execute(["bash", "-euc", line], environment | values, tmp_path)
    assert (tmp_path / "shardctl.xml").exists()
    damage(cut)
    execute(["bash", "-euc", job["script"][0]], environment | values, tmp_path, code=3)


def test_the_container_file_copies_what_there_is_and_starts_the_program():
    lines = (EXAMPLES / "Containerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["path"]
    assert {"README.md", "LICENSE", "shardctl", hook.split("/")[0]} <= {*copied}
    (entry,) = [line for line in lines if line.startswith("ENTRYPOINT")]
    assert entry.partition(" ")[2] == f'["{next(iter(project["project"]["scripts"]))}"]'


def test_every_example_is_on_the_page():
    page = (ROOT / "docs/ci.md").read_text()
    assert [path.name for path in EXAMPLES.iterdir() if f"docs/examples/{path.name}" not in page] == []
