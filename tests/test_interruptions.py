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

import runs
import train
from errors import Refused
from trained import load_run


def test_killed_and_started_again_a_run_ends_with_the_same_weights(small, tmp_path):
    """SIGKILL somewhere between checkpoints, then the same command: bitwise the uninterrupted run, metrics too."""
    whole = dataclasses.replace(small, runs=tmp_path, name="whole", steps=60, save_every=15, num_samples=0)
    state = train.train(whole)
    config = dataclasses.replace(whole, name="killed")
    process, said = start(config)
    wait_until(lambda: saved_step(config) > 0, process, said)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < logged_step(config) < 60
    process, said = start(config)
    assert process.wait(timeout=240) == 0, said.read_text()[-2000:]
    assert "continuing" in said.read_text()
    jax.tree.map(assert_array_equal, load_run(config.directory, train.make_mesh("1", 1)).model, state.ema)
    assert curve(config) == curve(whole)


def test_an_interrupt_saves_and_leaves_quietly(small, tmp_path):
    """SIGINT; SIGTERM is tested with several processes."""
    config = dataclasses.replace(small, runs=tmp_path, name="interrupted", steps=100_000, save_every=50_000)
    process, said = start(config)
    wait_until(lambda: logged_step(config) >= 4, process, said)
    with pytest.raises(Refused, match="is being written by another process"):
        runs.claim(config.directory)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 0, said.read_text()[-2000:]
    assert "saved; the same command continues" in said.read_text()
    assert saved_step(config) == logged_step(config)


def test_killed_while_saving_a_run_goes_on_from_the_save_before(small, tmp_path):
    """SIGKILL while a checkpoint is half written: the next start clears it and continues from the whole one before."""
    config = dataclasses.replace(small, runs=tmp_path, name="torn", steps=2_000, save_every=5)
    checkpoints = config.directory / "checkpoints"
    process, said = start(config)
    wait_until(lambda: saved_step(config) >= 10 and any("tmp" in p.name for p in checkpoints.glob("*")), process, said)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert any("tmp" in p.name for p in checkpoints.glob("*"))
    whole = saved_step(config)
    process, said = start(dataclasses.replace(config, save_every=1000))
    wait_until(lambda: "continuing" in said.read_text(), process, said)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert f"from step {whole}\n" in said.read_text()
    assert not any("tmp" in p.name for p in checkpoints.glob("*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_ends_the_run_with_a_word_on_what_is_safe(small, tmp_path):
    """A run on a disk that holds two checkpoints but not three; with room again it goes on from the last whole one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=True)
    try:
        config = dataclasses.replace(small, runs=disk, name="full", keep=100, save_every=3, log_every=3, steps=300)
        process, said = start(config, logs=tmp_path)
        assert process.wait(timeout=240) == 1
        (complaint,) = (line for line in said.read_text().splitlines() if line.startswith("error: "))
        assert "could not be saved" in complaint and "No space left" in complaint
        safe = int(complaint.split("the last good checkpoint is ")[1])
        assert safe == saved_step(config) > 0
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        process, said = start(dataclasses.replace(config, keep=1), logs=tmp_path)
        wait_until(lambda: saved_step(config) > safe, process, said)
        assert f"from step {safe}\n" in said.read_text()
        process.kill()
        process.wait()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_who_needs_what_another_process_is_making_waits_for_it(tmp_path, capsys):
    """As two runs that begin with the same encoder do."""
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=runs.claim, args=(tmp_path,), kwargs=dict(wait=True), daemon=True)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive() and "waiting for it" in capsys.readouterr().out
    waiting.join(10)
    assert not waiting.is_alive() and tmp_path in runs.CLAIMED
    runs.release(tmp_path)
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("harm", ["truncate", "remove"])
def test_a_torn_checkpoint_gives_way_to_the_one_before(finished, harm, tmp_path, capsys):
    whole, state = finished
    config = dataclasses.replace(whole, runs=tmp_path)
    shutil.copytree(whole.directory, config.directory)
    files = [f for f in (config.directory / "checkpoints" / "20").rglob("*") if f.is_file() and f.stat().st_size > 1000]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:100]) if harm == "truncate" else file.unlink()
    continued = train.train(config)
    said = capsys.readouterr().out
    assert "checkpoint 20 (" in said and "going back to checkpoint 18" in said
    jax.tree.map(assert_array_equal, continued.model, state.model)


def test_a_run_without_a_readable_checkpoint_is_not_started_anew(finished, tmp_path):
    whole, _ = finished
    config = dataclasses.replace(whole, runs=tmp_path)
    shutil.copytree(whole.directory, config.directory)
    for file in (config.directory / "checkpoints").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.unlink()
    with pytest.raises(Refused, match="no checkpoint can be read: 20"):
        train.train(config)
