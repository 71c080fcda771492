"""Progressive distillation: its targets, and rounds as runs."""

import dataclasses
import json
import shutil
import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from numpy.testing import assert_allclose, assert_array_equal

import distill
import elf
import losses
import train
from config import PRESETS
from corpora import rows
from encoders import scratch, t5
from report import tables
from runtime import checkpoints
from runtime.checkpoints import load
from runtime.errors import UserError
from runtime.mesh import make_mesh


def test_targets_match_the_released_ones(golden, golden_model):
    g = golden("distill")
    z, x_prev, w = (jnp.asarray(g[name]) for name in ("z_t", "self_cond", "w"))
    ts = jnp.asarray(g["grid"]).T
    z_r = distill.follow(golden_model, z, x_prev, w, ts, keep=lambda z: z)
    assert_allclose(
        losses.distill_target(z, z_r, jnp.asarray(g["t"]), jnp.asarray(g["r"])), g["target"], atol=1e-3
    )


class Exact:
    """A network that knows the data."""

    def __init__(self, x):
        self.x = x

    def denoise(self, z, x_prev, t, w):
        return self.x


@pytest.mark.parametrize("student_steps, k", [(16, 4), (4, 1), (1, 64)])
def test_a_perfect_teacher_gives_a_perfect_target(student_steps, k):
    """Whatever t, r and the number of its steps between them."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, eps = jax.random.normal(keys[0], (5, 3, 4)), jax.random.normal(keys[1], (5, 3, 4))
    t = (1 - 1 / student_steps) * jnp.linspace(0, 0.999, 5)
    r = t + 1 / student_steps
    z = t[:, None, None] * x + (1 - t)[:, None, None] * eps
    ts = distill.sub_grid(
        keys[0], jnp.arange(5), t, r, k, lambda normal: losses.logit_normal(normal, -1.5, 0.8)
    )
    assert ts.shape == (k + 1, 5) and jnp.all(jnp.diff(ts, axis=0) >= 0)
    assert_allclose(ts[0], t), assert_allclose(ts[-1], r)
    z_r = distill.follow(Exact(x), z, jnp.zeros_like(z), jnp.ones(5), ts, keep=lambda z: z)
    assert_allclose(losses.distill_target(z, z_r, t, r), x, atol=2e-3)


@partial(jax.jit, static_argnums=(5, 6))
def token_losses(*args):
    return distill.token_losses(*args, noise_scale=2.0, decode_noise_scale=1.0)


def test_a_student_equal_to_its_teacher_has_nothing_to_learn_from_one_step(golden_model):
    """With K = 1 and a student equal to its teacher, the loss of denoised rows is zero."""
    keys, n, length = jax.random.split(jax.random.key(0), 4), 8, 6
    width, vocab = golden_model.unembed.weight.shape
    x = jax.random.normal(keys[0], (n, length, width))
    s = jax.random.randint(keys[1], (n, length), 0, vocab)
    nowhere, replicated = jnp.zeros((n, length), bool), jnp.ones((n, length), bool)
    decode, self_cond = jnp.arange(n) < 2, jnp.arange(n) >= 5
    t, p, w = jnp.linspace(0.1, 0.5, n), jnp.full((n, length), 0.7), jnp.linspace(0.5, 5.0, n)
    draws = losses.Draws(t, p, w, jax.random.normal(keys[2], x.shape), decode, self_cond)
    ts = jnp.stack([t, t + 0.25])
    found = token_losses(
        golden_model,
        golden_model,
        losses.Batch(s, x, nowhere, replicated),
        draws,
        ts,
        losses.Slots(8, 2, 4),
        1,
    )
    assert_allclose(found[2:], 0, atol=1e-8)
    assert jnp.all(found[:2] > 0.1)


def test_a_teacher_is_not_followed_where_all_rows_decode(golden_model):
    """And nothing else changes by that: here with a prefix, and more than one step of the teacher."""
    keys, n, length = jax.random.split(jax.random.key(1), 4), 8, 6
    width, vocab = golden_model.unembed.weight.shape
    x, eps = jax.random.normal(keys[0], (n, length, width)), jax.random.normal(keys[1], (n, length, width))
    s, prefix = (
        jax.random.randint(keys[2], (n, length), 0, vocab),
        jnp.broadcast_to(jnp.arange(length) < 2, (n, length)),
    )
    t, w = jnp.linspace(0.1, 0.5, n), jnp.linspace(0.5, 5.0, n)
    draws = losses.Draws(t, jnp.full((n, length), 0.7), w, eps, jnp.arange(n) < 4, jnp.arange(n) >= 6)
    student = jax.tree.map(lambda leaf: 1.1 * leaf, golden_model)
    batch, ts = losses.Batch(s, x, prefix, ~prefix), jnp.stack([t, t + 0.1, t + 0.25])
    slots = losses.Slots(8, 4, 2)
    all_rows, others = (
        token_losses(student, golden_model, batch, draws, ts, slots, decoding) for decoding in (0, 4)
    )
    assert_allclose(all_rows, others, rtol=1e-5)
    assert jnp.all(others[:, 2:] > 0)


def test_rows_that_always_decode_are_only_left_out_where_the_others_divide():
    config = dataclasses.replace(PRESETS["stories"], batch=16)
    for mesh, accumulate, left_out in (("1", 1, 1), ("2", 1, 1), ("4", 1, 0), ("2x2", 1, 0), ("2", 2, 0)):
        assert (
            distill.always_decoding(dataclasses.replace(config, mesh=mesh, accumulate=accumulate)) == left_out
        )


def test_a_released_teacher_of_a_task_with_sources(golden_model, tmp_path, monkeypatch):
    """From the file that the authors' code writes to a student that answers."""
    depth, width = golden_model.blocks.mlp.down.weight.shape[0], golden_model.mode.shape[1]
    monkeypatch.setitem(elf.SIZES, "golden", dict(depth=depth, width=width, heads=4))
    embedding, vocab = golden_model.unembed.weight.shape
    words = [f"w{i}" for i in range(vocab - rows.SENTINELS - 3)]
    tokenizer = rows.word_tokenizer(words)
    assert len(tokenizer) == vocab
    shape = scratch.SMALL | dict(vocab_size=vocab, d_model=embedding, d_ff=16, d_kv=4, num_layers=1)
    t5.save_t5(t5.t5_from_config(shape, jax.random.key(0)), tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    for split, n in (("train", 40), ("validation", 4)):
        pairs = [
            dict(source=" ".join(words[i : i + 3]), target=" ".join(words[i + 1 : i + 3])) for i in range(n)
        ]
        (tmp_path / "pairs").mkdir(exist_ok=True)
        (tmp_path / "pairs" / f"{split}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    monkeypatch.chdir(tmp_path)
    args = distill.Distill(
        teacher=str(GOLDEN / "checkpoint_7"),
        data="de-en",
        data_dir="pairs",
        encoder="encoder",
        rounds=(2,),
        teacher_steps=4,
        steps=3,
        batch=8,
        num_samples=2,
    )
    (directory,) = distill.distill(args)
    assert checkpoints.read_metrics(directory)[-1]["step"] == 3
    assert json.loads((directory / "samples" / "final.jsonl").open().readline())["source"] == "w0 w1 w2"


@pytest.fixture(scope="module")
def distilled(finished, tmp_path_factory):
    """Two rounds of some steps from a finished run."""
    config, _ = finished
    args = distill.Distill(
        teacher=str(config.directory),
        rounds=(4, 1),
        teacher_steps=8,
        steps=24,
        save_every=12,
        learning_rate=0.005,
        runs=tmp_path_factory.mktemp("rounds"),
        num_samples=0,
    )
    return args, distill.distill(args)


def test_every_round_is_a_run_that_starts_where_the_one_before_ended(distilled, monkeypatch):
    args, directories = distilled
    assert [d.name for d in directories] == ["4", "1"]
    for directory, n in zip(directories, (4, 1), strict=True):
        config = json.loads((directory / "config.json").read_text())
        assert (config["student_steps"], config["teacher_steps"], config["teacher"]) == (n, 8, args.teacher)
        assert checkpoints.read_metrics(directory)[-1]["step"] == 24
    monkeypatch.setattr(
        tables, "over_seeds", lambda bench, *_: dict.fromkeys(bench.judge.shown.values(), 0.5)
    )
    distill.show_tables(dataclasses.replace(args, num_samples=4), directories)
    assert (directories[0].parent / "rounds.md").exists() and (
        directories[0].parent / "few-step.csv"
    ).exists()


def test_an_interrupted_round_is_continued(distilled, tmp_path):
    args, directories = distilled
    copy = shutil.copytree(directories[0].parents[1], tmp_path / "runs")
    inner = copy / directories[0].parent.name
    shutil.rmtree(inner / "1" / "checkpoints" / "24")
    again = distill.distill(dataclasses.replace(args, runs=copy))
    ours, theirs = (load(str(d[-1])).model for d in (again, directories))
    jax.tree.map(assert_array_equal, ours, theirs)


def test_later_rounds_begin_where_earlier_ones_ended(distilled):
    """A round of 2 steps started by itself begins at the finished round of 4, not at the teacher."""
    args, directories = distilled
    (directory,) = distill.distill(dataclasses.replace(args, rounds=(2,), steps=2, num_samples=0))
    config, before = (checkpoints.read_config(d) for d in (directory, directories[0]))
    assert (config.start_steps, before.start_steps) == (4, None) and config.weights != before.weights
    run = load(str(directory))
    assert [(c.student_steps, steps) for c, steps in checkpoints.history(run)] == [
        (None, 20),
        (4, 24),
        (2, 2),
    ]


def test_a_round_from_another_start_is_refused(distilled, tmp_path):
    """A round of the curriculum and the same one begun at the teacher are not the same run."""
    args, directories = distilled
    copy = shutil.copytree(directories[0].parents[1], tmp_path / "runs")
    with pytest.raises(UserError, match=r"start_steps \(4 there, (None|2) now\)"):
        distill.distill(dataclasses.replace(args, rounds=(1,), runs=copy))


def test_a_student_of_another_teacher_is_not_begun_from(distilled, finished, tmp_path):
    args, directories = distilled
    copy = shutil.copytree(directories[0].parents[1], tmp_path / "runs")
    other = dataclasses.replace(finished[0], runs=tmp_path, name="other", seed=7, steps=3, num_samples=0)
    train.train(other)
    elsewhere = dataclasses.replace(
        args, teacher=str(other.directory), name=directories[0].parent.name, rounds=(2,), runs=copy
    )
    with pytest.raises(UserError, match="was distilled from another teacher"):
        distill.distill(elsewhere)
    shutil.rmtree(copy / directories[0].parent.name / "4" / "checkpoints")  # begun, and nothing saved yet
    assert distill.first_student(elsewhere, load(str(other.directory)), make_mesh("1", 0))[1] is None


def test_a_teacher_that_is_gone_is_not_taken_for_a_released_one(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    student = types.SimpleNamespace(name="student", step=3, directory=tmp_path / "runs" / "x" / "1")
    for teacher in ("runs/gone", "/nowhere/at/all"):
        student.config = dataclasses.replace(finished[0], teacher=teacher)
        with pytest.raises(UserError, match="its teacher is no longer there"):
            checkpoints.history(student)
    student.config = dataclasses.replace(
        finished[0], model="elf-b", data="owt", teacher="embedded-language-flows/ELF-B-owt"
    )
    assert checkpoints.history(student)[0][1] == 5 * 19_017


def test_a_round_learns_what_it_is_asked_to(distilled):
    """The loss against the teacher's targets falls."""
    _, directories = distilled
    mse = [line["mse"] for line in checkpoints.read_metrics(directories[-1])]
    assert np.mean(mse[-8:]) < np.mean(mse[:8])


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--rounds", "5"], "--rounds 5: must divide the teacher's 64 steps"),
        (["--rounds", "4", "8"], "each must have fewer steps"),
        (["--teacher-steps", "0"], "must divide the teacher's 0 steps"),
        (["--teacher", "nowhere"], "nowhere: no run there"),
    ],
)
def test_bad_input_gets_one_line(words, complaint, finished, tmp_path, monkeypatch):
    words = ["--teacher", str(finished[0].directory), "--runs", str(tmp_path), *words]
    monkeypatch.setattr(sys, "argv", ["distill.py", *words])
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    with pytest.raises(SystemExit) as exit:
        distill.main()
    assert complaint in str(exit.value.code)


def test_another_teacher_is_refused_in_the_same_place(distilled, tmp_path):
    args, _ = distilled
    other = shutil.copytree(args.teacher, tmp_path / "other")
    with pytest.raises(UserError, match=r"teacher \(.*whole there, .*other now\)"):
        distill.distill(dataclasses.replace(args, teacher=str(other), name="whole-distilled"))
