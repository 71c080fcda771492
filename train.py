"""Train ELF.

    python train.py                              built-in stories on this machine, in minutes
    python train.py --model elf-b --mesh 64      the paper's Table 7: OpenWebText on 64 chips

--model and --data choose the defaults of all other flags. Run the same command again to resume.
"""

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from einops import rearrange
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray
from tqdm import tqdm

import data
from config import LEARNED_WITH_SOURCES, TrainConfig, check, parse
from corpora.rows import Corpus, Rows, is_scratch
from encoders import scratch
from encoders.t5 import save_t5
from methods import Method
from methods.ablations import decoder_method, keep_unit_table
from methods.elf import elf_method, slots_of
from report import figures, judges, samples
from runtime import checkpoints, preflight
from runtime.errors import UserError, one_line_errors
from runtime.files import lock, unlock
from runtime.mesh import (
    ALL,
    make_mesh,
    place_rows,
    platform,
    replicate,
    replicated,
    shapes_on,
    shardings,
    to_host,
)
from runtime.optimizers import make_optimizer, warmed_up
from runtime.processes import (
    is_process_0,
    join_processes,
    process_0_first,
    restart_with_huge_pages,
    stop_signal,
)

# State and step: rows -> x -> draws -> losses -> gradients -> clip -> Muon -> EMA

Sums = dict[str, tuple[Float[Array, ""], Int[Array, ""]]]  # summed losses and their counts, by name


class State(NamedTuple):
    step: Int[Array, ""]
    model: Any
    ema: Any
    optimizer: Any


def means(sums: Sums) -> dict[str, Float[Array, ""]]:
    """Average the losses per token, over all and by name."""
    total, count = sum(s for s, _ in sums.values()), sum(n for _, n in sums.values())
    return dict(loss=total / count) | {name: s / jnp.maximum(n, 1) for name, (s, n) in sums.items()}


def make_step(config: TrainConfig, optimizer, loss: Callable, mesh: Mesh, unroll_parts: int = 1) -> Callable:
    """Make the train step: (state, frozen, rows, key) -> state, metrics."""
    gradient = jax.grad(loss, has_aux=True)
    k, group = config.accumulate, slots_of(config).group
    in_parts = partial(rearrange, pattern="(m k g) ... -> k (m g) ...", k=k, g=group)

    def step(state: State, frozen, rows: Rows, key: PRNGKeyArray):
        key, numbers = jax.random.fold_in(key, state.step), jnp.arange(config.batch)

        def add_part(totals, part):
            return jax.tree.map(jnp.add, totals, gradient(state.model, frozen, *part, key)), None

        if config.accumulate == 1:
            grads, sums = gradient(state.model, frozen, rows, numbers, key)
        else:
            parts = jax.tree.map(in_parts, (rows, numbers))
            first = jax.tree.map(lambda a: a[0], parts)
            shapes = jax.eval_shape(gradient, state.model, frozen, *first, key)
            zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
            (grads, sums), _ = jax.lax.scan(add_part, zeros, parts, unroll=unroll_parts)
        grads = jax.tree.map(lambda g: g / sum(n for _, n in sums.values()), grads)
        # From here on, every device updates its own shard.
        grads = jax.lax.with_sharding_constraint(grads, shardings(grads, mesh, ALL))
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        ema = jax.tree.map(lambda e, m: config.ema_decay * e + (1 - config.ema_decay) * m, state.ema, model)
        metrics = means(sums) | dict(grad_norm=optax.tree.norm(grads))
        return State(state.step + 1, model, ema, optimizer_state), metrics

    return step


def optimizer_of(config: TrainConfig, unroll: bool = False) -> optax.GradientTransformation:
    rate = warmed_up(config.learning_rate, config.warmup_steps, config.steps, config.schedule)
    optimizer = make_optimizer(config.optimizer, rate, config.clip, unroll=unroll)
    return optax.chain(optimizer, keep_unit_table()) if config.embeddings == "learned" else optimizer


class Trainer(NamedTuple):
    """The compiled parts of a training."""

    optimizer: optax.GradientTransformation
    state: State
    """Shapes and shardings."""
    init: Callable[[], State]
    step: Callable
    """(state, frozen, rows, key) -> state, metrics; jitted, donates the state."""


def build(
    config: TrainConfig, method: Method, mesh: Mesh, start=None, *, unroll_muon=None, unroll_parts: int = 1
) -> Trainer:
    """Build the training of a method on a mesh, from new weights or those of `start`.

    Weights are sharded over fsdp, EMA weights and optimizer state over all devices. Muon's rounds are
    unrolled on a single CPU device, where it is faster; elsewhere it compiles slowly.
    """
    if unroll_muon is None:
        unroll_muon = platform(mesh) == "cpu" and mesh.size == 1
    optimizer = optimizer_of(config, unroll_muon)

    def init(start):
        model_key, *_ = jax.random.split(jax.random.key(config.seed), 3)
        model = method.make(model_key) if start is None else start
        return State(jnp.zeros((), jnp.int32), model, model, optimizer.init(model))

    shapes = jax.eval_shape(init, start)
    axes = State(step=(), model=("fsdp",), ema=ALL, optimizer=ALL)
    sharded = State(*(shardings(part, mesh, over) for part, over in zip(shapes, axes, strict=True)))
    step = make_step(config, optimizer, method.loss, mesh, unroll_parts)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(sharded, replicated(mesh)))
    init = partial(jax.jit(init, out_shardings=sharded), start)
    return Trainer(optimizer, shapes_on(shapes, sharded), init, jitted)


# The loop


def loggers(config: TrainConfig, first: int) -> list[Callable]:
    """Functions of a logged step and its values: metrics.jsonl, and the loggers of the config."""
    chosen = [checkpoints.Metrics(config.directory, first).write]
    if config.wandb:
        import wandb

        where = dict(project=config.wandb, name=config.directory.name, dir=config.directory)
        wandb.init(**where, config=config.as_json())
        chosen.append(lambda step, **values: wandb.log(values, step=step))
    if config.tensorboard:
        from tensorboardX import SummaryWriter

        writer = SummaryWriter(str(config.directory / "tensorboard"))
        chosen.append(lambda step, **values: [writer.add_scalar(k, v, step) for k, v in values.items()])
    return chosen


class Progress:
    """Progress bar and loggers of a run, in process 0."""

    def __init__(self, config: TrainConfig, first: int, label: str):
        self.config, self.started = config, time.time()
        self.loggers = loggers(config, first) if is_process_0() else []
        name = f"{label} {config.directory.relative_to(config.runs)}".strip()
        bar = dict(total=config.steps, initial=first, unit="step", desc=name, dynamic_ncols=True)
        self.bar = tqdm(**bar, disable=not is_process_0())
        self.restart_clock()

    def restart_clock(self):
        self.recent, self.waited, self.since = [], 0.0, time.time()

    def add(self, metrics: dict[str, Array], waited: float):
        """Record a step; at most two stay in flight, so the bar is honest and SIGTERM is prompt."""
        self.recent.append(metrics)
        jax.block_until_ready(self.recent[-3:-2])
        self.waited += waited
        self.bar.update()

    def write(self, done: int, **validation: float):
        """Log the mean of the steps since the last line. A loss that is not finite ends the run."""
        values = {k: float(np.mean([each[k] for each in self.recent])) for k in self.recent[0]}
        if not np.isfinite(values["loss"]):
            became = f"the loss became {values['loss']} by step {done}"
            raise UserError(f"{became}: lower --learning-rate, with a new --name")
        losses = {k: f"{v:.3f}" for k, v in values.items() if k not in ("loss", "grad_norm")}
        now, elapsed = time.time(), time.time() - self.since
        rate = len(self.recent) * self.config.batch * self.config.length / elapsed
        values |= dict(tokens_per_second=rate, waiting=self.waited / elapsed, seconds=now - self.started)
        for log in self.loggers:
            log(step=done, **values, **validation)
        self.bar.set_postfix(losses | dict(tokens=f"{rate:,.0f}/s"))
        self.restart_clock()


def fit(
    config: TrainConfig,
    method: Method,
    frozen,
    corpus: Corpus,
    mesh: Mesh,
    *,
    start=None,
    conditions: data.Conditions | None = None,
    label: str = "",
) -> State:
    """Train from the last checkpoint to the last step, then sample and score. SIGTERM saves and exits."""
    trainer = build(config, method, mesh, start)
    manager = checkpoints.open_checkpoints(config.directory, config.keep)
    state = checkpoints.restore_latest(manager, trainer.init())
    _, train_key, validation_key = jax.random.split(jax.random.key(config.seed), 3)
    frozen, train_key, validation_key = replicate((frozen, train_key, validation_key), mesh)
    validate = make_validation(config, method, frozen, corpus, mesh, validation_key)
    sample = partial(sample_run, config, corpus, mesh, conditions)
    first, last = int(state.step), config.steps
    progress = Progress(config, first, label)

    def load(i):
        chosen = data.batch_indices(len(corpus.rows.s), config.batch, config.seed, i)
        return place_rows(corpus.rows, chosen, mesh)

    with jax.set_mesh(mesh), stop_signal() as stop_requested:
        ahead = data.prefetched(load, first, last)
        for done in range(first + 1, last + 1):
            since = time.time()
            rows = next(ahead)
            waited = time.time() - since
            state, metrics = trainer.step(state, frozen, rows, train_key)
            progress.add(metrics, waited)
            stopping = stop_requested(done)
            saves = done % config.save_every == 0 or done == last or stopping
            validation = validate(state) if saves and not stopping else {}
            if done % config.log_every == 0 or saves:
                with checkpoints.saving(manager, "metrics", OSError):
                    progress.write(done, **validation)
            if saves:  # after the check in `write`: a broken state is never saved
                checkpoints.save(manager, done, state, validation)
            if config.sample_every and done % config.sample_every == 0 and done < last:
                sample(state, 16, f"step-{done}")
                progress.restart_clock()
            if stopping:
                break
        progress.bar.close()
        checkpoints.finish_saving(manager)
    if state.step < last:
        if is_process_0():
            print(f"stopped at step {state.step} and saved; run the same command again to resume")
        sys.exit(0)
    report(config, corpus, sample(state, config.num_samples, "final") if config.num_samples else [])
    return state


def make_validation(config: TrainConfig, method: Method, frozen, corpus: Corpus, mesh: Mesh, key) -> Callable:
    """Make the losses of the EMA weights on held-out rows, always with the same draws."""
    loss = jax.jit(lambda *args: method.loss(*args)[1], out_shardings=replicated(mesh))

    def validate(state: State) -> dict[str, float]:
        def sums(row):  # on the host: one program at a time, as CPU collectives of several can wait in a ring
            return to_host(loss(state.ema, frozen, place_rows(corpus.validation, row, mesh), row, key))

        batches = data.validation_batches(len(corpus.validation.s), config.batch)
        total = jax.tree.map(lambda *parts: sum(parts), *map(sums, batches))
        return {f"validation_{k}": float(v) for k, v in means(total).items()}

    return validate


def sample_run(
    config: TrainConfig, corpus: Corpus, mesh: Mesh, conditions, state: State, n: int, name: str
) -> list[str]:
    """Sample texts from the EMA weights and write them into the run; show one while training."""
    n = min(n, len(corpus.validation.s)) if conditions else n
    model = checkpoints.with_decoder(config, state.ema, config.directory, mesh)
    run = config.directory, config, model, corpus.tokenizer
    trained = checkpoints.Trained(name, *run, int(state.step), weights="", released=False, mesh=mesh)
    sampled = samples.sample_texts(trained, n, seed=config.seed, conditions=conditions)
    if is_process_0():
        file = config.directory / "samples" / f"{name}.jsonl"
        samples.write_texts(file, samples.as_records(corpus, sampled))
        if state.step < config.steps:
            tqdm.write(f"step {state.step}:\n{judges.some_texts(corpus, sampled[:1])}")
    return sampled


def report(config: TrainConfig, corpus: Corpus, sampled: list[str]):
    """Draw the losses, and print the scores of the samples."""
    if not is_process_0():
        return
    figures.plot_losses(config.directory)
    if sampled:
        judge = judges.judge_by(corpus)
        print(judges.report(judge, corpus, sampled, judge.judge(sampled).scores))
        print(f"\n{judges.some_texts(corpus, sampled)}")
        no_judge = "" if corpus.has_sources or corpus.rules else " --judge none"
        print(f"\nMore: python eval.py samples --run {config.directory}{no_judge}")


# Stages of a run


def prepare(config: TrainConfig, mesh: Mesh) -> tuple[Corpus, data.Embedder]:
    """Lock the run's directory; prepare the corpus and the frozen encoder, which may be trained first."""
    check(config)
    checkpoints.check_same_run(config)
    with process_0_first():
        if is_process_0():
            lock(config.directory)
        corpus = data.load_corpus(config)
        if is_process_0():
            print(f"{config.data}: {corpus.summary()}")
    if len(corpus.rows.s) < config.batch:
        raise UserError(f"--batch {config.batch}: the corpus has only {len(corpus.rows.s)} rows; lower it")
    if config.embeddings == "learned" and corpus.has_sources:
        raise UserError(LEARNED_WITH_SOURCES)
    if is_scratch(config.encoder) and config.embeddings in ("encoder", "table"):
        train_encoder(config, corpus, mesh)
    with process_0_first():
        embedder = data.load_embedder(config, corpus)
        if is_process_0():
            checkpoints.write_config(config)
            data.save_embedder(config, corpus, embedder)
    return corpus, data.cast_encoder(embedder, data.compute_type(config, mesh))


def train_encoder(config: TrainConfig, corpus: Corpus, mesh: Mesh):
    """Train the scratch encoder on the corpus, unless the run or the cache has it."""
    if (config.directory / data.TABLE).exists() or (config.directory / "encoder" / "config.json").exists():
        return
    stage = data.scratch_config(config, corpus)
    result = stage.directory / "t5"
    with process_0_first():
        if is_process_0():
            lock(stage.directory, wait=True)  # another run may be training it
        exists = (result / "config.json").exists()
    if not exists:
        if is_process_0():
            checkpoints.write_config(stage)
        method = scratch_method(stage, corpus.tokenizer, data.compute_type(stage, mesh))
        trained = to_host(fit(stage, method, (), corpus, mesh).model)
        if is_process_0():
            save_t5(trained.encoder, result)
    if is_process_0():
        unlock(stage.directory)


def scratch_method(config: TrainConfig, tokenizer, dtype) -> Method:
    """The training of a T5 from scratch, by span corruption."""
    recipe = scratch.recipe_of(config.encoder, len(tokenizer))
    cast = partial(data.cast, dtype=dtype)
    loss = scratch.make_loss(recipe, scratch.sentinels_of(tokenizer), tokenizer.eos_token_id, cast)
    return Method(lambda key: scratch.T5(recipe.shape, embed_std=recipe.embed_std, key=key), loss)


def train_decoder(config: TrainConfig, mesh: Mesh):
    """Train the separate decoder as a run inside that of ELF, unless it is there."""
    directory = config.directory / "decoder"
    changes = dict(steps=config.decoder_steps, learning_rate=config.decoder_learning_rate, optimizer="adamw")
    changes |= dict(schedule="cosine", warmup_steps=config.decoder_steps // 20, num_samples=0, sample_every=0)
    changes |= dict(name=str(directory.relative_to(config.runs)), wandb="", tensorboard=False)
    stage = replace(config, **changes)
    for each in (config, stage):
        checkpoints.check_same_run(each)
    if not (directory / "t5" / "config.json").exists():
        corpus, embedder = prepare(stage, mesh)
        method = decoder_method(stage, embedder.encoder, data.compute_type(stage, mesh))
        decoder = to_host(fit(stage, method, embedder, corpus, mesh).ema)
        if is_process_0():
            save_t5(decoder.body, directory / "t5")


def train(config: TrainConfig) -> State:
    """Train ELF on a corpus, after its encoder and its decoder where these are trained too."""
    check(config)
    mesh = make_mesh(config.mesh, config.batch)
    if config.decoder == "separate":
        train_decoder(config, mesh)
    corpus, embedder = prepare(config, mesh)
    method = elf_method(config, len(corpus.tokenizer), len(embedder.mean), mesh)
    return fit(config, method, embedder, corpus, mesh, conditions=conditions_of(embedder, corpus, mesh))


def conditions_of(embedder: data.Embedder, corpus: Corpus, mesh: Mesh) -> data.Conditions | None:
    """Held-out sources to be answered, if the corpus has any."""
    return data.Conditions(replicate(embedder, mesh), corpus.validation) if corpus.has_sources else None


def main():
    started = time.time()
    with one_line_errors():
        config = parse(sys.argv[1:], __doc__)
        check(config)
        if config.preflight:
            costs = preflight.inspect(preflight.Plan(config, build))
            preflight.print_costs(costs)
            if config.preflight_json:
                config.preflight_json.write_text(json.dumps(costs, indent=2) + "\n")
            return
        restart_with_huge_pages()
        join_processes(config.coordinator, config.processes, config.process_id)
        if is_process_0():
            settings = "  ".join(f"{k}={v}" for k, v in config.as_json().items() if v not in ("", None))
            width = shutil.get_terminal_size().columns
            print(textwrap.fill(settings, width, break_long_words=False, break_on_hyphens=False))
        train(config)
    if is_process_0():
        print(f"{config.directory}: {(time.time() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
