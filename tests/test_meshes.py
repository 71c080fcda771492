"""The same run on any mesh and number of processes."""

import dataclasses
import shutil
import signal
import socket

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose
from processes import curve, logged_step, saved_step, start, wait_until

import train
from runtime import checkpoints
from runtime.mesh import ALL, make_mesh, shardings


def test_large_leaves_are_sharded_and_small_ones_are_not(monkeypatch):
    monkeypatch.setattr("runtime.mesh.SMALL", 1000)
    mesh = make_mesh("4x2", 8)
    shapes = dict(matrix=(12, 64, 96), odd=(101, 30), bias=(12, 64))
    leaves = {name: jax.ShapeDtypeStruct(shape, float) for name, shape in shapes.items()}
    over_all, over_fsdp = (
        {k: v.spec for k, v in shardings(leaves, mesh, axes).items()} for axes in (ALL, ("fsdp",))
    )
    assert over_all == dict(matrix=P(None, None, ("data", "fsdp")), odd=P(None, ("fsdp",)), bias=P())
    assert over_fsdp == dict(matrix=P(None, None, ("fsdp",)), odd=P(None, ("fsdp",)), bias=P())


def stopped_at_9(config, runs, **changes):
    """A copy of a run as if it had stopped after its first checkpoint."""
    copy = dataclasses.replace(config, runs=runs, num_samples=0, **changes)
    shutil.copytree(config.directory, copy.directory)
    for later in ("18", "20"):
        shutil.rmtree(copy.directory / "checkpoints" / later)
    checkpoints.Metrics(copy.directory, 9)  # drops the later lines
    return copy


def same(config, state, finished):
    """Losses and weights equal those of one device, up to the order of sums."""
    whole, one_device = finished
    assert_allclose(curve(config), curve(whole), rtol=1e-3)
    jax.tree.map(
        lambda a, b: assert_allclose(a, b, atol=5e-3),
        (state.model, state.ema),
        (one_device.model, one_device.ema),
    )


@pytest.fixture(scope="module")
def on_eight(finished, tmp_path_factory):
    """The uninterrupted run on eight devices, with the weights sharded over two."""
    config = dataclasses.replace(
        finished[0], runs=tmp_path_factory.mktemp("eight"), mesh="4x2", num_samples=0
    )
    return config, train.train(config)


def test_the_same_run_on_eight_devices(finished, on_eight):
    same(*on_eight, finished)
    losses = curve(on_eight[0])
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_a_run_resumes_on_another_mesh(finished, on_eight, tmp_path, capsys):
    config = stopped_at_9(on_eight[0], tmp_path, mesh="1")
    state = train.train(config)
    assert "from step 9" in capsys.readouterr().out
    same(config, state, finished)


def test_accumulated_parts_make_the_same_step(finished, tmp_path):
    config = dataclasses.replace(finished[0], runs=tmp_path, accumulate=2, num_samples=0)
    same(config, train.train(config), finished)


def start_pair(config):
    """Start two processes of four devices each that find each other through a coordinator."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    config = dataclasses.replace(config, coordinator=address, processes=2)
    return [start(dataclasses.replace(config, process_id=i), devices=4) for i in range(2)]


def test_two_processes_train_as_one(finished, tmp_path):
    """They resume what one device began, and sample; a SIGTERM to one stops both after the same step.

    One device can end the run from the checkpoint.
    """
    config = stopped_at_9(finished[0], tmp_path, name="whole", save_every=50, sample_every=10, mesh="8")
    (first, output), (other, _) = start_pair(config)
    wait_until(lambda: logged_step(config) >= 11, first, output)
    other.send_signal(signal.SIGTERM)
    assert [p.wait(timeout=120) for p in (first, other)] == [0, 0], output.read_text()[-3000:]
    assert "from step 9" in output.read_text() and "saved; run the same command again" in output.read_text()
    assert len((config.directory / "samples" / "step-10.jsonl").read_text().splitlines()) == 16
    assert 11 <= saved_step(config) == logged_step(config) < 20
    config = dataclasses.replace(config, mesh="1", save_every=9, sample_every=0)
    same(config, train.train(config), finished)
