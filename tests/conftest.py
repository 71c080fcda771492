"""Shape annotations are enforced in every test: jaxtyping checks each call of the modules named here."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from jaxtyping import install_import_hook  # noqa: E402

MODULES = ["elf", "losses", "samplers", "pretrained", "scratch", "data"]
with install_import_hook(MODULES, "beartype.beartype"):
    import data  # noqa: F401
    import elf
    import pretrained
    import samplers  # noqa: F401

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"


def released(prefix, arrays):
    """The entries under `prefix` with the prefix cut off."""
    return {k.removeprefix(prefix): arrays[k] for k in arrays.files if k.startswith(prefix)}


@pytest.fixture(scope="session")
def golden():
    """Numbers obtained with the released implementation, by file name."""
    return lambda name: np.load(GOLDEN / f"{name}.npz")


@pytest.fixture(scope="session")
def golden_model(golden):
    """The tiny model whose weights all golden numbers belong to."""
    arrays = golden("elf_params")
    c = json.loads(str(arrays["config"]))
    like = elf.ELF(
        c["depth"], c["hidden"], c["heads"], vocab=c["vocab"], embedding=c["enc"], bottleneck=c["bott"], key=jax.random.key(0)
    )
    return pretrained.from_released(like, released("params/", arrays))
