"""Runs on disk, and trained networks by name.

runs/NAME/config.json      the settings
runs/NAME/metrics.jsonl    one line per logged step, drawn in loss.png
runs/NAME/samples/         texts sampled along the way
runs/NAME/tokenizer/       tokens to text
runs/NAME/checkpoints/     the state, by Orbax

trained = load("runs/stories-desk")
trained = load("embedded-language-flows/ELF-B-owt")      # or a local copy, in any of the released formats
"""

import json
import logging
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

import data
from config import FREE, PRESETS, TrainConfig, config_from, preset
from corpora.rows import Corpus, Split, load_tokenizer, tokenizer_directory
from elf import ELF, SIZES
from encoders.released import Tensors, from_released, read_released
from encoders.t5 import load_t5
from encoders.weights import dotted
from methods.ablations import Decoder, TwoStage
from methods.elf import elf_method
from runtime.errors import UserError, first_line
from runtime.files import download, write_file
from runtime.mesh import make_mesh, platform, replicate, replicated, shapes_on
from runtime.processes import all_succeeded, is_process_0

logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a traceback per failed write; `saving` says it once
logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax explains each of its options

Which = Literal["latest", "best"]
RELEASED_STD = 0.2  # released code divides the embeddings of T5-small by this; it subtracts nothing


# Config and metrics


def read_config(directory: Path) -> TrainConfig:
    try:
        return config_from(json.loads((directory / "config.json").read_text()))
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{directory}: its config.json is not that of a run ({error})") from None


def write_config(config: TrainConfig):
    write_file(config.directory / "config.json", json.dumps(config.as_json(), indent=2) + "\n")


def check_same_run(config: TrainConfig):
    """Raise a UserError if the run's directory holds a run with other settings."""
    if not (config.directory / "config.json").exists():
        return
    now, saved = config.as_json(), read_config(config.directory).as_json()
    changed = [field for field in sorted(now.keys() - FREE) if saved[field] != now[field]]
    if changed:
        fields = ", ".join(f"{field} ({saved[field]} there, {now[field]} now)" for field in changed)
        problem = f"holds a run with other settings: {fields}"
        raise UserError(f"{config.directory} {problem}. Choose another --name.")


class Metrics:
    """metrics.jsonl of a run, without lines after the last checkpoint."""

    def __init__(self, directory: Path, step: int):
        self.file = directory / "metrics.jsonl"
        lines = [line for line in read_metrics(directory) if line["step"] <= step]
        write_file(self.file, "".join(json.dumps(line) + "\n" for line in lines))

    def write(self, **values):
        with self.file.open("a") as f:
            f.write(json.dumps(values) + "\n")


def read_metrics(directory: Path) -> list[dict]:
    """Read all whole lines; a kill may have cut the last one."""
    file = directory / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


# State


def open_checkpoints(directory: Path, keep: int | None) -> ocp.CheckpointManager:
    """Open checkpoints to save, keeping the newest and the best by validation, or with None to read."""

    def loss(metrics):
        return metrics["validation_loss"]

    settings = dict(best_fn=loss, best_mode="min")
    if keep:  # reverse: the smallest loss last
        best = policies.BestN(get_metric_fn=loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)
        settings |= dict(preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]))
        settings |= dict(enable_async_checkpointing=True, cleanup_tmp_directories=True)
    else:
        settings |= dict(read_only=True)
    options = ocp.CheckpointManagerOptions(**settings)
    handlers = {part: ocp.StandardCheckpointHandler() for part in ("step", "model", "ema", "optimizer")}
    path = (directory / "checkpoints").absolute()
    return ocp.CheckpointManager(path, options=options, item_handlers=handlers)


def is_finished(directory: Path) -> bool:
    """Tell whether a run has the checkpoint of its last step."""
    return open_checkpoints(directory, keep=None).latest_step() == read_config(directory).steps


def flat(tree) -> dict[str, jax.Array]:
    """Flatten a tree into its leaves by dotted path."""
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def save(manager: ocp.CheckpointManager, step: int, state, validation: dict[str, float]):
    """Save the parts of a state (a NamedTuple) side by side, so that each can be read alone."""
    parts = {name: ocp.args.StandardSave(flat(part)) for name, part in state._asdict().items()}
    with saving(manager):
        manager.save(step, args=ocp.args.Composite(**parts), metrics=validation or None)


def finish_saving(manager: ocp.CheckpointManager):
    with saving(manager):
        manager.wait_until_finished()


@contextmanager
def saving(manager: ocp.CheckpointManager, what="a checkpoint", errors: type[Exception] = Exception):
    """End the run with one line if a save fails, now or in the background; name the last good checkpoint.

    Orbax has no common class for what a full disk can raise; other files raise OSError.
    """
    try:
        yield
    except errors as error:
        manager.reload()
        latest = manager.latest_step()
        good = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"
        run = manager.directory.parent
        raise UserError(f"{what} could not be saved in {run} ({first_line(error)}); {good}") from error


def restore(manager: ocp.CheckpointManager, step: int, likes: dict[str, Any]) -> dict[str, Any]:
    """Restore named parts of the state, each with the shapes, types and shardings of the given one."""
    wanted = {name: jax.tree.map(ocp.utils.to_shape_dtype_struct, flat(like)) for name, like in likes.items()}
    metadata = manager.item_metadata(step)
    for name, leaves in wanted.items():
        here, saved = ({(k, tuple(a.shape)) for k, a in tree.items()} for tree in (leaves, metadata[name]))
        if odd := sorted({path for path, _ in here ^ saved}):
            problem = f"does not fit this model: {', '.join(odd[:5])} differ"
            raise UserError(f"{manager.directory}: checkpoint {step} {problem}")
    args = {name: ocp.args.StandardRestore(leaves) for name, leaves in wanted.items()}
    arrays = manager.restore(step, args=ocp.args.Composite(**args))
    restored = {}
    for name, like in likes.items():
        leaves = [arrays[name][path] for path in flat(like)]
        restored[name] = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return restored


def restore_latest(manager: ocp.CheckpointManager, state):
    """Restore the newest state that every process can read, or return the given one if none was saved."""
    steps = sorted(manager.all_steps(), reverse=True)
    broken = []
    for step in steps:
        problem = None
        try:
            restored = type(state)(**restore(manager, step, state._asdict()))
        except UserError:
            raise  # whole, but of another model
        except Exception as error:  # Orbax has no common class for what a torn checkpoint can raise.
            problem = error
        if all_succeeded(problem is None):
            break
        broken.append(f"{step} ({type(problem).__name__})")
    else:
        if broken:
            problem = f"no checkpoint can be read: {', '.join(broken)}"
            raise UserError(f"{manager.directory}: {problem}. Delete the run to start again.")
        return state
    if is_process_0():
        if broken:
            torn = ", ".join(broken)
            print(f"warning: checkpoint {torn} cannot be read; going back to checkpoint {step}")
        for torn in steps[: steps.index(step)]:  # renamed, so that the run can save these steps again
            name = f"torn-{torn}-{time.time():.0f}"
            (manager.directory / str(torn)).rename(manager.directory.parent / name)
        print(f"resuming {manager.directory.parent} from step {step}")
    all_succeeded(True)
    manager.reload()
    return restored


# Trained networks


class Trained(NamedTuple):
    """The EMA weights of a run, or a released checkpoint."""

    name: str
    directory: Path
    """Directory for measurements."""
    config: TrainConfig
    model: ELF | TwoStage
    tokenizer: Any
    step: int
    """Training steps; for a released one, as many as the paper says."""
    weights: str
    """Hash of the weights."""
    released: bool
    mesh: Mesh

    def corpus(self, split: Split = "validation") -> Corpus:
        return data.load_corpus(self.config, split)

    def embedder(self, corpus: Corpus) -> data.Embedder:
        """Load the frozen encoder, with the statistics of the training."""
        if not self.released:
            encoder = data.load_encoder(self.config, corpus, self.directory)
            return data.read_embedder(encoder, self.directory)
        encoder = data.load_pretrained(self.config.encoder, corpus)
        width, trained_on = encoder.embed.shape[1], len(self.model.unembed.weight)
        if width != trained_on:
            raise UserError(f"--encoder is {width} wide, and {self.name} was trained on one of {trained_on}")
        return data.Embedder(encoder, jnp.zeros(width), jnp.full(width, RELEASED_STD))

    def conditions(self, corpus: Corpus) -> data.Conditions | None:
        """Load held-out sources to be answered, if the corpus has any."""
        if not corpus.has_sources:
            return None
        embedder = data.cast_encoder(self.embedder(corpus), data.compute_type(self.config, self.mesh))
        return data.Conditions(replicate(embedder, self.mesh), corpus.validation)


def load(
    name: str, mesh: Mesh | None = None, checkpoint: Which = "latest", corpus="", data_dir="", encoder=""
) -> Trained:
    """Load a run, or a released checkpoint, which may need data and encoder."""
    mesh = make_mesh("1", 0) if mesh is None else mesh
    if (Path(name) / "config.json").exists():
        if corpus or data_dir or encoder:
            raise UserError(f"--data, --data-dir, --encoder: only for a released checkpoint; {name} is a run")
        return load_run(Path(name), mesh, checkpoint)
    if checkpoint == "best":
        raise UserError(f"--checkpoint best: only for a run, which validates while it trains; {name} is none")
    return load_released(name, mesh, corpus, data_dir, encoder)


def load_run(directory: Path, mesh: Mesh, checkpoint: Which = "latest") -> Trained:
    """Load the EMA weights of a run, with its separate decoder if it has one."""
    config = read_config(directory)
    manager = open_checkpoints(directory, keep=None)
    step = manager.latest_step() if checkpoint == "latest" else manager.best_step()
    if step is None:
        raise UserError(f"{directory}: it has no checkpoint yet")
    if config.model not in SIZES:
        raise UserError(f"{directory}: its config.json names no known size of network ({config.model})")
    tokenizer = load_tokenizer(directory / "tokenizer")
    try:
        metadata = manager.item_metadata(step)
        if "ema" not in set(metadata):
            raise UserError(f"{directory}: checkpoint {step} has no EMA weights")
        width = metadata["ema"]["x_head.bias"].shape[0]
        like = jax.eval_shape(elf_method(config, len(tokenizer), width, mesh).make, jax.random.key(0))
        model = restore(manager, step, {"ema": shapes_on(like, replicated(mesh))})["ema"]
    except UserError:
        raise
    except Exception as error:  # Orbax has no common class for what a damaged checkpoint can raise.
        problem = f"cannot be read, it is damaged or not whole ({first_line(error)})"
        raise UserError(f"{manager.directory}: checkpoint {step} {problem}") from None
    model = with_decoder(config, model, directory, mesh)
    name, weights = short_name(directory), data.fingerprint(model)
    return Trained(name, directory, config, model, tokenizer, step, weights, released=False, mesh=mesh)


def with_decoder(config: TrainConfig, model: ELF, run: Path, mesh: Mesh) -> ELF | TwoStage:
    """Join a network with the separate decoder of its run, if it has one."""
    if config.decoder == "shared":
        return model
    return TwoStage(model, replicate(Decoder(load_t5(run / "decoder" / "t5")), mesh))


def history(run: Trained) -> list[tuple[TrainConfig, int]]:
    """List config and steps of every training behind a network: the teacher's, and each round's."""
    stages, config = [(run.config, run.step)], run.config
    while config.teacher:
        start = config.start_steps
        before = run.directory.parent / str(start) if start else Path(config.teacher)
        on_hub = len(before.parts) == 2 and not before.parent.is_dir()
        if (before / "config.json").exists():
            config = read_config(before)
        elif before.exists() or on_hub:
            config = preset(config.model if config.model in SIZES else None, config.data)
        else:
            raise UserError(f"{run.name}: its teacher is no longer there ({before})")
        stages.insert(0, (config, config.steps))
    return stages


def short_name(path: Path) -> str:
    """Name a run by the last part of its path, and its parent if that part is a number or `checkpoint…`."""
    generic = path.name.isdigit() or path.name.startswith("checkpoint")
    return f"{path.absolute().parent.name}/{path.name}" if generic else path.name


# Released checkpoints


def load_released(name: str, mesh: Mesh, corpus: str, data_dir: str, encoder: str) -> Trained:
    """Load a released checkpoint, with the paper's settings for its data."""
    path = find_checkpoint(name)
    config = released_config(name, corpus)
    tensors = read_released(path)
    sizes = sizes_of(tensors, path)
    shape = {side: sizes[side] for side in ("depth", "width", "heads")}
    size = next((size for size, sides in SIZES.items() if sides == shape), None)
    config = replace(preset(size, config.data), model=size or "released", encoder=encoder or config.encoder)
    config = replace(config, bottleneck=sizes["bottleneck"], data_dir=data_dir)
    unroll = sizes["depth"] if platform(mesh) == "cpu" else 1
    like = jax.eval_shape(lambda: ELF(**sizes, unroll=unroll, key=jax.random.key(0)))
    model = jax.device_put(from_released(like, tensors, str(path)), replicated(mesh))
    tokenizer = load_tokenizer(tokenizer_directory(config.encoder))
    if len(tokenizer) != sizes["vocab"]:
        ours = f"the tokenizer of --encoder {config.encoder} {len(tokenizer)}"
        raise UserError(f"{path} knows {sizes['vocab']} tokens, and {ours}")
    short, weights = short_name(Path(name)), data.fingerprint(model)
    place, steps = config.runs / short, config.steps
    return Trained(short, place, config, model, tokenizer, steps, weights, released=True, mesh=mesh)


def find_checkpoint(name: str) -> Path:
    """Find the file or Orbax directory that a path or a name on the hub stands for."""
    path = Path(name)
    if not path.exists():
        if name.count("/") != 1:
            missing = "no config.json, no checkpoint, nor a name on the hub (owner/name)"
            raise UserError(f"{name}: no run there: {missing}")
        path = download(name, "run", ["checkpoint*", "checkpoint*/**"], holding="a run or checkpoint")
    if path.is_file() or (path / "manifest.ocdbt").exists():
        return path
    numbered = [p for p in path.glob("checkpoint_*") if p.name.removeprefix("checkpoint_").isdigit()]
    if not numbered:
        raise UserError(f"{name}: no run there (no config.json), and no released checkpoint (checkpoint_*)")
    return max(numbered, key=lambda p: int(p.name.removeprefix("checkpoint_")))


def released_config(name: str, corpus: str) -> TrainConfig:
    """Choose the preset of a released checkpoint: by the data given, or by the data in its name."""
    released = ("owt", "de-en", "xsum")
    in_name = [data for data in released if data in name.lower()]
    if corpus and corpus.removesuffix("-t5") not in released:
        raise UserError(f"--data {corpus}: a released checkpoint is of one of owt, de-en, xsum")
    if not corpus and len(in_name) != 1:
        unknown = "its name does not say what it was trained on"
        raise UserError(f"{name}: {unknown}; give --data owt, de-en or xsum")
    return PRESETS[corpus or in_name[0]]


def sizes_of(tensors: Tensors, path: Path) -> dict[str, int]:
    """Read the sizes of a network off its weights."""
    needed = {"text_proj/proj2/kernel": 2, "blocks_0/attn/q_norm/weight": 1, "unembed_kernel": 2}
    for name, dimensions in needed.items():
        if name not in tensors or tensors[name].ndim != dimensions:
            raise UserError(f"{path}: it has no tensor {name} of {dimensions} dimensions")
    (bottleneck, width), (head_dim,), (embedding, vocab) = (tensors[name].shape for name in needed)
    if not head_dim or width % head_dim:
        raise UserError(f"{path}: its heads of {head_dim} channels do not make up its width of {width}")
    depth = sum(name.endswith("/attn/q_norm/weight") for name in tensors)
    network = dict(depth=depth, width=width, heads=width // head_dim)
    return network | dict(vocab=vocab, embedding=embedding, bottleneck=bottleneck)
