"""The paper's ablations: each variant is what it says, and goes all the way from training to scores."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import data
import elf
import eval
import losses
import train
from config import check, parse
from corpora.rows import Rows
from elf import ELF, SIZES
from encoders import t5
from encoders.table import Table, unit
from methods import ablations
from methods.elf import elf_method
from report.samples import sample_texts
from runtime import checkpoints
from runtime.checkpoints import Trained
from runtime.mesh import make_mesh, place_rows, replicate

TINY = dict(depth=2, width=16, heads=2, vocab=11, embedding=8, bottleneck=4)


def state(n=4, length=5, width=8):
    z, x = jax.random.normal(jax.random.key(0), (2, n, length, width))
    t, w = jnp.linspace(0.1, 0.9, n), jnp.linspace(0.5, 3.0, n)
    return z, x, t, w


def test_adaln_zero_has_the_papers_size_and_begins_unconditioned():
    """ELF-B grows from 105M to 148M; modulation starts at zero, so time and mode change nothing at first."""

    def count(kind):
        like = jax.eval_shape(
            lambda: kind(**SIZES["elf-b"], vocab=32_100, embedding=512, bottleneck=128, key=jax.random.key(0))
        )
        return sum(leaf.size for leaf in jax.tree.leaves(like))

    assert count(ELF) == 104_579_940 and round(count(ablations.AdaLNZero) / 1e6) == 148
    model = jax.jit(lambda key: ablations.AdaLNZero(**TINY, key=key))(jax.random.key(0))
    (z, x, t, w), trunk = state(), jax.jit(ablations.AdaLNZero.trunk)
    one, other = (trunk(model, z, x, t, w, mode) for mode in (jnp.zeros(4), jnp.ones(4)))
    assert_array_equal(one, other)
    grads = jax.jit(jax.grad(lambda m: jnp.sum(m.trunk(z, x, t, w, jnp.ones(4)) ** 3)))(model)
    assert (
        jnp.linalg.norm(grads.modulation.weight) > 0 and jnp.linalg.norm(grads.blocks.modulation.weight) > 0
    )


@pytest.mark.parametrize("prediction", elf.PREDICTIONS)
def test_a_perfect_prediction_of_any_kind_is_the_data(prediction):
    x, e, t, _ = state()
    at = t[:, None, None]
    z = at * x + (1 - at) * e
    perfect = {"x": x, "v": x - e, "eps": e}[prediction]
    assert_allclose(elf.PREDICTIONS[prediction](perfect, z, at), x, atol=1e-4)


def test_without_a_bottleneck_one_matrix_leads_into_the_network():
    model = ELF(**TINY | dict(bottleneck=0), key=jax.random.key(0))
    assert model.expand.weight.shape == (8, 16) and not jax.tree.leaves(model.squeeze)


def test_uniform_times_are_uniform():
    t = losses.uniform_time(jax.random.normal(jax.random.key(0), (20_000,)), -1.5, 0.8)
    assert_allclose(jnp.quantile(t, jnp.array([0.1, 0.5, 0.9])), [0.1, 0.5, 0.9], atol=0.01)


@pytest.fixture(scope="module")
def learned():
    """A network that learns its embeddings, and rows of tokens."""
    model = ablations.with_unit_table(ELF(**TINY, key=jax.random.key(0)))
    rows = Rows(jax.random.randint(jax.random.key(1), (4, 5), 0, 11), jnp.full(4, 5), jnp.zeros(4, jnp.int32))
    return model, rows


def gradient_of_learned(model, rows, decode, table=None):
    """Compute the gradient with all rows in one branch, by the network's own table or by a frozen one."""
    n = len(rows.s)
    embedder = data.Embedder(Table(jnp.zeros((11, 8)) if table is None else table), jnp.zeros(8), jnp.ones(8))
    batch = embedder(rows, jnp.zeros(n, bool))
    eps = jax.random.normal(jax.random.key(2), (4, 5, 8))
    roles = jnp.full(n, decode), jnp.full(n, not decode)
    draws = losses.Draws(jnp.full(n, 0.3), jnp.full((n, 5), 0.6), jnp.full(n, 2.0), eps, *roles)

    def loss(model):
        embedded = ablations.embed_learned(model, batch, draws.decode) if table is None else batch
        slots = losses.Slots(n, n * decode, n * (not decode))
        return jnp.sum(
            losses.token_losses(model, embedded, draws, slots, noise_scale=2.0, decode_noise_scale=5.0)
        )

    return jax.jit(jax.grad(loss))(model).unembed.weight


def test_a_learned_table_learns_as_embedding_from_the_denoiser_and_as_unembedding_from_the_decoder(learned):
    model, rows = learned
    model = jax.tree.map(lambda leaf: leaf + 0.01, model)  # as if trained a little: a new head predicts zeros
    frozen = model.unembed.weight.T
    as_table, nothing = (gradient_of_learned(model, rows, False, table) for table in (None, frozen))
    assert jnp.linalg.norm(as_table) > 0 and jnp.linalg.norm(nothing) == 0
    assert_allclose(*(gradient_of_learned(model, rows, True, table) for table in (None, frozen)), rtol=1e-5)


def test_a_learned_table_stays_of_unit_size(learned):
    model, _ = learned
    update = ablations.keep_unit_table().update
    updates, _ = update(
        jax.tree.map(lambda leaf: 0.1 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), model),
        None,
        model,
    )
    table = (model.unembed.weight + updates.unembed.weight).T
    assert_allclose(table.mean(1), 0, atol=1e-6)
    assert_allclose(table.std(1), 1, rtol=1e-3)
    assert_allclose(updates.mode, 0.1 * jnp.cos(jnp.arange(model.mode.size)).reshape(model.mode.shape))


def test_a_separate_decoder_learns_from_a_fifth_of_tokens_hidden_and_the_rest_noisy():
    """Without noise, its inputs are zeros, or embeddings times a level whose logit is normal around 0.5."""
    x = jax.random.normal(jax.random.key(0), (2, 400, 8))
    batch = losses.Batch(
        jnp.zeros((2, 400), jnp.int32), x, jnp.zeros((2, 400), bool), jnp.ones((2, 400), bool)
    )
    seen = []

    def decoder(z):
        seen.append(z)
        return jnp.zeros((*z.shape[:2], 11))

    ablations.reconstruction_loss(decoder, batch, jnp.arange(2), jax.random.key(1), noise_scale=0.0)
    hidden = jnp.all(seen[0] == 0, axis=-1)
    assert_allclose(hidden.mean(), 0.2, atol=0.05)
    p = jnp.where(hidden, jnp.nan, (seen[0] / x)[..., 0])
    assert_allclose(jnp.nanmedian(p), jax.nn.sigmoid(0.5), atol=0.05)


VARIANTS = {  # all choices, in few runs
    "adaln-zero": dict(
        conditioning="adaln-zero", prediction="v", bottleneck=0, embeddings="gaussian", optimizer="adamw"
    ),
    "learned": dict(embeddings="learned", times="uniform", grid="uniform", p_decode=0.5),
    "table": dict(embeddings="table"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_learns_and_samples(name, small, stories, tmp_path):
    """The steps of a run lower the loss of a batch, and its network gives texts."""
    config = dataclasses.replace(small, **VARIANTS[name], runs=tmp_path, name=name, learning_rate=0.003)
    check(config)
    mesh = make_mesh("1", config.batch)
    embedder = replicate(data.load_embedder(config, stories), mesh)
    trainer = train.build(config, elf_method(config, len(stories.tokenizer), len(embedder.mean), mesh), mesh)
    state, key, losses_seen = trainer.init(), replicate(jax.random.key(0), mesh), []
    rows = place_rows(stories.rows, np.arange(config.batch), mesh)
    with jax.set_mesh(mesh):
        for _ in range(12):
            again = state._replace(step=jnp.zeros_like(state.step))  # the same draws in every step
            state, metrics = trainer.step(again, embedder, rows, key)
            losses_seen.append(float(metrics["loss"]))
    assert np.mean(losses_seen[-3:]) < np.mean(losses_seen[:3])
    trained = Trained(name, tmp_path, config, state.ema, stories.tokenizer, 12, "", released=False, mesh=mesh)
    assert len(sample_texts(trained, 2)) == 2


def test_a_separate_decoder_is_trained_first_resumed_and_sampled_from(small, tmp_path, capsys):
    changes = dict(
        decoder="separate", p_decode=0.0, decoder_steps=12, prediction="eps", conditioning="adaln-zero"
    )
    config = dataclasses.replace(small, **changes, optimizer="adamw", runs=tmp_path, steps=12, save_every=5)
    state = train.train(config)
    for directory in (config.directory, config.directory / "decoder"):
        held_out = [
            m["validation_loss"] for m in checkpoints.read_metrics(directory) if "validation_loss" in m
        ]
        assert len(held_out) == 3 and held_out[-1] < held_out[0]
    place = config.directory / "decoder"
    whole = t5.load_t5(place / "t5")
    shutil.rmtree(place / "t5")
    for directory in (place, config.directory):
        shutil.rmtree(directory / "checkpoints" / "12")
    capsys.readouterr()
    jax.tree.map(assert_array_equal, train.train(config).model, state.model)
    jax.tree.map(assert_array_equal, t5.load_t5(place / "t5"), whole)
    assert capsys.readouterr().out.count("from step 10") == 2
    eval.Samples(run=str(config.directory), num_samples=16, sampling=eval.SamplerOptions(steps=2))()
    assert "valid texts" in capsys.readouterr().out


def test_tables_are_the_encoders_own_or_random_and_are_kept_with_the_run(small, stories, tmp_path):
    configs = [
        dataclasses.replace(small, embeddings=kind, runs=tmp_path, name=kind)
        for kind in ("table", "gaussian")
    ]
    own, random = (data.load_encoder(config, stories, config.directory) for config in configs)
    encoder = data.load_encoder(small, stories, small.directory)
    assert_array_equal(own.embed, unit(encoder.embed))
    assert (
        own.embed.shape == random.embed.shape
        and jnp.abs(jnp.corrcoef(own.embed.ravel(), random.embed.ravel())[0, 1]) < 0.1
    )
    for config, table in zip(configs, (own, random), strict=True):
        data.save_embedder(
            config, stories, data.make_embedder(table, stories.rows, by_channel=False, tokens=2048)
        )
        other = dataclasses.replace(config, seed=7)  # as in a round of distillation
        assert_array_equal(data.load_encoder(other, stories, config.directory).embed, table.embed)


def test_choices_bring_their_settings():
    adamw, separate = (
        parse(flags.split(), "") for flags in ("--model elf-b --optimizer adamw", "--decoder separate")
    )
    assert adamw.learning_rate == pytest.approx(1e-4) and separate.p_decode == 0
