"""Kills, network faults and races of conversions into and out of buckets; prints a Markdown table.

python docs/benchmarks/faults_buckets.py WORKDIR [--points 12] [--rounds 32] [--stores s3,gs,az]

Each case is a process of its own, over a proxy that counts requests: it is killed (SIGKILL) after some of them, or one
answer is lost or is a 500 or 503. After a kill there must be no record, or that of a checkpoint which is whole; the
same commands run again must end with exit code 0 and the bytes that a directory has. After a fault the first run must.
In a round of a race two commands begin within a second, and some are killed: a finished place must hold what one of
them makes and nothing else, and a further command must finish.
az needs Azurite (`npm install --prefix .venv/azurite azurite`).
"""

import argparse
import contextlib
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cloud"))
from cloud_models import llama, on_disk
from fault_proxy import LOST
from stores import KINDS, StorePlace

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["obstore", "shardctl.cli.program", "shardctl.verbs.finish", "shardctl.verbs.reshard"])
CUT = ["--tp", "2", "--max-shard-size", "200kB", "--threads", "1"]
ONE = ["--to", "hf", "--threads", "1"]
FAULTS = {"answer lost": LOST, "500": (500, b"<Error><Code>InternalError</Code></Error>"), "503": (503, b"")}


def run_program(environment, args):
    """Be the program, in a process that was forked from one which has imported it."""
    from shardctl.cli.program import run

    os.environ.clear()
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.exit(run(args))


def start(environment, *args):
    process = FORKS.Process(target=run_program, args=(environment, [str(arg) for arg in args]))
    process.start()
    return process


class FaultSite:
    """A place in one store, the sources beside it, and what its conversions should make."""

    def __init__(self, scheme, store, folder):
        folder.mkdir(parents=True)
        self.folder = folder
        self.source = llama(folder / "source", vocab_size=90_000)
        self.place = StorePlace(scheme, store, folder)
        self.environment = {**os.environ, **self.place.environment, "TMPDIR": str(folder)}
        os.environ.update(self.place.environment)
        self.wanted = {}
        for name, options in (("cut", CUT), ("one", ONE)):
            start(self.environment, "reshard", self.source, folder / name, *options).join()
            self.wanted[name] = on_disk(folder / name)

    def commands(self, scenario):
        """What is run, one after another, and the name of what it makes."""
        source, bucket, out = self.source, self.place.address("in"), self.place.address("out")
        workers = [("reshard", source, out, *CUT, "--worker", f"{n}/2") for n in range(2)]
        return {
            "directory to bucket": ([("reshard", source, out, *CUT)], "cut"),
            "bucket to bucket": ([("reshard", bucket, out, *CUT)], "cut"),
            "workers": ([*workers, ("finish", out)], "cut"),
            "--overwrite": ([("reshard", source, out, *CUT, "--overwrite")], "cut"),
        }[scenario]

    def prepare(self, scenario):
        self.place.proxy.fault = lambda *_: None
        self.place.delete(self.place.keys())
        if scenario == "bucket to bucket":
            self.place.fill("in/", self.source)
        if scenario == "--overwrite":
            self.place.fill("out/", self.folder / "one")
        self.place.proxy.requests.clear()

    def run(self, commands, kill_after=None):
        """Exit codes; -9 for the process that was killed, after which no other begins."""
        codes = []
        for command in commands:
            process = start(self.environment, *command)
            while kill_after is not None and process.is_alive():
                if len(self.place.proxy.requests) >= kill_after:
                    process.kill()
                    break
                time.sleep(0.001)
            process.join()
            codes.append(process.exitcode)
            if codes[-1]:
                break
        return codes

    def right(self, name):
        """Whether the bucket holds what a directory has; records of a source in a bucket name its address."""
        found, wanted = self.place.held("out/"), self.wanted[name]
        return found.keys() == wanted.keys() and all(found[k] == wanted[k] for k in wanted if k != "shardctl.json")

    def unfinished(self):
        """Whether nothing looks finished that is not."""
        return "out/shardctl.json" not in self.place.keys("out/") or self.right_visible()

    def right_visible(self):
        found = {k: v for k, v in self.place.held("out/").items() if not k.startswith(".shardctl/")}
        del found["shardctl.json"]
        bodies = [{k: v for k, v in each.items() if k != "shardctl.json"} for each in self.wanted.values()]
        return found in bodies


def killed(site, scenario, points, generator):
    commands, name = site.commands(scenario)
    site.prepare(scenario)
    site.run(commands)
    total = len(site.place.proxy.requests)
    found = Counter()
    for point in sorted(generator.sample(range(1, total), min(points, total - 1))):
        site.prepare(scenario)
        codes = site.run(commands, kill_after=point)
        found["killed"] += codes[-1] == -signal.SIGKILL
        found["looked finished and was not"] += not site.unfinished()
        site.place.proxy.requests.clear()
        again = site.run(commands)
        if again == [6] and scenario == "workers":  # published already: only its notes were left
            again = site.run(commands[-1:])
        if again == [6] and "shardctl.json" in site.place.held("out/"):  # killed when nothing was left to do
            again = [0]
        found["right after a rerun"] += not any(again) and site.right(name)
        found["cases"] += 1
    return found


def at_request(proxy, number, fault, *_):
    """The fault for one request."""
    return fault if len(proxy.requests) == number else None


def disturbed(site, scenario, fault, points, generator):
    commands, name = site.commands(scenario)
    site.prepare(scenario)
    site.run(commands)
    total = len(site.place.proxy.requests)
    found = Counter()
    for point in sorted(generator.sample(range(1, total + 1), min(points, total))):
        site.prepare(scenario)
        site.place.proxy.fault = partial(at_request, site.place.proxy, point, fault)
        codes = site.run(commands)
        found["right"] += not any(codes) and site.right(name)
        found["cases"] += 1
        if any(codes):
            found[f"exit {codes[-1]}"] += 1
    return found


def raced(site, rounds, generator):
    """Two commands at once, with and without a checkpoint to replace; every third time one of them is killed."""
    found = Counter()
    site.place.proxy.turns = threading.Lock()  # moto looks at a condition and writes in two steps, which no store does
    for number in range(rounds):
        overwrite = ["--overwrite"] * (number % 2)
        site.prepare("--overwrite" if overwrite else "")
        pair = [start(site.environment, "reshard", site.source, site.place.address("out"), *CUT, *overwrite)]
        time.sleep(generator.random())
        pair.append(start(site.environment, "reshard", site.source, site.place.address("out"), *ONE, *overwrite))
        if number % 3 == 0:
            time.sleep(generator.random())
            generator.choice(pair).kill()
        for process in pair:
            process.join()
        winners = [name for name, process in zip(("cut", "one"), pair, strict=True) if process.exitcode == 0]
        objects = site.place.held("out/")
        whole = [name for name, wanted in site.wanted.items() if objects == wanted]
        kept = {k: v for k, v in objects.items() if not k.startswith(".shardctl/")} == site.wanted["one"]
        if winners:
            sound = bool(whole) and set(whole) <= set(winners)
        else:
            sound = bool(whole) or "shardctl.json" not in objects or (kept and bool(overwrite))
        start(site.environment, "reshard", site.source, site.place.address("out"), *CUT, "--overwrite").join()
        found["looked finished and was not"] += not sound
        found["right"] += sound and site.right("cut")
        found["cases"] += 1
    site.place.proxy.turns = contextlib.nullcontext()
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--points", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--stores", default=",".join(sorted(KINDS)))
    options = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    cases = good = 0
    print("| store | conversion | what happens | cases | right at the end | looked finished and was not | else |")
    print("|---|---|---|---|---|---|---|")
    for scheme in options.stores.split(","):
        store = KINDS[scheme]()
        try:
            site = FaultSite(scheme, store, options.workdir / scheme)
            generator = random.Random(15)
            for scenario in ("directory to bucket", "bucket to bucket", "workers", "--overwrite"):
                found = killed(site, scenario, options.points, generator)
                row = found["cases"], found["right after a rerun"], found["looked finished and was not"]
                cases, good = cases + row[0], good + row[1] - row[2]
                print(f"| {scheme} | {scenario} | SIGKILL | {row[0]} | {row[1]} | {row[2]} | |", flush=True)
                for name, fault in FAULTS.items():
                    found = disturbed(site, scenario, fault, max(options.points // 3, 1), generator)
                    rest = ", ".join(f"{count} {what}" for what, count in found.items() if what.startswith("exit"))
                    row = found["cases"], found["right"]
                    cases, good = cases + row[0], good + row[1]
                    print(f"| {scheme} | {scenario} | {name} | {row[0]} | {row[1]} | 0 | {rest} |", flush=True)
            found = raced(site, options.rounds, generator)
            row = found["cases"], found["right"], found["looked finished and was not"]
            cases, good = cases + row[0], good + row[1]
            print(f"| {scheme} | two commands at once | race | {row[0]} | {row[1]} | {row[2]} | |", flush=True)
            site.place.close()
        finally:
            store.close()
            shutil.rmtree(options.workdir / scheme, ignore_errors=True)
    print(f"\n{cases} cases, {good} as they should be")
    return int(good != cases)


if __name__ == "__main__":
    sys.exit(main())
