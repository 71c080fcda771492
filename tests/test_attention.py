"""Every platform's attention computes the same."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from einops import rearrange
from jax.experimental import pallas as pl
from numpy.testing import assert_allclose

from runtime import attention


@pytest.mark.parametrize(
    "way", [partial(attention.splashed, interpret=True), attention.on_gpu], ids=["tpu", "gpu"]
)
@pytest.mark.parametrize("lead", [(), (2,)])
def test_values_and_gradients_equal_those_of_plain_attention(way, lead):
    """The TPU kernel runs in interpret mode; 140 positions are padded to 256."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, cotangent = (jax.random.normal(key, (*lead, 2, 140, 64)) for key in keys)
    cotangent = rearrange(cotangent, "... heads T d -> ... T (heads d)")

    def value_and_gradients(attend):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(cotangent)

    found = jax.jit(lambda: value_and_gradients(way))()
    expected = jax.jit(lambda: value_and_gradients(attention.plain))()
    for ours, theirs in zip(found, expected, strict=True):
        assert_allclose(ours, theirs, atol=2e-5)


def test_attention_is_chosen_for_the_platform_of_the_program():
    q = jax.ShapeDtypeStruct((2, 140, 64), jnp.float32)
    text = jax.jit(attention.attend).trace(q, q, q).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text
    assert "custom_call" not in jax.jit(attention.attend).lower(q, q, q).as_text()


def test_t5_attention_is_the_same_in_the_kernel_for_tpus(monkeypatch):
    """JAX's flash kernel with a bias that also masks, in interpret mode."""
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (2, 2, 256, 64)) for key in keys[:3])
    bias = jnp.where(jnp.arange(256) < 200, jax.random.normal(keys[3], (2, 2, 256, 256)), -1e9)
    assert_allclose(attention.flashed(q, k, v, bias), attention.biased(q, k, v, bias), atol=2e-5)
