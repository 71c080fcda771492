import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file, save_file

import pretrained
from errors import Refused


@pytest.fixture(scope="module")
def encoder():
    return pretrained.load_t5(GOLDEN / "t5")


@pytest.mark.parametrize("mask, hidden", [("mask", "hidden"), ("mask3d", "hidden3d")])
def test_t5_matches_hugging_face_for_padding_and_prefix_masks(encoder, mask, hidden):
    g = np.load(GOLDEN / "t5" / "expected.npz")
    s = jnp.asarray(g["input_ids"])
    sees = g[mask] > 0
    sees = jnp.broadcast_to(sees if sees.ndim == 3 else sees[:, None, :], (*s.shape, s.shape[1]))
    assert_allclose(encoder(s, sees), g[hidden], atol=1e-4)


@pytest.mark.parametrize("gated", [True, False])
def test_a_saved_encoder_loads_as_it_was(tmp_path, gated):
    config = json.loads((GOLDEN / "t5" / "config.json").read_text())
    config["feed_forward_proj"] = "gated-gelu" if gated else "relu"
    encoder = pretrained.t5_from_config(config, jax.random.key(0))
    pretrained.save_t5(encoder, config, tmp_path)
    jax.tree.map(assert_array_equal, pretrained.load_t5(tmp_path), encoder)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    shutil.copytree(GOLDEN / "t5", tmp_path / "t5")
    file, good = tmp_path / "t5" / "model.safetensors", load_file(GOLDEN / "t5" / "model.safetensors")
    last = "encoder.final_layer_norm.weight"
    for tensors, complaint in [
        ({k: v for k, v in good.items() if k != last}, last),
        (good | {"encoder.block.9.weight": np.zeros(2, np.float32)}, "encoder.block.9.weight"),
        (good | {last: np.ones(7, np.float32)}, r"norm.weight has shape \(7,\)"),
    ]:
        save_file(tensors, file)
        with pytest.raises(Refused, match=complaint):
            pretrained.load_t5(tmp_path / "t5")
