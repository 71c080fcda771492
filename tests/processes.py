"""Runs in processes of their own, as a user starts them."""

import dataclasses
import os
import subprocess
import sys
import time

from conftest import QUICK, ROOT

from config import PRESETS
from corpora import rows
from runtime import checkpoints


def curve(config, key="loss"):
    return [line[key] for line in checkpoints.read_metrics(config.directory)]


SMALL_CORPUS = f"import train, corpora.rows as r; r.WRITTEN['train'] = {rows.WRITTEN['train']}; train.main()"


def command(config):
    """Command line of a config, on the small corpora of the tests."""
    default, words = PRESETS["stories"], [sys.executable, "-c", SMALL_CORPUS]
    for field in dataclasses.fields(config):
        if (value := getattr(config, field.name)) != getattr(default, field.name):
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return words


def start(config, devices=8, logs=None):
    """Start a config in a process of its own; its output goes to a file, as an unread pipe would block it.

    Several processes share no compiled programs: the cache loses the order of collectives on CPU.
    """
    env = os.environ | {"XLA_FLAGS": f"{QUICK} --xla_force_host_platform_device_count={devices}"}
    env |= {"JAX_ENABLE_COMPILATION_CACHE": str(config.processes == 1).lower()}
    output = (logs or config.runs) / f"{config.name}-{config.process_id}.out"
    with output.open("a") as out:
        streams = dict(stdout=out, stderr=subprocess.STDOUT)
        return subprocess.Popen(command(config), cwd=ROOT, env=env, **streams), output


def wait_until(condition, process, output):
    deadline = time.time() + 240
    while not condition():
        assert process.poll() is None and time.time() < deadline, output.read_text()[-2000:]
        time.sleep(0.02)


def logged_step(config):
    return max((line["step"] for line in checkpoints.read_metrics(config.directory)), default=0)


def saved_step(config):
    finished = (int(p.name) for p in (config.directory / "checkpoints").glob("*") if p.name.isdigit())
    return max(finished, default=0)
