"""The same run on any mesh and number of processes. Most leave out the samples, which take as long to compile as training."""

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

import runs
import train


def test_large_leaves_are_split_and_small_ones_are_not(monkeypatch):
    monkeypatch.setattr("mesh.SMALL", 1000)
    mesh = train.make_mesh("4x2", 8)
    shapes = dict(matrix=(12, 64, 96), odd=(101, 30), bias=(12, 64))
    leaves = {name: jax.ShapeDtypeStruct(shape, float) for name, shape in shapes.items()}
    over_all, over_fsdp = ({k: v.spec for k, v in train.split(leaves, mesh, axes).items()} for axes in (train.ALL, ("fsdp",)))
    assert over_all == dict(matrix=P(None, None, ("data", "fsdp")), odd=P(None, ("fsdp",)), bias=P())
    assert over_fsdp == dict(matrix=P(None, None, ("fsdp",)), odd=P(None, ("fsdp",)), bias=P())


@pytest.fixture(scope="module")
def on_eight(finished, tmp_path_factory):
    """The uninterrupted run on eight devices."""
    config = dataclasses.replace(finished[0], runs=tmp_path_factory.mktemp("eight"), mesh="8", num_samples=0)
    return config, train.train(config)


def test_the_same_run_on_eight_devices(finished, on_eight):
    """Losses and weights over twenty steps equal those of one device, up to the order of sums."""
    (whole, state), (config, spread) = finished, on_eight
    assert_allclose(curve(config), curve(whole), rtol=1e-3)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=5e-3), spread.ema, state.ema)
    assert np.mean(curve(config)[-5:]) < np.mean(curve(config)[:5])


def test_accumulated_parts_make_the_same_step(finished, tmp_path):
    whole, state = finished
    config = dataclasses.replace(whole, runs=tmp_path, accumulate=2, num_samples=0)
    parts = train.train(config)
    assert_allclose(curve(config), curve(whole), rtol=1e-3)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=5e-3), parts.ema, state.ema)


def interrupted(config, tmp_path, **changes):
    """A copy of a run as if it had stopped after its first checkpoint."""
    copy = dataclasses.replace(config, runs=tmp_path, **changes)
    shutil.copytree(config.directory, copy.directory)
    for later in ("18", "20"):
        shutil.rmtree(copy.directory / "checkpoints" / later)
    runs.Metrics(copy.directory, 9)  # drops what was logged later
    return copy


def test_a_run_continues_on_another_mesh(on_eight, tmp_path, capsys):
    whole, state = on_eight
    config = interrupted(whole, tmp_path, mesh="4x2")
    continued = train.train(config)
    assert "from step 9" in capsys.readouterr().out
    assert_allclose(curve(config), curve(whole), rtol=1e-3)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=5e-3), continued.model, state.model)


def start_pair(config):
    """Two processes of four devices each that find each other through a coordinator."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return [start(dataclasses.replace(config, coordinator=address, processes=2, process_id=i), devices=4) for i in range(2)]


def test_two_processes_train_as_one(on_eight, tmp_path):
    """They continue what one began, and sample. A SIGTERM to one of them stops both after the same step, with a checkpoint from
    which one device can end the run."""
    whole, state = on_eight
    config = interrupted(whole, tmp_path, name="pair", save_every=50, sample_every=10)
    (chief, said), (other, _) = start_pair(config)
    wait_until(lambda: logged_step(config) >= 11, chief, said)
    other.send_signal(signal.SIGTERM)
    assert [p.wait(timeout=120) for p in (chief, other)] == [0, 0], said.read_text()[-3000:]
    assert "from step 9" in said.read_text() and "saved; the same command continues" in said.read_text()
    assert len((config.directory / "samples" / "step-10.jsonl").read_text().splitlines()) == 16
    assert 11 <= saved_step(config) == logged_step(config) < 20
    ended = train.train(dataclasses.replace(config, mesh="1"))
    assert_allclose(curve(config), curve(whole), rtol=1e-3)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=5e-3), ended.model, state.model)
