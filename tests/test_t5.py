"""T5 encoders: as Hugging Face has them, and whole or refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file, save_file

from encoders import gpt2, t5
from runtime.errors import UserError


@pytest.fixture(scope="module")
def encoder():
    return t5.load_t5(GOLDEN / "t5")


@pytest.mark.parametrize("mask, hidden", [("mask", "hidden"), ("mask3d", "hidden3d")])
def test_t5_matches_hugging_face_for_padding_and_prefix_masks(encoder, mask, hidden):
    g = np.load(GOLDEN / "t5" / "expected.npz")
    s = jnp.asarray(g["input_ids"])
    sees = g[mask] > 0
    sees = jnp.broadcast_to(sees if sees.ndim == 3 else sees[:, None, :], (*s.shape, s.shape[1]))
    assert_allclose(encoder(s, sees), g[hidden], atol=1e-4)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), encoder)(s, sees)
    assert half.dtype == jnp.bfloat16 and jnp.linalg.norm(half - g[hidden]) < 0.04 * np.linalg.norm(g[hidden])


@pytest.mark.parametrize("gated", [True, False])
def test_a_saved_encoder_loads_as_it_was(tmp_path, gated):
    config = json.loads((GOLDEN / "t5" / "config.json").read_text())
    config["feed_forward_proj"] = "gated-gelu" if gated else "relu"
    encoder = t5.t5_from_config(config, jax.random.key(0))
    t5.save_t5(encoder, tmp_path)
    jax.tree.map(assert_array_equal, t5.load_t5(tmp_path), encoder)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    shutil.copytree(GOLDEN / "t5", tmp_path / "t5")
    file, good = tmp_path / "t5" / "model.safetensors", load_file(GOLDEN / "t5" / "model.safetensors")
    last = "encoder.final_layer_norm.weight"
    for tensors, complaint in [
        ({k: v for k, v in good.items() if k != last}, last),
        (good | {"encoder.block.9.weight": np.zeros(2, np.float32)}, "encoder.block.9.weight"),
        (good | {last: np.ones(7, np.float32)}, r"norm.weight has shape \(7,\) where"),
    ]:
        save_file(tensors, file)
        with pytest.raises(UserError, match=complaint):
            t5.load_t5(tmp_path / "t5")


def test_weights_may_be_bfloat16_but_have_to_be_whole(encoder, tmp_path):
    shutil.copytree(GOLDEN / "t5", tmp_path / "t5")
    file, good = tmp_path / "t5" / "model.safetensors", load_file(GOLDEN / "t5" / "model.safetensors")
    save_file({k: v.astype(jnp.bfloat16) for k, v in good.items()}, file)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=0.01), t5.load_t5(tmp_path / "t5"), encoder)
    for content in (file.read_bytes()[:5_000], b"version https://git-lfs.github.com/spec/v1\n"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"model.safetensors: not whole, or not of that format"):
            t5.load_t5(tmp_path / "t5")


def test_what_is_not_a_t5_is_refused(tmp_path):
    for config in (dict(model_type="gpt2"), dict(model_type="t5", feed_forward_proj="gated-silu")):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match="not a T5"):
            t5.load_t5(tmp_path)
    with pytest.raises(UserError, match="not a GPT-2"):
        gpt2.load_gpt2(GOLDEN / "t5")


def test_damaged_configurations_are_refused(tmp_path):
    for file, text, complaint in [
        ("t5", "{", r"config.json: not JSON"),
        ("t5", '{"model_type": "t5", "vocab_size": 9}', r"config.json: it does not describe .*d_model"),
        ("gpt2", '{"model_type": "gpt2"}', r"config.json: it does not describe .*vocab_size"),
    ]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=complaint):
            {"t5": t5.load_t5, "gpt2": gpt2.load_gpt2}[file](tmp_path)


def test_gated_layers_are_those_of_t5_v1_1():
    """gelu(wi_0 h) wi_1 h, with the tanh form of GELU, then wo."""
    layer = t5.T5FeedForward(4, 6, gated=True, key=jax.random.key(0))
    h = np.linspace(-2, 2, 8).reshape(1, 2, 4)
    gate, up, down = (np.asarray(part.weight, np.float64) for part in (layer.gate, layer.up, layer.down))
    g = h @ gate
    gelu = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    assert_allclose(layer(jnp.asarray(h, jnp.float32)), (gelu * (h @ up)) @ down, atol=1e-5)
    assert t5.T5_NAMES["blocks.mlp.gate.weight"].endswith("wi_0.weight")
