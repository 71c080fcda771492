"""What a run leaves behind, how its state moves, and what it refuses."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from processes import curve

import data
import train
from config import PRESETS, config_from
from methods.elf import elf_method, make_model
from runtime import checkpoints
from runtime.errors import UserError
from runtime.mesh import make_mesh, place_rows, replicate


def test_a_run_leaves_everything_needed_to_read_it(finished):
    config, _ = finished
    assert json.loads((config.directory / "config.json").read_text())["learning_rate"] == 0.01
    assert config_from(json.loads((config.directory / "config.json").read_text())) == config
    assert [line["step"] for line in checkpoints.read_metrics(config.directory)] == list(range(1, 21))
    assert len((config.directory / "samples" / "final.jsonl").read_text().splitlines()) == 16
    assert (config.directory / "loss.png").stat().st_size > 10_000
    assert (config.directory / "tokenizer" / "tokenizer.json").exists()
    assert min(json.loads((config.directory / "embedding.json").read_text())["std"]) > 0


def test_the_best_checkpoint_outlives_newer_ones(finished, tmp_path):
    """The newest checkpoints are kept, and the one with the smallest loss on held-out rows."""
    _, state = finished
    manager = checkpoints.open_checkpoints(tmp_path, keep=2)
    for step, loss in enumerate([3.0, 1.0, 2.0, 4.0, 5.0]):
        checkpoints.save(manager, step, state, dict(validation_loss=loss))
    checkpoints.save(manager, 5, state, {})  # after a SIGTERM there is no time to validate
    checkpoints.finish_saving(manager)
    assert manager.all_steps() == [1, 4, 5]
    reader = checkpoints.open_checkpoints(tmp_path, keep=None)
    assert (reader.best_step(), reader.latest_step()) == (1, 5)


def test_held_out_rows_are_scored_the_same_at_every_save(finished):
    config, _ = finished
    scored = {
        line["step"]: line for line in checkpoints.read_metrics(config.directory) if "validation_loss" in line
    }
    assert set(scored) == {9, 18, 20}
    assert scored[20]["validation_loss"] < scored[9]["validation_loss"]
    assert all(
        np.isfinite(line["validation_mse"]) and np.isfinite(line["validation_ce"]) for line in scored.values()
    )


def test_a_finished_run_is_not_trained_again(finished):
    config, state = finished
    again = train.train(config)
    assert int(again.step) == config.steps
    jax.tree.map(assert_array_equal, again.model, state.model)


def test_layers_and_seeds_start_differently():
    config = PRESETS["stories"]
    one, two = (make_model(config, 50, 16, jax.random.key(seed), 1) for seed in (0, 1))
    first, second = one.blocks.attend.qkv.weight[:2]
    assert not jnp.allclose(first, second) and not jnp.allclose(
        one.blocks.attend.qkv.weight, two.blocks.attend.qkv.weight
    )


def test_averaged_weights_follow_the_weights(small, stories):
    """After one step from equal weights, the average has moved by 1 - decay of the step."""
    mesh = make_mesh("1", 16)
    embedder = replicate(data.load_embedder(small, stories), mesh)
    method = elf_method(small, len(stories.tokenizer), len(embedder.mean), mesh)
    trainer = train.build(small, method, mesh)
    state = trainer.init()
    state = state._replace(model=jax.tree.map(lambda a: a + 1.0, state.ema))
    before, rows = jax.tree.map(np.array, state.ema), place_rows(stories.rows, np.arange(16), mesh)
    with jax.set_mesh(mesh):
        after, _ = trainer.step(state, embedder, rows, replicate(jax.random.key(0), mesh))
    expected = jax.tree.map(lambda e, m: small.ema * e + (1 - small.ema) * m, before, after.model)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=1e-6), after.ema, expected)


def test_bfloat16_computes_what_float32_does_roughly(finished, tmp_path):
    whole, _ = finished
    config = dataclasses.replace(whole, runs=tmp_path, precision="bfloat16", num_samples=0)
    state = train.train(config)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((state.model, state.ema)))
    assert_allclose(curve(config)[:8], curve(whole)[:8], rtol=0.05)


def test_a_run_of_other_settings_is_refused_by_name(finished):
    config, _ = finished
    before = (config.directory / "config.json").read_text()
    with pytest.raises(UserError, match=r"learning_rate \(0.01 there, 0.5 now\), seed \(0 there, 3 now\)"):
        train.train(dataclasses.replace(config, learning_rate=0.5, seed=3))
    assert (config.directory / "config.json").read_text() == before


def test_what_does_not_change_the_numbers_may_change_on_resume(finished):
    config, _ = finished
    train.train(dataclasses.replace(config, mesh="8", log_every=2, num_samples=2))


def test_a_checkpoint_that_does_not_fit_is_refused(finished):
    config, state = finished
    manager = checkpoints.open_checkpoints(config.directory, keep=None)
    narrow = jax.tree.map(lambda a: a[..., :1] if a.ndim else a, state.ema)
    with pytest.raises(UserError, match="does not fit this model"):
        checkpoints.restore(manager, manager.latest_step(), {"ema": narrow})


def test_a_loss_that_is_not_a_number_stops_the_run(small, tmp_path):
    config = dataclasses.replace(
        small, runs=tmp_path, learning_rate=1e30, clip=1e30, warmup_steps=1, optimizer="adamw"
    )
    with pytest.raises(UserError, match="the loss became nan by step"):
        train.train(config)
    kept = checkpoints.open_checkpoints(config.directory, keep=None).latest_step()
    assert kept is None or kept < config.steps
