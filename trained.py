"""A trained network by name: the directory of a run, or a checkpoint that the authors released.

trained = load("runs/stories-desk", mesh)
trained = load("embedded-language-flows/ELF-B-owt", mesh)      # or a local copy, in any of the released formats
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import corpora
import data
import hub
import runs
import train
from elf import ELF, SIZES
from errors import Refused
from generate import Asked
from mesh import everywhere, platform, replicate, shapes_on
from pretrained import from_released
from released import Tensors, read_released
from settings import PRESETS, TrainConfig, preset

RELEASED_STD = 0.2  # by which the released code divides the embeddings of T5-small; it subtracts nothing


class Trained(NamedTuple):
    name: str
    directory: Path
    """Where what is measured of it is kept."""
    config: TrainConfig
    model: ELF
    tokenizer: Any
    step: int
    """Of training; of a released one, as many as the paper says."""
    weights: str
    """What tells them from others."""
    released: bool

    def corpus(self, split: corpora.Split = "validation") -> corpora.Corpus:
        return corpora.load_corpus(*train.text_of(self.config), split)

    def embedder(self, corpus: corpora.Corpus) -> data.Embedder:
        """The frozen encoder, with the statistics it was trained with."""
        if not self.released:
            return data.read_embedder(train.load_encoder(self.config, corpus, self.directory), self.directory)
        encoder = data.load_encoder(self.config.encoder, corpus)
        width = encoder.embed.shape[1]
        if width != len(self.model.unembed.weight):
            raise Refused(f"--encoder is {width} wide, and {self.name} was trained on one of {len(self.model.unembed.weight)}")
        return data.Embedder(encoder, jnp.zeros(width), jnp.full(width, RELEASED_STD))

    def asked(self, corpus: corpora.Corpus, mesh: Mesh) -> Asked | None:
        """The held-out sources to be answered, where there are any."""
        if not corpus.has_sources:
            return None
        embedder = data.compute_in(self.embedder(corpus), train.compute_type(self.config, mesh))
        return Asked(replicate(embedder, mesh), corpus.validation)


def load(
    name: str,
    mesh: Mesh,
    checkpoint: Literal["latest", "best"] = "latest",
    corpus: str = "",
    data_dir: str = "",
    encoder: str = "",
) -> Trained:
    """The averaged weights of a run, or of a released checkpoint; only the latter may need to be told more."""
    if (Path(name) / "config.json").exists():
        if corpus or data_dir or encoder:
            raise Refused(f"--data, --data-dir, --encoder: only for a released checkpoint; {name} is a run, which knows its own")
        return load_run(Path(name), mesh, checkpoint)
    if checkpoint == "best":
        raise Refused(f"--checkpoint best: only for a run, which validated while it trained; {name} is none")
    return load_released(name, mesh, corpus, data_dir, encoder)


def load_run(directory: Path, mesh: Mesh, checkpoint: Literal["latest", "best"] = "latest") -> Trained:
    config = runs.read_config(directory)
    checkpoints = runs.open_checkpoints(directory, keep=None)
    step = checkpoints.latest_step() if checkpoint == "latest" else checkpoints.best_step()
    if step is None:
        raise Refused(f"{directory}: it has no checkpoint yet")
    if config.model not in SIZES:
        raise Refused(f"{directory}: its config.json tells of no size of network ({config.model})")
    tokenizer = corpora.load_tokenizer(directory / "tokenizer")
    unroll = train.best_unroll(config, mesh)
    with runs.reading(checkpoints, step):
        if "ema" not in set(checkpoints.item_metadata(step)):
            raise Refused(f"{directory}: checkpoint {step} has no averaged weights (ema)")
        embedding = checkpoints.item_metadata(step)["ema"]["x_head.bias"].shape[0]
        like = jax.eval_shape(lambda: train.make_model(config, len(tokenizer), embedding, jax.random.key(0), unroll))
        model = runs.restore(checkpoints, step, {"ema": shapes_on(like, everywhere(mesh))})["ema"]
    model = train.to_sample(config, model, directory, mesh)
    return Trained(name_of(directory), directory, config, model, tokenizer, step, data.fingerprint(model), released=False)


def history(run: Trained) -> list[tuple[TrainConfig, int]]:
    """Settings and steps of all training behind a network: of a distilled one, its teacher's and that of every round."""
    stages, config = [(run.config, run.step)], run.config
    while config.teacher:
        place = run.directory.parent / str(config.start_steps) if config.start_steps else Path(config.teacher)
        released = not (place / "config.json").exists()
        if released and not place.exists() and (place.parent.is_dir() or len(place.parts) != 2):  # so no name on the hub
            raise Refused(f"{run.name}: what it was distilled from is not there any more ({place})")
        config = preset(config.model if config.model in SIZES else None, config.data) if released else runs.read_config(place)
        stages.insert(0, (config, config.steps))
    return stages


def name_of(path: Path) -> str:
    """What tells a run from others; the last part of a path, with the one before it where that alone says little."""
    says_little = path.name.isdigit() or path.name.startswith("checkpoint")
    return f"{path.absolute().parent.name}/{path.name}" if says_little else path.name


def load_released(name: str, mesh: Mesh, corpus: str, data_dir: str, encoder: str) -> Trained:
    path = find_checkpoint(name)
    config = released_config(name, corpus)
    tensors = read_released(path)
    sizes = sizes_of(tensors, path)
    known = {tuple(size.values()): size_name for size_name, size in SIZES.items()}
    size = known.get((sizes["depth"], sizes["width"], sizes["heads"]))
    config = replace(preset(size, config.data), model=size or "released", encoder=encoder or config.encoder)
    config = replace(config, bottleneck=sizes["bottleneck"], data_dir=data_dir)
    unroll = sizes["depth"] if platform(mesh) == "cpu" else 1
    like = jax.eval_shape(lambda: ELF(**sizes, unroll=unroll, key=jax.random.key(0)))
    model = jax.device_put(from_released(like, tensors, str(path)), everywhere(mesh))
    tokenizer = corpora.load_tokenizer(corpora.tokenizer_place(config.encoder))
    if len(tokenizer) != sizes["vocab"]:
        raise Refused(f"{path} knows {sizes['vocab']} tokens, and the tokenizer of --encoder {config.encoder} {len(tokenizer)}")
    shown = name_of(Path(name))
    weights = data.fingerprint(model)
    return Trained(shown, config.runs / shown, config, model, tokenizer, config.steps, weights, released=True)


def find_checkpoint(name: str) -> Path:
    """The file or Orbax directory that a path, or a name on the hub, stands for."""
    if not Path(name).exists() and name.count("/") != 1:
        raise Refused(f"{name}: no run there (no config.json), no released checkpoint, nor a name on the hub (owner/name)")
    path = Path(name)
    if not path.exists():
        path = hub.fetch(name, "run", ["checkpoint*", "checkpoint*/**"], holding="a run or checkpoint")
    if path.is_file() or (path / "manifest.ocdbt").exists():
        return path
    numbered = [p for p in path.glob("checkpoint_*") if p.name.removeprefix("checkpoint_").isdigit()]
    found = sorted(numbered, key=lambda p: int(p.name.removeprefix("checkpoint_")))
    if not found:
        raise Refused(f"{name}: no run there (no config.json), and no released checkpoint (checkpoint_*)")
    return found[-1]


def released_config(name: str, corpus: str) -> TrainConfig:
    """The settings of the paper's run that a checkpoint comes from: the one asked for, or the one in its name."""
    in_name = [known for known in ("owt", "de-en", "xsum") if known in name.lower()]
    if corpus and corpus.removesuffix("-t5") not in ("owt", "de-en", "xsum"):
        raise Refused(f"--data {corpus}: a released checkpoint is of one of owt, de-en, xsum")
    if not corpus and len(in_name) != 1:
        raise Refused(f"{name}: its name does not tell what it was trained on; say by --data owt, de-en or xsum")
    return PRESETS[corpus or in_name[0]]


def sizes_of(tensors: Tensors, path: Path) -> dict[str, int]:
    """The sizes of a network, read off its weights."""
    needed = {"text_proj/proj2/kernel": 2, "blocks_0/attn/q_norm/weight": 1, "unembed_kernel": 2}
    for name, dimensions in needed.items():
        if name not in tensors or tensors[name].ndim != dimensions:
            raise Refused(f"{path}: it has no tensor {name} of {dimensions} dimensions")
    (bottleneck, width), (head_dim,), (embedding, vocab) = (tensors[name].shape for name in needed)
    if not head_dim or width % head_dim:
        raise Refused(f"{path}: its heads of {head_dim} channels do not make up its width of {width}")
    depth = sum(name.endswith("/attn/q_norm/weight") for name in tensors)
    return dict(
        depth=depth, width=width, heads=width // head_dim, vocab=vocab, embedding=embedding, bottleneck=bottleneck
    )  # fmt: skip
