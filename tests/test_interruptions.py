"""Whatever ends a run, nothing is lost but the steps since the last good checkpoint."""

import dataclasses
import fcntl
import os
import shutil
import signal
import subprocess
import threading

import jax
import pytest
from numpy.testing import assert_array_equal
from processes import curve, logged_step, saved_step, start, wait_until

import train
from runtime import files
from runtime.checkpoints import load
from runtime.errors import UserError


def test_a_run_killed_and_interrupted_at_any_moment_ends_with_the_same_weights(small, tmp_path):
    """SIGKILL while a checkpoint is half written, SIGINT, then the end: the uninterrupted run bit for bit."""
    whole = dataclasses.replace(small, runs=tmp_path, name="whole", steps=300, save_every=10, num_samples=0)
    state = train.train(whole)
    config = dataclasses.replace(whole, name="killed")
    saves = config.directory / "checkpoints"
    torn = lambda: any("tmp" in p.name for p in saves.glob("*"))  # noqa: E731

    process, output = start(config)
    wait_until(lambda: saved_step(config) >= 10 and torn(), process, output)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert torn() and 0 < logged_step(config) < 300
    saved, metrics = saved_step(config), config.directory / "metrics.jsonl"
    before = metrics.stat().st_ino  # resuming, a run writes the file anew, without the steps that are lost

    process, output = start(config)
    resumed = lambda: metrics.stat().st_ino != before and logged_step(config) >= saved + 2  # noqa: E731
    wait_until(resumed, process, output)
    with pytest.raises(UserError, match="is locked by another process"):
        files.lock(config.directory)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 0, output.read_text()[-2000:]
    assert f"from step {saved}\n" in output.read_text() and not torn()
    assert "saved; run the same command again to resume" in output.read_text()
    assert saved < saved_step(config) == logged_step(config) < 300

    process, output = start(config)
    assert process.wait(timeout=240) == 0, output.read_text()[-2000:]
    jax.tree.map(assert_array_equal, load(str(config.directory)).model, state.ema)
    assert curve(config) == curve(whole)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_ends_the_run_and_names_the_last_good_checkpoint(small, tmp_path, capsys):
    """A run on a disk for two checkpoints, not three; with room again it resumes from the last whole one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=True)
    try:
        config = dataclasses.replace(
            small, runs=disk, name="full", keep=100, save_every=3, log_every=3, steps=300
        )
        process, output = start(config, logs=tmp_path)
        assert process.wait(timeout=240) == 1
        (complaint,) = (line for line in output.read_text().splitlines() if line.startswith("error: "))
        assert "could not be saved" in complaint and "No space left" in complaint
        safe = int(complaint.split("the last good checkpoint is ")[1])
        assert safe == saved_step(config) > 0
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        train.train(dataclasses.replace(config, keep=1, num_samples=0))
        assert f"from step {safe}\n" in capsys.readouterr().out and saved_step(config) == 300
        files.unlock(config.directory)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_who_needs_what_another_process_is_making_waits_for_it(tmp_path, capsys):
    """As two runs that begin with the same encoder do."""
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=files.lock, args=(tmp_path,), kwargs=dict(wait=True), daemon=True)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive() and "waiting for it" in capsys.readouterr().out
    waiting.join(10)
    assert not waiting.is_alive() and tmp_path in files.LOCKS
    files.unlock(tmp_path)
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("harm", ["truncate", "remove"])
def test_a_torn_checkpoint_gives_way_to_the_one_before(finished, harm, tmp_path, capsys):
    whole, state = finished
    config = dataclasses.replace(whole, runs=tmp_path)
    shutil.copytree(whole.directory, config.directory)
    files = [
        f
        for f in (config.directory / "checkpoints" / "20").rglob("*")
        if f.is_file() and f.stat().st_size > 1000
    ]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:100]) if harm == "truncate" else file.unlink()
    continued = train.train(config)
    output = capsys.readouterr().out
    assert "checkpoint 20 (" in output and "going back to checkpoint 18" in output
    jax.tree.map(assert_array_equal, continued.model, state.model)


def test_a_run_without_a_readable_checkpoint_is_not_started_anew(finished, tmp_path):
    whole, _ = finished
    config = dataclasses.replace(whole, runs=tmp_path)
    shutil.copytree(whole.directory, config.directory)
    for file in (config.directory / "checkpoints").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.unlink()
    with pytest.raises(UserError, match="no checkpoint can be read: 20"):
        train.train(config)
