"""Reports in headless Chromium: axe-core finds nothing, in the light and in the dark, on a phone and on a desk."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardctl.cli.program import run

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "fixtures/configs_public/llama-3.1-8b.json"
STORED = ROOT / "fixtures/peft/hf/llama"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE = Path(sys.prefix, "axe", "node_modules", "axe-core", "axe.min.js")

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium"),
    pytest.mark.skipif(not AXE.exists(), reason="npm install --prefix .venv/axe axe-core"),
]

ASK = """
document.querySelectorAll("details").forEach(one => one.open = true);
axe.run().then(found => {
  const told = document.createElement("pre");
  told.id = "told";
  told.textContent = JSON.stringify({
    findings: found.violations.map(one => [one.id, one.nodes.length, one.nodes[0].html]),
    passed: found.passes.length,
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    shown: [...document.querySelectorAll("svg[role=img]")].filter(one => one.getBoundingClientRect().width > 100).length
  });
  document.body.append(told);
});
"""


def ask_browser(page, tmp_path, *, width, dark):
    scripts = f"<script>{AXE.read_text()}</script><script>{ASK}</script>"
    (tmp_path / "asked.html").write_text(page.read_text().replace("</body>", f"{scripts}</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    command += ["--virtual-time-budget=20000", "--dump-dom", f"file://{tmp_path}/asked.html"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    return json.loads(html.unescape(re.search(r'<pre id="told">(.*?)</pre>', shown, re.DOTALL)[1]))


def make_train(page):
    mesh = ("--mesh", "pp=2,fsdp=4,tp=2", "--microbatches", "4")
    run(["plan", str(LLAMA), "--for", "train", *mesh, "--gpu", "h100", "--report", str(page)])


def make_search(page):
    run(["plan", str(LLAMA), "--gpu", "a100-40g", "--search", "--gpus", "4", "--report", str(page)])


def make_conversion(page):
    run(["plan", str(STORED), "--tp", "2", "--pp", "2", "--report", str(page)])


def make_reshard(page):
    run(["reshard", str(STORED), str(page.parent / "cut"), "--tp", "2", "--dtype", "bf16", "--report", str(page)])


def make_verify(page):
    run(["reshard", str(STORED), str(page.parent / "cut"), "--tp", "2"])
    shard = next((page.parent / "cut").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    run(["verify", str(page.parent / "cut"), "--load", "cpu", "--report", str(page)])


def make_inspection(page):
    run(["inspect", str(ROOT / "fixtures/modelopt/nvfp4"), "--stats", "--report", str(page)])


PAGES = {
    "inspect": make_inspection,
    "train": make_train,
    "search": make_search,
    "conversion": make_conversion,
    "reshard": make_reshard,
    "verify": make_verify,
}


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_found_and_nothing_is_wider_than_the_window(name, tmp_path):
    page = tmp_path / "page.html"
    PAGES[name](page)
    for width, dark in ((390, False), (1440, True)):
        told = ask_browser(page, tmp_path, width=width, dark=dark)
        assert told["findings"] == []
        assert told["passed"] > 20
        assert told["wide"] <= 0
        assert told["shown"] == page.read_text().count('role="img"') > 0


def test_a_fault_would_be_found(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text("<html><body><img src=''><p style='color:#eee;background:#fff'>pale</p></body></html>")
    told = ask_browser(page, tmp_path, width=390, dark=False)
    assert {"image-alt", "html-has-lang", "color-contrast"} <= {one[0] for one in told["findings"]}
