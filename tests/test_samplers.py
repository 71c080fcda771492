"""The samplers against released end states, and what must hold for any network."""

import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import samplers


def run_steps(denoise, g, gamma, *, released=False, z0=None):
    """The scan of `samplers.flow` written as a loop, with the golden noise in place of drawn noise."""
    z = jnp.asarray(g["z0"]) if z0 is None else z0
    x_prev, ts = jnp.zeros_like(z), jnp.asarray(g["ts"])
    step = jax.jit(lambda *args: samplers.step(denoise, *args, released=released))
    for i in range(len(ts) - 1):
        last = i == len(ts) - 2
        eps = float(g["noise_scale"]) * g["sde_eps_unit"][i]
        z, x_prev = step(z, x_prev, ts[i], ts[i + 1], 0.0 if last else gamma, eps)
    return z


@pytest.mark.parametrize("file", ["samplers", "samplers_few"])
@pytest.mark.parametrize("kind", ["ode", "sde_paper", "sde_released"])
def test_end_states_and_tokens_match_the_released_ones(golden, golden_model, file, kind):
    g = golden(file)
    if f"{kind}_z" not in g.files:
        return
    w = float(g["w"])
    gamma = 0.0 if kind == "ode" else float(g["gamma"])
    z = run_steps(samplers.denoiser(golden_model, w), g, gamma, released=kind == "sde_released")
    assert_allclose(z, g[f"{kind}_z"], atol=1e-3)
    assert_array_equal(samplers.decode(golden_model, z, w), g[f"{kind}_tokens"])


@pytest.mark.parametrize("form, released", [("", True), ("_paper", False)])
def test_guidance_by_a_prefix_matches_the_released_one(golden, golden_model, form, released):
    g = golden("samplers")
    x, prefix = jnp.asarray(g["cond_x"]), jnp.asarray(g["cond_mask"] > 0)
    denoise = samplers.prefix_denoiser(golden_model, 1.0, x, prefix, 2.0, released=released)
    z = run_steps(denoise, g, 0.0, z0=jnp.where(prefix[..., None], x, g["z0"]))
    assert_allclose(z, g[f"cond_ode_cfg2_w1{form}_z"], atol=1e-3)
    assert_array_equal(samplers.decode(golden_model, z, 1.0), g[f"cond_ode_cfg2_w1{form}_tokens"])


def test_the_jitted_scan_is_the_loop_and_sweeps_do_not_recompile(golden, golden_model):
    g = golden("samplers")
    z0 = jnp.asarray(g["z0"])
    keys = jax.random.split(jax.random.key(0), len(z0))
    samplers.sample.clear_cache()
    tokens = samplers.sample(golden_model, z0, jnp.asarray(g["ts"]), keys, w=float(g["w"]), gamma=0.0)
    assert_array_equal(tokens, g["ode_tokens"])
    for w, gamma, seed in [(0.5, 1.0, 1), (5.0, 2.0, 2)]:
        ts = samplers.logit_normal_grid(jax.random.key(seed), len(g["ts"]) - 1)
        samplers.sample(golden_model, z0, ts, keys, w=w, gamma=gamma)
    assert samplers.sample._cache_size() == 1


@pytest.mark.parametrize("steps", [1, 2, 7, 64])
@pytest.mark.parametrize("gamma", [0.0, 1.5])
@pytest.mark.parametrize("released", [False, True])
def test_exact_denoiser_reaches_the_data_on_every_grid(steps, gamma, released):
    """If x_hat is exact, ODE and SDE end at x whatever the steps and γ."""
    x, z0 = jax.random.normal(jax.random.key(0), (2, 3, 5, 4))
    for ts in (samplers.uniform_grid(steps), samplers.logit_normal_grid(jax.random.key(1), steps)):
        z, path = samplers.flow(
            lambda *_: x, 2 * z0, ts, gamma, jax.random.split(jax.random.key(2), len(x)), released=released
        )
        assert_allclose(z, x, atol=1e-5)
        assert path.shape == (steps, *x.shape)


def test_grids_rise_from_0_to_1():
    for ts in (
        samplers.uniform_grid(9),
        samplers.logit_normal_grid(jax.random.key(0), 9),
        samplers.uniform_grid(1),
    ):
        assert ts[0] == 0 and ts[-1] == 1 and jnp.all(jnp.diff(ts) > 0)


def test_self_conditioning_is_the_previous_prediction_and_zero_at_first():
    seen = []

    def spy(z, x_prev, t):
        jax.debug.callback(lambda p: seen.append(float(p[0, 0, 0])), x_prev, ordered=True)
        return x_prev + 1

    samplers.flow(
        spy, jnp.zeros((1, 1, 1)), samplers.uniform_grid(4), 0.0, jax.random.split(jax.random.key(0), 1)
    )
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3]


def test_a_prefix_stays_clean_even_when_noise_is_injected(golden_model):
    x, z0 = jax.random.normal(jax.random.key(0), (2, 2, 16, 24))
    prefix = jnp.arange(16) < jnp.array([[3], [5]])
    denoise = samplers.prefix_denoiser(golden_model, 1.0, x, prefix, 2.0)
    keys = jax.random.split(jax.random.key(1), 2)
    z, _ = samplers.flow(denoise, jnp.where(prefix[..., None], x, z0), samplers.uniform_grid(3), 2.0, keys)
    assert_allclose(z[prefix], x[prefix], atol=1e-5)


def test_a_sample_does_not_depend_on_those_beside_it(golden_model):
    z0, keys = jax.random.normal(jax.random.key(0), (4, 16, 24)), jax.random.split(jax.random.key(1), 4)
    denoise = samplers.denoiser(golden_model, 1.0)
    all_four, _ = samplers.flow(denoise, z0, samplers.uniform_grid(3), 1.0, keys)
    alone, _ = samplers.flow(denoise, z0[2:3], samplers.uniform_grid(3), 1.0, keys[2:3])
    assert_allclose(all_four[2:3], alone, atol=1e-4)
