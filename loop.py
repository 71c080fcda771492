"""The loop of a run: step after step with a progress bar, log lines, checkpoints and samples, until the end or a SIGTERM."""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array
from tqdm import tqdm

import data
import runs
from errors import Refused
from mesh import is_chief, stop_signal
from settings import TrainConfig


def loggers(config: TrainConfig, first: int) -> list[Callable]:
    """What is told of every logged step: metrics.jsonl always, others if asked for."""
    found = [runs.Metrics(config.directory, first).write]
    if config.wandb:
        import wandb

        wandb.init(project=config.wandb, name=config.directory.name, config=config.as_json(), dir=config.directory)
        found.append(lambda step, **values: wandb.log(values, step=step))
    if config.tensorboard:
        from tensorboardX import SummaryWriter

        writer = SummaryWriter(str(config.directory / "tensorboard"))
        found.append(lambda step, **values: [writer.add_scalar(k, v, step) for k, v in values.items()])
    return found


class Progress:
    """The progress bar and the loggers of a run; only the chief's are heard."""

    def __init__(self, config: TrainConfig, first: int, label: str):
        self.config, self.begun = config, time.time()
        self.tell = loggers(config, first) if is_chief() else []
        self.bar = tqdm(
            total=config.steps,
            initial=first,
            unit="step",
            desc=f"{label} {config.directory.relative_to(config.runs)}".strip(),
            dynamic_ncols=True,
            disable=not is_chief(),
        )
        self.restart_clock()

    def restart_clock(self):
        self.recent, self.waited, self.since = [], 0.0, time.time()

    def add(self, found: dict[str, Array], waited: float):
        """Of a step that may still be running. At most two are, so that the bar tells the truth and a SIGTERM is soon heard."""
        self.recent.append(found)
        jax.block_until_ready(self.recent[-3:-2])
        self.waited += waited
        self.bar.update()

    def write(self, done: int, **more: float):
        """One line for the steps since the last one. A loss that is not a number ends the run."""
        values = {k: float(np.mean([each[k] for each in self.recent])) for k in self.recent[0]}
        if not np.isfinite(values["loss"]):
            raise Refused(f"the loss became {values['loss']} by step {done}: lower --learning-rate, under another --name")
        now = time.time()
        rate = len(self.recent) * self.config.batch * self.config.length / (now - self.since)
        values |= dict(tokens_per_second=rate, waiting=self.waited / (now - self.since), seconds=now - self.begun)
        for tell in self.tell:
            tell(step=done, **values, **more)
        branches = {k: f"{values[k]:.3f}" for k in ("mse", "ce") if values[k]}  # What trains first, or beside it, has only one.
        self.bar.set_postfix(branches | dict(tokens=f"{rate:,.0f}/s"))
        self.restart_clock()


def fit(
    config: TrainConfig,
    state: NamedTuple,
    load: Callable,
    advance: Callable,
    validate: Callable,
    show: Callable,
    checkpoints,
    label: str = "",
) -> NamedTuple:
    """Call `advance(state, load(i))` up to the last step: log, validate, save, show samples. A SIGTERM saves and leaves."""
    first = int(state.step)
    progress = Progress(config, first, label)
    rows_ahead = data.prefetched(load, first, config.steps)
    with stop_signal() as asked_to_stop:
        for done in range(first + 1, config.steps + 1):
            asked = time.time()
            rows = next(rows_ahead)
            waited = time.time() - asked
            state, found = advance(state, rows)
            progress.add(found, waited)
            last, stopping = done == config.steps, asked_to_stop(done)
            saves = done % config.save_every == 0 or last or stopping
            validation = validate(state) if saves and not stopping else {}
            if done % config.log_every == 0 or saves:
                with runs.saving(checkpoints, "metrics", OSError):
                    progress.write(done, **validation)
            if saves:  # after the check in `write`: a broken state is never saved
                runs.save(checkpoints, done, state, validation)
            if config.sample_every and done % config.sample_every == 0 and not last:
                show(state, done)
                progress.restart_clock()
            if stopping:
                break
        progress.bar.close()
        runs.finish_saving(checkpoints)
    if state.step < config.steps:
        if is_chief():
            print(f"stopped at step {state.step} and saved; the same command continues")
        sys.exit(0)
    return state
