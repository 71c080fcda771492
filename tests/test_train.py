"""Runs: the same on any mesh, whatever interrupts them, and loud about bad input."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import QUICK, ROOT
from numpy.testing import assert_allclose, assert_array_equal

import corpora
import runs
import settings
import train
from errors import Refused
from eval import load_run


def curve(config, key="loss"):
    return [line[key] for line in runs.read_metrics(config.directory)]


def test_a_run_leaves_everything_needed_to_read_it(finished):
    config, _ = finished
    assert json.loads((config.directory / "config.json").read_text())["learning_rate"] == 0.01
    assert settings.config_from(json.loads((config.directory / "config.json").read_text())) == config
    assert [line["step"] for line in runs.read_metrics(config.directory)] == list(range(1, 21))
    assert len((config.directory / "samples" / "final.jsonl").read_text().splitlines()) == 16
    assert (config.directory / "loss.png").stat().st_size > 10_000
    assert (config.directory / "tokenizer" / "tokenizer.json").exists()
    assert np.all(np.load(config.directory / "embedding.npz")["std"] > 0)


def command(config):
    """The command line that stands for a configuration."""
    default, words = settings.PRESETS["stories"], [sys.executable, "train.py"]
    for field in dataclasses.fields(config):
        if (value := getattr(config, field.name)) != getattr(default, field.name):
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return words


def start(config, devices=8, logs=None):
    """The command in a process of its own; what it says goes to a file, as a pipe that nobody reads would stop it."""
    env = os.environ | {"XLA_FLAGS": f"{QUICK} --xla_force_host_platform_device_count={devices}"}
    said = (logs or config.runs) / f"{config.name}-{config.process_id}.out"
    with said.open("a") as out:
        return subprocess.Popen(command(config), cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT), said


def wait_until(condition, process, said):
    deadline = time.time() + 240
    while not condition():
        assert process.poll() is None and time.time() < deadline, said.read_text()[-2000:]
        time.sleep(0.02)


def logged_step(config):
    return max((line["step"] for line in runs.read_metrics(config.directory)), default=0)


def saved_step(config):
    finished = (int(p.name) for p in (config.directory / "checkpoints").glob("*") if p.name.isdigit())
    return max(finished, default=0)


def test_killed_and_started_again_a_run_ends_with_the_same_weights(small, tmp_path):
    """SIGKILL somewhere between checkpoints, then the same command: bitwise the uninterrupted run, metrics too."""
    whole = dataclasses.replace(small, runs=tmp_path, name="whole", steps=120, save_every=30)
    state = train.train(whole)
    config = dataclasses.replace(whole, name="killed")
    process, said = start(config)
    wait_until(lambda: saved_step(config) > 0, process, said)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < logged_step(config) < 120
    process, said = start(config)
    assert process.wait(timeout=240) == 0, said.read_text()[-2000:]
    assert "continuing" in said.read_text()
    jax.tree.map(assert_array_equal, load_run(config.directory, train.make_mesh("1", 1))[1], state.ema)
    assert curve(config) == curve(whole)


def test_sigterm_saves_and_leaves_quietly(small, tmp_path):
    config = dataclasses.replace(small, runs=tmp_path, name="terminated", steps=100_000, save_every=50_000)
    process, said = start(config)
    wait_until(lambda: logged_step(config) >= 4, process, said)
    process.send_signal(signal.SIGTERM)
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
        assert "could not be saved" in complaint and "No space left" in complaint and "the last good one is" in complaint
        safe = int(complaint.split("the last good one is ")[1])
        assert safe == saved_step(config) > 0
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        process, said = start(dataclasses.replace(config, keep=1), logs=tmp_path)
        wait_until(lambda: saved_step(config) > safe, process, said)
        assert f"from step {safe}\n" in said.read_text()
        process.kill()
        process.wait()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_the_best_checkpoint_outlives_newer_ones(finished, tmp_path):
    """Kept are the newest and the one with the least loss on held-out rows."""
    _, state = finished
    checkpoints = runs.open_checkpoints(tmp_path, keep=2)
    for step, loss in enumerate([3.0, 1.0, 2.0, 4.0, 5.0]):
        runs.save(checkpoints, step, state, dict(validation_loss=loss))
    runs.save(checkpoints, 5, state, {})  # after a SIGTERM there is no time to validate
    runs.finish_saving(checkpoints)
    assert checkpoints.all_steps() == [1, 4, 5]
    reader = runs.open_checkpoints(tmp_path, keep=None)
    assert (reader.best_step(), reader.latest_step()) == (1, 5)


def test_held_out_rows_are_scored_the_same_at_every_save(finished):
    config, _ = finished
    scored = {line["step"]: line for line in runs.read_metrics(config.directory) if "validation_loss" in line}
    assert set(scored) == {9, 18, 20}
    assert scored[20]["validation_loss"] < scored[9]["validation_loss"]
    assert all(np.isfinite(line["validation_mse"]) and np.isfinite(line["validation_ce"]) for line in scored.values())


@pytest.fixture
def without_samples(monkeypatch):
    """Sampling takes as long to compile as training."""
    monkeypatch.setattr(train, "sample_texts", lambda config, sampler, model, tokenizer, n, *_: ["Once."] * n)


@pytest.mark.parametrize("mesh", ["8", "4x2", "2x4"])
def test_the_same_run_on_any_mesh(finished, mesh, tmp_path, without_samples):
    """Losses and weights over twenty steps equal those of one device, up to the order of sums."""
    whole, state = finished
    config = dataclasses.replace(whole, runs=tmp_path, mesh=mesh)
    spread = train.train(config)
    assert_allclose(curve(config), curve(whole), rtol=1e-3)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=5e-3), spread.ema, state.ema)
    assert np.mean(curve(config)[-5:]) < np.mean(curve(config)[:5])


def test_accumulated_parts_make_the_same_step(finished, tmp_path, without_samples):
    whole, state = finished
    config = dataclasses.replace(whole, runs=tmp_path, accumulate=2)
    parts = train.train(config)
    assert_allclose(curve(config), curve(whole), rtol=1e-3)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=5e-3), parts.ema, state.ema)


def interrupted(config, tmp_path, **changes):
    """A copy of a run as if it had stopped before its last checkpoint."""
    copy = dataclasses.replace(config, runs=tmp_path, **changes)
    shutil.copytree(config.directory, copy.directory)
    shutil.rmtree(copy.directory / "checkpoints" / str(config.steps))
    return copy


@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_a_run_continues_on_another_mesh(finished, mesh, tmp_path, capsys, without_samples):
    whole, state = finished
    config = interrupted(whole, tmp_path, mesh=mesh)
    continued = train.train(config)
    assert "from step 18" in capsys.readouterr().out
    assert_allclose(curve(config), curve(whole), rtol=1e-3)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=5e-3), continued.model, state.model)


def start_pair(config):
    """Two processes of four devices each that find each other through a coordinator."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return [start(dataclasses.replace(config, coordinator=address, processes=2, process_id=i), devices=4) for i in range(2)]


def assert_ends_like(config, whole):
    mesh = train.make_mesh("1", 1)
    ours, theirs = (load_run(c.directory, mesh)[1] for c in (config, whole))
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=5e-3), ours, theirs)


def test_two_processes_train_as_one(finished, tmp_path):
    """Two processes of four devices each, found through a coordinator."""
    whole, _ = finished
    config = dataclasses.replace(whole, runs=tmp_path, name="pair", mesh="8")
    processes = start_pair(config)
    assert [p.wait(timeout=300) for p, _ in processes] == [0, 0], processes[0][1].read_text()[-3000:]
    assert_allclose(curve(config), curve(whole), rtol=1e-3)
    assert_ends_like(config, whole)


def test_two_processes_continue_what_one_began_and_stop_together(finished, tmp_path):
    """A SIGTERM to one of them stops both after the same step, with a checkpoint from which one can end the run."""
    whole, _ = finished
    config = interrupted(whole, tmp_path, name="begun", mesh="8", save_every=50)
    shutil.rmtree(config.directory / "checkpoints" / "18")
    runs.Metrics(config.directory, 9)  # drops what was logged later
    (chief, said), (other, _) = start_pair(config)
    wait_until(lambda: logged_step(config) >= 11, chief, said)
    other.send_signal(signal.SIGTERM)
    assert [p.wait(timeout=120) for p in (chief, other)] == [0, 0], said.read_text()[-3000:]
    assert "from step 9" in said.read_text() and "saved; the same command continues" in said.read_text()
    assert 11 <= saved_step(config) == logged_step(config) < 20
    train.train(dataclasses.replace(config, mesh="1"))
    assert_allclose(curve(config), curve(whole), rtol=1e-3)
    assert_ends_like(config, whole)


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


def test_a_finished_run_is_not_trained_again(finished):
    config, state = finished
    again = train.train(config)
    assert int(again.step) == config.steps
    jax.tree.map(assert_array_equal, again.model, state.model)


def test_layers_and_seeds_start_differently():
    config = settings.PRESETS["stories"]
    one, two = (train.make_model(config, 50, 16, jax.random.key(seed), 1) for seed in (0, 1))
    first, second = one.blocks.attend.qkv.weight[:2]
    assert not jnp.allclose(first, second) and not jnp.allclose(one.blocks.attend.qkv.weight, two.blocks.attend.qkv.weight)


def test_averaged_weights_follow_the_weights(small, tmp_path):
    """After one step from equal weights, the average has moved by 1 - decay of the step."""
    config = dataclasses.replace(small, ema=0.75)
    corpus, embedder = train.prepare(config)
    optimizer = train.optimizer_of(config)
    mesh = train.make_mesh("1", 16)
    state = train.state_maker(config, optimizer, len(corpus.tokenizer), len(embedder.mean), mesh, 1)()
    state = state._replace(model=jax.tree.map(lambda a: a + 1.0, state.ema))
    rows = corpora.Rows(*(jnp.asarray(a[:16], jnp.int32) for a in corpus.rows))
    after, _ = jax.jit(train.make_step(config, optimizer, jnp.float32, mesh))(state, embedder, rows, jax.random.key(0))
    expected = jax.tree.map(lambda e, m: 0.75 * e + 0.25 * m, state.ema, after.model)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=1e-6), after.ema, expected)


def test_bfloat16_computes_what_float32_does_roughly(finished, tmp_path, without_samples):
    whole, _ = finished
    config = dataclasses.replace(whole, runs=tmp_path, precision="bfloat16")
    state = train.train(config)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((state.model, state.ema)))
    assert_allclose(curve(config)[:8], curve(whole)[:8], rtol=0.05)


def test_paper_sizes_bring_the_settings_of_table_7():
    b, m, large = (settings.parse(["--model", size], "") for size in ("elf-b", "elf-m", "elf-l"))
    assert b.data == "owt" and b.encoder == "t5-small"
    assert (b.length, b.bottleneck, b.batch, b.optimizer, b.learning_rate) == (1024, 128, 512, "muon", 0.002)
    assert (b.t_mean, b.t_std, b.noise_scale, b.p_mean, b.p_std, b.decode_noise_scale) == (-1.5, 0.8, 2.0, 0.8, 0.8, 5.0)
    assert (b.p_decode, b.p_self_cond, b.w_min, b.w_max, b.gamma) == (0.2, 0.5, 0.5, 5.0, 1.0)
    assert (b.ema, b.clip, b.schedule) == (0.9999, 1.0, "constant")
    assert [c.steps / 19_017 for c in (b, m, large)] == [5, 4, 3]
    assert round(b.warmup_steps / 19_017, 2) == 0.5
    assert settings.parse(["--model", "elf-b", "--learning-rate", "0.1"], "").learning_rate == 0.1


# Fail loudly


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--model", "elf-x"], "--model elf-x: unknown; known are elf-b, elf-m, elf-l"),
        (["--data", "novels"], "--data novels: no such file or directory, nor one of owt"),
        (["--mesh", "16"], "--mesh 16 needs 16 devices and there are 8 (cpu)"),
        (["--mesh", "two"], "--mesh two: give one number"),
        (["--mesh", "8", "--batch", "12"], "--batch 12 does not divide over the 8 devices"),
        (["--accumulate", "3"], "--accumulate 3 does not divide --batch 32"),
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--batch", "200000"], "--batch 200000 is larger than the corpus"),
        (["--p-decode", "1.5"], "--p-decode 1.5: must be between 0 and 1"),
        (["--warmup-steps", "9999"], "--warmup-steps 9999 leaves nothing of --steps"),
        (["--w-min", "0"], "guidance scales must be positive"),
        (["--encoder", "nowhere"], "--encoder nowhere: no such directory here"),
        (["--length", "8"], "do not fit into rows of 8: raise --length"),
        (["--wandb", "project"], "pip install wandb"),
        (["--tensorboard"], "pip install tensorboardX"),
    ],
)
def test_bad_input_gets_one_line_and_a_failing_exit(flags, complaint, tmp_path, cache, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--runs", str(tmp_path), "--cache", str(cache), *flags])
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # set, so that main() does not start over
    with pytest.raises(SystemExit) as exit:
        train.main()
    message = str(exit.value.code)
    assert message.startswith("error: ") and complaint in message and "\n" not in message


def test_an_unknown_flag_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--learning-rats", "1"])
    with pytest.raises(SystemExit) as exit:
        train.main()
    assert exit.value.code not in (0, None) and "learning-rat" in capsys.readouterr().err


def test_a_run_of_other_settings_is_refused_by_name(finished):
    config, _ = finished
    before = (config.directory / "config.json").read_text()
    with pytest.raises(Refused, match=r"learning_rate \(0.01 there, 0.5 now\), seed \(0 there, 3 now\)"):
        train.train(dataclasses.replace(config, learning_rate=0.5, seed=3))
    assert (config.directory / "config.json").read_text() == before


def test_what_does_not_change_the_numbers_may_change_on_resume(finished):
    config, _ = finished
    train.train(dataclasses.replace(config, mesh="8", log_every=2, num_samples=2))


def test_a_checkpoint_that_does_not_fit_is_refused(finished):
    config, state = finished
    checkpoints = runs.open_checkpoints(config.directory, keep=None)
    narrow = jax.tree.map(lambda a: a[..., :1] if a.ndim else a, state.ema)
    with pytest.raises(Refused, match="does not fit this model"):
        runs.restore(checkpoints, checkpoints.latest_step(), {"ema": narrow})


def test_a_loss_that_is_not_a_number_stops_the_run(small, tmp_path):
    config = dataclasses.replace(small, runs=tmp_path, learning_rate=1e30, clip=1e30, warmup_steps=1, optimizer="adamw")
    with pytest.raises(Refused, match="the loss became nan by step"):
        train.train(config)
    kept = runs.open_checkpoints(config.directory, keep=None).latest_step()
    assert kept is None or kept < config.steps


def test_help_shows_the_defaults_of_the_chosen_preset(monkeypatch, capsys):
    for flags, shown in [(["--model", "elf-b"], "default: 1024"), ([], "default: 30")]:
        with pytest.raises(SystemExit):
            settings.parse([*flags, "--help"], "")
        assert shown in capsys.readouterr().out


def test_paths_are_relative_to_where_one_is():
    assert (
        not settings.PRESETS["stories"].directory.is_absolute() and Path("runs") in settings.PRESETS["stories"].directory.parents
    )
