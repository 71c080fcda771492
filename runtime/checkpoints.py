"""A run directory: the configuration it was made with, its metrics, its checkpoints.

runs/NAME/config.json      the resolved configuration
runs/NAME/metrics.jsonl    one line a logged step
runs/NAME/loss.png         the same as a picture
runs/NAME/samples/         texts sampled along the way
runs/NAME/tokenizer/       what turns tokens into text
runs/NAME/checkpoints/     Orbax
"""

import atexit
import fcntl
import json
import logging
import time
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from errors import Refused
from mesh import all_succeeded, is_chief
from pretrained import dotted
from settings import TrainConfig, config_from

# Of a failed save, every single write would be told by a traceback of its own; `saving` says it once.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)
logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells how it understands each of its options.


def read_config(directory: Path) -> TrainConfig:
    """The settings that a run was made with."""
    try:
        return config_from(json.loads((directory / "config.json").read_text()))
    except (AttributeError, TypeError, ValueError) as error:
        raise Refused(f"{directory}: its config.json is not that of a run ({error})") from None


def refuse_others(directory: Path, config: TrainConfig, free: set[str]):
    """Refuse a directory that holds the run of another configuration; `free` fields may differ."""
    now = config.as_json()
    there = read_config(directory).as_json() if (directory / "config.json").exists() else now
    differing = [f for f in sorted(now.keys() - free) if there[f] != now[f]]
    if differing:
        listed = ", ".join(f"{f} ({there[f]} there, {now[f]} now)" for f in differing)
        raise Refused(f"{directory} holds a run with other settings: {listed}. Choose another --name, or delete it.")


CLAIMED: dict[Path, IO] = {}  # locks of this process, held as long as it lives


def claim(directory: Path, wait: bool = False):
    """Make this process the only one that writes into the directory of a run, if need be after another that does."""
    if directory in CLAIMED:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("w")
    except OSError as error:
        raise Refused(f"{directory}: cannot write there ({error.strerror}): choose another --runs") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise Refused(f"{directory} is being written by another process: wait for it, or choose another --name") from None
        print(f"{directory} is being written by another process: waiting for it", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    CLAIMED[directory] = lock
    atexit.register(remove_if_empty, directory)


def release(directory: Path):
    """Let others write there again."""
    CLAIMED.pop(directory).close()


def remove_if_empty(directory: Path):
    """A run that was refused before it wrote anything leaves nothing behind."""
    if directory.is_dir() and [file.name for file in directory.iterdir()] == ["lock"]:
        (directory / "lock").unlink()
        directory.rmdir()


def write_whole(file: Path, content: str | bytes):
    """Write a file so that a kill leaves the one before or the new one, never a half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.rename(file)


class Metrics:
    """metrics.jsonl, without the lines that a killed run wrote after its last checkpoint."""

    def __init__(self, directory: Path, step: int):
        self.file = directory / "metrics.jsonl"
        kept = [line for line in read_metrics(directory) if line["step"] <= step]
        write_whole(self.file, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, **values):
        with self.file.open("a") as f:
            f.write(json.dumps(values) + "\n")


def read_metrics(directory: Path) -> list[dict]:
    """All whole lines; a line cut off by a kill is left out."""
    file = directory / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def plot_losses(directory: Path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    lines = read_metrics(directory)
    steps = [line["step"] for line in lines]
    titles = dict(mse="denoising: velocity error (Eq. 1)", ce="decoding: cross-entropy (Eq. 2)")
    titles = {key: title for key, title in titles.items() if any(line[key] for line in lines)}  # one, for a separate decoder
    figure, axes = plt.subplots(1, len(titles), figsize=(4.5 * len(titles), 3.2), layout="constrained", squeeze=False)
    for axis, (key, title) in zip(axes[0], titles.items(), strict=True):
        axis.plot(steps, [line[key] for line in lines], lw=1, label="training")
        held_out = [(line["step"], line[f"validation_{key}"]) for line in lines if f"validation_{key}" in line]
        axis.plot(*zip(*held_out, strict=True), "o-", ms=3, lw=1, label="held out, averaged weights") if held_out else None
        axis.set(title=title, xlabel="step", yscale="log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.3)
    axes[0, 0].legend(frameon=False)
    figure.savefig(directory / "loss.png", dpi=120)
    plt.close(figure)


def open_checkpoints(directory: Path, keep: int | None) -> ocp.CheckpointManager:
    """To save, keeping the newest and the best by validation, or only to read. Opening to save clears what a kill left."""
    options = dict(best_fn=lambda metrics: metrics["validation_loss"], best_mode="min")
    if keep:
        best = policies.BestN(
            get_metric_fn=options["best_fn"], reverse=True, n=1, keep_checkpoints_without_metrics=False
        )  # reverse: the smallest loss last
        options |= dict(preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]))
        options |= dict(enable_async_checkpointing=True, cleanup_tmp_directories=True)
    else:
        options |= dict(read_only=True)
    handlers = {part: ocp.StandardCheckpointHandler() for part in ("step", "model", "ema", "optimizer")}
    return ocp.CheckpointManager(
        (directory / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(**options), item_handlers=handlers
    )


def is_finished(directory: Path) -> bool:
    return open_checkpoints(directory, keep=None).latest_step() == read_config(directory).steps


def flat(tree) -> dict[str, jax.Array]:
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def save(manager: ocp.CheckpointManager, step: int, state, validation: dict[str, float]):
    """Write the parts of a state (a NamedTuple) side by side, so that each can be read without the others."""
    parts = {name: ocp.args.StandardSave(flat(part)) for name, part in state._asdict().items()}
    with saving(manager):
        manager.save(step, args=ocp.args.Composite(**parts), metrics=validation or None)


def finish_saving(manager: ocp.CheckpointManager):
    with saving(manager):
        manager.wait_until_finished()


@contextmanager
def saving(manager: ocp.CheckpointManager, what: str = "a checkpoint", errors: type[Exception] = Exception):
    """A save that fails, now or in the background, ends the run with a word on what is safe.

    Orbax has no common class for what a full disk can raise; others have OSError.
    """
    try:
        yield
    except errors as error:
        manager.reload()
        safe = f"the last good checkpoint is {manager.latest_step()}" if manager.latest_step() else "there is no checkpoint yet"
        reason = str(error).strip().splitlines()[0][-200:]
        raise Refused(f"{what} could not be saved in {manager.directory.parent} ({reason}); {safe}") from error


def restore(manager: ocp.CheckpointManager, step: int, likes: dict[str, Any]) -> dict[str, Any]:
    """Parts of the state saved at `step`, each with the shapes, types and shardings of what is given under its name."""
    args = {name: ocp.args.StandardRestore(jax.tree.map(abstract, flat(like))) for name, like in likes.items()}
    saved = manager.item_metadata(step)
    for name, like in likes.items():
        expected = {key: tuple(leaf.shape) for key, leaf in flat(like).items()}
        found = {key: tuple(leaf.shape) for key, leaf in saved[name].items()}
        if expected != found:
            odd = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
            raise Refused(f"{manager.directory}: checkpoint {step} does not fit this model: {', '.join(odd[:5])} differ")
    arrays = manager.restore(step, args=ocp.args.Composite(**args))
    return {name: unflatten(arrays[name], like) for name, like in likes.items()}


def unflatten(arrays: dict[str, jax.Array], like):
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[dotted(path)], like)


def abstract(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


@contextmanager
def reading(manager: ocp.CheckpointManager, step: int):
    """Only to look at: a checkpoint that cannot be read is refused, whatever Orbax raises of it."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise Refused(f"{manager.directory}: checkpoint {step} cannot be read, it is damaged or not whole ({reason})") from None


def restore_latest(manager: ocp.CheckpointManager, state):
    """The newest saved state that every process can read, or the given one if none was ever saved."""
    steps, broken = sorted(manager.all_steps(), reverse=True), []
    for step in steps:
        restored, refusal = None, None
        try:
            restored = type(state)(**restore(manager, step, state._asdict()))
        except Refused:
            raise  # whole, but of another model
        except Exception as error:  # Orbax has no common class for what a torn checkpoint can raise.
            refusal = error
        if not all_succeeded(restored is not None):
            broken.append(f"{step} ({type(refusal).__name__})")
            continue
        if is_chief():
            if broken:
                print(f"warning: checkpoint {', '.join(broken)} cannot be read; going back to checkpoint {step}")
            for torn in (s for s in steps if s > step):  # set aside, or the run could not save these steps again
                (manager.directory / str(torn)).rename(manager.directory.parent / f"torn-{torn}-{time.time():.0f}")
            print(f"continuing {manager.directory.parent} from step {step}")
        all_succeeded(True)
        manager.reload()
        return restored
    if broken:
        raise Refused(f"{manager.directory}: no checkpoint can be read: {', '.join(broken)}. Delete the run to start anew.")
    return state


def write_texts(file: Path, records: list[dict[str, str]]):
    write_whole(file, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
