"""Released checkpoints in their three formats, and files that only look like one."""

import os
import pickle
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from conftest import GOLDEN, ROOT, under
from numpy.testing import assert_allclose, assert_array_equal

from encoders.released import from_released, read_released, tensor
from runtime.errors import UserError

FORMATS = ["released_orbax/checkpoint_0", "checkpoint_7", "torch_checkpoint_7"]


@pytest.fixture(scope="module")
def expected(golden):
    return under("params/", golden("elf_params"))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_the_same_weights(name, expected):
    averaged, last = read_released(GOLDEN / name), read_released(GOLDEN / name, "params")
    assert averaged.keys() == last.keys() == expected.keys()
    for key, value in expected.items():
        assert_array_equal(last[key], value)
        assert_allclose(averaged[key], 0.9 * value, rtol=1e-6)


def test_neither_flax_nor_torch_is_needed():
    """They are not installed where these tests run, and reading imports neither."""
    script = f"""
import sys
sys.modules["torch"] = sys.modules["flax"] = None
from pathlib import Path
from encoders.released import read_released
for name in {FORMATS!r}:
    read_released(Path({str(GOLDEN)!r}) / name)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_without_averaged_weights_is_refused(name):
    with pytest.raises(UserError, match="it has no ema_params2"):
        read_released(GOLDEN / name, "ema_params2")


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_checkpoint_is_refused(name, tmp_path):
    copy = tmp_path / "copy"
    if (GOLDEN / name).is_dir():
        shutil.copytree(GOLDEN / name, copy)
        for file in (copy / "ocdbt.process_0" / "d").iterdir():
            file.write_bytes(file.read_bytes()[:100])
    else:
        copy.write_bytes((GOLDEN / name).read_bytes()[:-5000])
    with pytest.raises(UserError, match=r"copy: .*damaged"):
        read_released(copy)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x93\x01\x02\x03"])
def test_another_kind_of_file_is_refused(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match="not a released checkpoint"):
        read_released(tmp_path / "file")
    with pytest.raises(UserError, match="not an Orbax checkpoint"):
        read_released(tmp_path)


def test_what_is_not_a_tensor_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"ema_params1": {"a.weight": "words"}}, protocol=2))
    with pytest.raises(UserError, match="a/weight is not a tensor"):
        read_released(tmp_path / "file")


class Hostile:
    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


def test_a_hostile_pickle_is_refused_and_nothing_runs(tmp_path):
    witness = tmp_path / "it-ran"
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        archive.writestr(
            "archive/data.pkl", pickle.dumps({"params": {}, "ema_params1": Hostile(witness)}, protocol=2)
        )
    with pytest.raises(UserError, match=r"it needs posix\.system"):
        read_released(tmp_path / "file")
    assert not witness.exists()


def test_a_tensor_that_reaches_beyond_its_storage_is_refused():
    storage = np.arange(6, dtype=np.float32)
    assert_array_equal(tensor(storage, 1, (2, 2), (2, 1)), [[1, 2], [3, 4]])
    for offset, size, stride in [(0, (7,), (1,)), (5, (2,), (1,)), (0, (2,), (-1,)), (-1, (2,), (1,))]:
        with pytest.raises(pickle.UnpicklingError, match="beyond its storage"):
            tensor(storage, offset, size, stride)


def test_released_weights_of_other_shapes_are_named(expected, golden_model):
    """Also where a conversion could make a wrong shape fit, or could not be made of it."""
    from_released(golden_model, expected)
    tokens, norm, qkv = "mode_tokens", "blocks_1/attn/q_norm/weight", "blocks_0/attn/qkv/kernel"
    for name, value in [
        (tokens, np.concatenate([expected[tokens]] * 2)),
        (tokens, np.zeros(0, np.float32)),
        (norm, np.ones(1 + len(expected[norm]), np.float32)),
        (qkv, expected[qkv][:, :-1]),
        ("unembed_bias", np.float32(1)),
    ]:
        with pytest.raises(UserError, match=f"{name} has shape"):
            from_released(golden_model, expected | {name: np.asarray(value)})
