"""Azurite, Microsoft's own emulator of Azure's store: where it is, and a process of it."""

import base64
import hashlib
import hmac
import re
import shutil
import subprocess
import sys
import urllib.request
from email.utils import formatdate
from pathlib import Path

INSIDE = Path(sys.prefix, "azurite", "node_modules", "azurite", "dist", "src", "blob", "main.js")
"""Where .ci/run installs it."""
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Everybody's: learn.microsoft.com/azure/storage/common/storage-connect-azurite, "well-known storage account"."""
HOW = "npm install --prefix .venv/azurite azurite"


def missing():
    """Why there is no Azurite here; empty if there is one."""
    if shutil.which("node") is None:
        return "Azurite needs node, which is not installed"
    return "" if INSIDE.exists() else f"Azurite is not installed: {HOW}"


class AzuriteProcess:
    """Azurite on a port of its own, in memory."""

    def __init__(self):
        options = ["--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry"]
        options += ["--skipApiVersionCheck", "--silent"]
        self._process = subprocess.Popen(["node", INSIDE, *options], stdout=subprocess.PIPE, text=True)
        said = ""
        for line in self._process.stdout:
            said += line
            found = re.search(r"listens on (http://[\d.:]+)", line)
            if found:
                self.endpoint = f"{found[1]}/{ACCOUNT}"
                return
        raise AssertionError(f"Azurite did not start: {said}")

    def make(self, container):
        """Make a container, with a request signed as Azure's "Authorize with Shared Key" says."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        lines = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        blank = "\n" * 12  # the standard headers of such a request, which are all empty
        text = f"PUT{blank}{lines}/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
        signed = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
        headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signed}", "Content-Length": "0"}
        address = f"{self.endpoint}/{container}?restype=container"
        request = urllib.request.Request(address, method="PUT", headers=headers)  # noqa: S310 - loopback
        urllib.request.urlopen(request, timeout=10).close()  # noqa: S310

    def close(self):
        self._process.kill()
        self._process.wait()
