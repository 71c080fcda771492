"""Shape annotations are enforced in every test: jaxtyping checks each call of the modules named here."""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "ELF_TESTS" not in os.environ:  # place of compiled programs and prepared data, for all processes
    SHARED = tempfile.TemporaryDirectory()
    os.environ["ELF_TESTS"] = SHARED.name
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{os.environ['ELF_TESTS']}/compiled")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
# Compilation is most of a test's time; on a busy machine, simulated devices wait long for each other.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_collective_call_terminate_timeout_seconds=300"
os.environ.setdefault("XLA_FLAGS", f"{QUICK} --xla_force_host_platform_device_count=8")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from jaxtyping import install_import_hook  # noqa: E402

HOOKED = ["corpora.rows", "data", "elf", "encoders", "losses", "methods", "runtime.attention", "samplers"]
with install_import_hook(HOOKED, "beartype.beartype"):
    import data  # noqa: F401
    import elf
    import samplers  # noqa: F401
    from corpora import rows
    from encoders import released, scratch, t5

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

import train  # noqa: E402
from config import PRESETS  # noqa: E402
from runtime import mesh  # noqa: E402

mesh.SMALL = 64  # shard the small networks of the tests too
rows.WRITTEN["train"] = 10_000  # enough for all words, and quick to write

GOLDEN = ROOT / "tests" / "golden"


LONG = ["meshes", "interruptions", "distill", "ablations", "eval", "train", "preflight"]


def pytest_collection_modifyitems(items):
    """Start long files first, so that the workers end at about the same time."""
    order = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


def under(prefix, arrays):
    """Entries under a prefix, without the prefix."""
    return {k.removeprefix(prefix): arrays[k] for k in arrays.files if k.startswith(prefix)}


@pytest.fixture(scope="session")
def golden():
    """Numbers of the released implementation, by file name."""
    return lambda name: np.load(GOLDEN / f"{name}.npz")


@pytest.fixture(scope="session")
def golden_model(golden):
    """The tiny model behind all golden numbers."""
    arrays = golden("elf_params")
    c = json.loads(str(arrays["config"]))
    sizes = dict(depth=c["depth"], width=c["hidden"], heads=c["heads"], vocab=c["vocab"], embedding=c["enc"])
    like = elf.ELF(**sizes, bottleneck=c["bott"], key=jax.random.key(0))
    return released.from_released(like, under("params/", arrays))


@pytest.fixture(scope="session")
def cache():
    """Directory of corpora, prepared once for all tests."""
    return Path(os.environ["ELF_TESTS"]) / "cache"


@pytest.fixture(scope="session")
def stories(cache):
    return rows.load_corpus("stories", "scratch", rows.Layout(30), cache)


@pytest.fixture(scope="session")
def encoder_directory(tmp_path_factory, stories):
    """A small untrained encoder for the words of the stories."""
    vocab = len(stories.tokenizer)
    config = scratch.SMALL | dict(vocab_size=vocab, d_model=16, d_ff=16, d_kv=4, num_layers=1)
    directory = tmp_path_factory.mktemp("encoder")
    t5.save_t5(t5.t5_from_config(config, jax.random.key(0)), directory)
    return directory


@pytest.fixture(scope="session")
def small(encoder_directory, cache):
    """Config of a run that takes seconds; its step is compiled once for any number of steps."""
    changes = dict(model="tiny", encoder=str(encoder_directory), bottleneck=8, batch=16, cache=cache)
    changes |= dict(steps=20, warmup_steps=2, learning_rate=0.01, schedule="constant", ema=0.5)
    changes |= dict(log_every=1, save_every=9, keep=3, sample_every=0, num_samples=16, sample_steps=2)
    return dataclasses.replace(PRESETS["stories"], **changes)


@pytest.fixture(scope="session")
def finished(small, tmp_path_factory):
    """An uninterrupted run and its final state."""
    config = dataclasses.replace(small, runs=tmp_path_factory.mktemp("runs"), name="whole")
    return config, train.train(config)
