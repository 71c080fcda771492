"""GPT-2 gives the numbers of Hugging Face's."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import GOLDEN
from numpy.testing import assert_allclose

from encoders import gpt2


def test_gpt2_matches_hugging_face():
    g = np.load(GOLDEN / "gpt2" / "expected.npz")
    judge, s = gpt2.load_gpt2(GOLDEN / "gpt2"), jnp.asarray(g["input_ids"])
    assert_allclose(judge(s), g["logits"], atol=1e-3)
    log_p = jax.nn.log_softmax(jnp.asarray(g["logits"]))[:, :-1]
    assert_allclose(judge.nll(s), -jnp.take_along_axis(log_p, s[:, 1:, None], axis=-1)[..., 0], atol=1e-3)
