import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT  # noqa: F401
from numpy.testing import assert_allclose

from elf import ELF, SIZES


def test_denoise_and_decode_match_the_released_network(golden, golden_model):
    g = golden("forward")
    x_hat = golden_model.denoise(*(jnp.asarray(g[k]) for k in ("z", "x_hat_prev", "t", "w")))
    logits = golden_model.decode(jnp.asarray(g["z"]), jnp.asarray(g["w"]))
    assert_allclose(x_hat, g["denoise_x_hat"], atol=1e-4)
    assert_allclose(logits, g["decode_logits"], atol=1e-4)


@pytest.mark.parametrize(
    "size, expected", [("elf-b", 104_579_940), ("elf-m", 342_540_036), ("elf-l", 652_103_332)]
)
def test_sizes_have_the_released_parameter_counts(size, expected):
    def build():
        return ELF(**SIZES[size], vocab=32_100, embedding=512, bottleneck=128, key=jax.random.key(0))

    assert sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(build))) == expected
