"""Train ELF.

    python train.py                              the embedded stories on this machine, in minutes
    python train.py --model elf-b --mesh 64      the paper's Table 7: OpenWebText on 64 chips

A choice of model and data brings the paper's settings as defaults; every one of them is a flag. The same command continues an
interrupted run.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from einops import rearrange
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from tqdm import tqdm

import corpora
import data
import losses
import metrics
import preflight
import runs
import samplers
from elf import ELF, SIZES
from errors import Refused
from mesh import (
    ALL,
    by_row,
    chief_first,
    everywhere,
    fetch,
    has_accelerator,
    is_chief,
    join_processes,
    make_mesh,
    place_rows,
    platform,
    replicate,
    shapes_on,
    split,
    stop_signal,
)
from optimizers import make_optimizer, warmed_up
from settings import FREE, OWT_ROWS, TrainConfig, check, parse

# One step: rows -> x -> draws -> losses -> gradients -> clip -> Muon -> EMA


class State(NamedTuple):
    step: Int[Array, ""]
    model: ELF
    ema: ELF
    optimizer: Any


def draw(
    config: TrainConfig, key: PRNGKeyArray, row: Int[Array, " N"], length: int, width: int, group: int
) -> tuple[losses.Draws, Bool[Array, " N"]]:
    """All randomness of a step: a function of its key and the row's number, so the same on any mesh. Also which rows drop."""

    def one(row):
        k = jax.random.split(jax.random.fold_in(key, row), 6)
        t = losses.logit_normal(jax.random.normal(k[0]), config.t_mean, config.t_std)
        p = losses.logit_normal(jax.random.normal(k[1], (length,)), config.p_mean, config.p_std)
        w = losses.guidance_scale(jax.random.uniform(k[2]), config.w_min, config.w_max)
        eps = jax.random.normal(k[3], (length, width))
        return t, p, w, eps, jax.random.uniform(k[4]), jax.random.bernoulli(k[5], config.p_drop)

    t, p, w, eps, u, drop = jax.vmap(one)(row)
    return losses.Draws(t, p, w, eps, *losses.roles(u, group, config.p_decode, config.p_self_cond)), drop


def cast(tree, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def optimizer_of(config: TrainConfig, unroll: bool = False) -> optax.GradientTransformation:
    rate = warmed_up(config.learning_rate, config.warmup_steps, config.steps, config.schedule)
    return make_optimizer(config.optimizer, rate, config.clip, unroll=unroll)


def slots_of(config: TrainConfig) -> losses.Slots:
    return losses.make_slots(config.batch // config.accumulate, config.p_decode, config.p_self_cond)


def make_loss(config: TrainConfig, dtype) -> Callable:
    """(model, embedder, rows, their numbers, key) -> summed loss, and its sum and count in each branch."""
    slots = slots_of(config)
    scales = dict(noise_scale=config.noise_scale, decode_noise_scale=config.decode_noise_scale)

    def loss(model: ELF, embedder: data.Embedder, rows: corpora.Rows, row: Int[Array, " N"], key: PRNGKeyArray):
        draws, drop = draw(config, key, row, rows.s.shape[1], len(embedder.mean), slots.group)
        batch = embedder(rows, drop)
        per_token = losses.token_losses(cast(model, dtype), batch, draws, slots, **scales)
        sums = losses.branch_sums(per_token, batch, draws)
        return sums[:, 0].sum(), sums

    return loss


def found_in(sums: Float[Array, "2 2"]) -> dict[str, Float[Array, ""]]:
    """What is told of the losses: per token, over all, and in each branch."""
    total, count = sums.sum(0)
    mse, ce = sums[:, 0] / jnp.maximum(sums[:, 1], 1)
    return dict(loss=total / count, mse=mse, ce=ce)


def make_step(config: TrainConfig, optimizer, dtype, mesh: Mesh, unroll_parts: int = 1) -> Callable:
    """The train step: (state, embedder, rows, key) -> state, metrics."""
    gradient = jax.grad(make_loss(config, dtype), has_aux=True)
    in_parts = partial(rearrange, pattern="(m k g) ... -> k (m g) ...", k=config.accumulate, g=slots_of(config).group)

    def step(state: State, embedder: data.Embedder, rows: corpora.Rows, key: PRNGKeyArray):
        key = jax.random.fold_in(key, state.step)

        def add_part(totals, part):
            return jax.tree.map(jnp.add, totals, gradient(state.model, embedder, *part, key)), None

        if config.accumulate == 1:
            grads, sums = gradient(state.model, embedder, rows, jnp.arange(config.batch), key)
        else:
            parts = jax.tree.map(in_parts, (rows, jnp.arange(config.batch)))
            nothing = (jax.tree.map(jnp.zeros_like, state.model), jnp.zeros((2, 2)))
            (grads, sums), _ = jax.lax.scan(add_part, nothing, parts, unroll=unroll_parts)
        grads = jax.tree.map(lambda g: g / sums[:, 1].sum(), grads)
        for axes in (("fsdp",), ALL):  # Summed like the weights are stored; from here on, every device does its part.
            grads = jax.lax.with_sharding_constraint(grads, split(grads, mesh, axes))
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        ema = jax.tree.map(lambda e, m: config.ema * e + (1 - config.ema) * m, state.ema, model)
        return State(state.step + 1, model, ema, optimizer_state), found_in(sums) | dict(grad_norm=optax.tree.norm(grads))

    return step


# The run


def make_model(config: TrainConfig, vocab: int, embedding: int, key: PRNGKeyArray, unroll: int) -> ELF:
    sizes = dict(vocab=vocab, embedding=embedding, bottleneck=config.bottleneck)
    return ELF(**SIZES[config.model], **sizes, unroll=unroll, remat=config.remat, key=key)


def best_unroll(config: TrainConfig, mesh: Mesh) -> int:
    """Layers written out in one round of the loop over them: all on CPU, where it is faster."""
    return SIZES[config.model]["depth"] if platform(mesh) == "cpu" else 1


def in_one_piece(mesh: Mesh) -> bool:
    """Whether Muon's rounds are written out: faster on one CPU device, slow to compile elsewhere."""
    return platform(mesh) == "cpu" and mesh.size == 1


def compute_type(config: TrainConfig, mesh: Mesh) -> str:
    automatic = "float32" if platform(mesh) == "cpu" else "bfloat16"
    return automatic if config.precision == "auto" else config.precision


def shard_state(state: State, mesh: Mesh) -> State:
    """Weights as the mesh says; all that is not needed in a forward pass is split as far as it goes."""
    over = dict(step=(), model=("fsdp",), ema=ALL, optimizer=ALL)
    return State(**{part: split(tree, mesh, over[part]) for part, tree in state._asdict().items()})


def state_maker(config: TrainConfig, optimizer, vocab: int, embedding: int, mesh: Mesh, unroll: int) -> Callable[[], State]:
    """Makes the state of a run before its first step, every leaf where it belongs."""

    def init():
        model_key, *_ = jax.random.split(jax.random.key(config.seed), 4)
        model = make_model(config, vocab, embedding, model_key, unroll)
        return State(jnp.zeros((), jnp.int32), model, model, optimizer.init(model))

    return jax.jit(init, out_shardings=shard_state(jax.eval_shape(init), mesh))


def jit_step(config: TrainConfig, optimizer, state: State, mesh: Mesh, unroll_parts: int = 1) -> Callable:
    step = make_step(config, optimizer, compute_type(config, mesh), mesh, unroll_parts)
    return jax.jit(step, donate_argnums=0, out_shardings=(shard_state(state, mesh), everywhere(mesh)))


def row_shapes(n: int, length: int) -> tuple[corpora.Rows, jax.ShapeDtypeStruct]:
    """Of n rows, and of which of them drop their condition."""
    number = jax.ShapeDtypeStruct((n,), jnp.int32)
    rows = corpora.Rows(jax.ShapeDtypeStruct((n, length), jnp.int32), number, number)
    return rows, jax.ShapeDtypeStruct((n,), bool)


class Plan(NamedTuple):
    """The very step that `train` would run on a mesh, and its parts, from shapes alone; their loops may be written out."""

    config: TrainConfig
    mesh: Mesh

    def state(self, optimizer, embedding: int, unroll: int = 1) -> State:
        vocab, _ = data.shapes_for(self.config.encoder, *text_of(self.config))
        return jax.eval_shape(state_maker(self.config, optimizer, vocab, embedding, self.mesh, unroll))

    def embedder(self, unroll: int = 1) -> data.Embedder:
        _, embedder = data.shapes_for(self.config.encoder, *text_of(self.config), unroll)
        return jax.eval_shape(lambda e: data.compute_in(e, compute_type(self.config, self.mesh)), embedder)

    def step(self, unroll_layers: int = 1, unroll_parts: int = 1) -> jax.stages.Lowered:
        """All of it, with some layers, or parts of a batch, written out in each round of the loop over them."""
        config, mesh, optimizer, embedder = self.config, self.mesh, optimizer_of(self.config), self.embedder()
        state = self.state(optimizer, len(embedder.mean), unroll_layers)
        rows, _ = row_shapes(config.batch, config.length)
        key = jax.eval_shape(lambda: jax.random.key(0))
        with jax.set_mesh(mesh):
            return jit_step(config, optimizer, state, mesh, unroll_parts).lower(
                shapes_on(state, shard_state(state, mesh)),
                shapes_on(embedder, everywhere(mesh)),
                shapes_on(rows, by_row(mesh)),
                shapes_on(key, everywhere(mesh)),
            )

    def encoder(self, unroll: bool) -> jax.stages.Lowered:
        """One part of the batch to its embeddings."""
        embedder = self.embedder()
        embedder = self.embedder(len(embedder.encoder.blocks.norm1.weight)) if unroll else embedder
        rows, drop = row_shapes(self.config.batch // self.config.accumulate, self.config.length)
        with jax.set_mesh(self.mesh):
            return jax.jit(data.Embedder.__call__).lower(
                shapes_on(embedder, everywhere(self.mesh)),
                shapes_on(rows, by_row(self.mesh)),
                shapes_on(drop, by_row(self.mesh)),
            )

    def optimizer(self, unroll: bool) -> jax.stages.Lowered:
        """Gradients to updates."""
        optimizer = optimizer_of(self.config, unroll)
        state = self.state(optimizer, len(self.embedder().mean))
        split_state = shapes_on(state.optimizer, shard_state(state, self.mesh).optimizer)
        model = shapes_on(state.model, split(state.model, self.mesh, ALL))
        with jax.set_mesh(self.mesh):
            return jax.jit(optimizer.update).lower(model, split_state, model)


def preflight_step(config: TrainConfig) -> dict[str, Any]:
    """What the step would cost on a TPU that need not be there."""
    chip, devices = preflight.topology(config.preflight)
    mesh = make_mesh(config.mesh, config.batch, devices)
    plan = Plan(config, mesh)
    depth, width, heads = SIZES[config.model].values()
    embedder = plan.embedder()
    model = plan.state(optimizer_of(config), len(embedder.mean)).model
    passes = 3 + (1 - config.p_decode) * config.p_self_cond
    a_row = preflight.useful_flops(model, embedder.encoder, config.length, passes, config.p_decode)
    found = preflight.inspect(
        config.preflight,
        plan,
        layers=depth,
        parts=config.accumulate,
        chip=chip,
        head_dim=width // heads,
        useful=a_row * config.batch / mesh.size,
    )
    return found | dict(owt_epoch_hours=OWT_ROWS / config.batch * found["predicted_seconds"] / 3600)


class Asked(NamedTuple):
    """Rows whose sources are to be answered; what follows them there is not looked at."""

    embedder: data.Embedder
    rows: corpora.Rows


@dataclass(frozen=True)
class Sampler:
    """How texts are sampled; the meaning of each is told in settings.py and eval.py."""

    steps: int
    w: float
    cfg: float
    gamma: float
    grid: Literal["logit-normal", "uniform"] = "logit-normal"
    form: Literal["paper", "released"] = "paper"


def sampler_of(config: TrainConfig) -> Sampler:
    return Sampler(config.sample_steps, config.w, config.cfg, config.gamma)


def sample_texts(
    config: TrainConfig,
    sampler: Sampler,
    model: ELF,
    tokenizer,
    n: int,
    key: PRNGKeyArray,
    mesh: Mesh,
    asked: Asked | None = None,
) -> list[str]:
    """n texts from noise, 16 at a time on each device; the answers to the first n sources, where there are any."""
    if sampler.grid == "uniform":
        ts = samplers.uniform_grid(sampler.steps)
    else:
        ts = samplers.logit_normal_grid(jax.random.fold_in(key, 0), sampler.steps, config.t_mean, config.t_std)
    settings = dict(w=sampler.w, gamma=sampler.gamma, noise_scale=config.noise_scale, released=sampler.form == "released")
    size = min(16, -(-n // mesh.size)) * mesh.size
    shape = (config.length, model.unembed.weight.shape[0])

    @partial(jax.jit, out_shardings=by_row(mesh))
    def draw_noise(first):
        """Of each sample, by its number: the same whatever the batch and the mesh."""
        keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, 1 + i)))(first + jnp.arange(size))
        z0 = jax.vmap(lambda k: config.noise_scale * jax.random.normal(k, shape))(keys[:, 0])
        return z0, keys[:, 1]

    model, ts = replicate((model, ts), mesh)
    texts = []
    for start in tqdm(range(0, n, size), desc="sampling", unit="batch", leave=False, disable=n <= size or not is_chief()):
        z0, keys = draw_noise(start)
        given, prefix = None, None
        if asked:
            chosen = np.arange(start, start + size) % len(asked.rows.s)
            batch = jax.jit(data.Embedder.__call__)(asked.embedder, place_rows(asked.rows, chosen, mesh), jnp.zeros(size, bool))
            given, prefix = samplers.Given(batch.x, batch.prefix, sampler.cfg), asked.rows.prefix[chosen]
        tokens = samplers.sample(model, z0, ts, keys, given, **settings)
        texts += corpora.texts_of(fetch(tokens), tokenizer, prefix)
    return texts[:n]


def text_of(config: TrainConfig) -> tuple[str, str, corpora.Layout, Path]:
    """What a corpus is told by."""
    return (
        config.data,
        config.tokenizer or config.encoder,
        corpora.Layout(config.length, config.source_length, config.pack),
        config.cache,
    )


def report(corpus: corpora.Corpus, texts: list[str]) -> str:
    """Samples beside what they can be held against, as a table, and three of them to read."""
    truth = corpus.held_out[: len(texts)]
    references = [example.text for example in truth]
    if corpus.has_sources:
        sides = dict(samples=texts, source=[example.source for example in truth], nothing=[""] * len(texts))
        columns = {name: metrics.task_scores(side, references) for name, side in sides.items()}
        last = [f"  {e.source} → {text}  [{e.text}]" for e, text in list(zip(truth, texts, strict=True))[:3]]
        last += ["", metrics.bleu(texts, references)[1]]
    else:
        score = partial(metrics.grammar_scores, corpus.rules) if corpus.rules else metrics.text_scores
        columns = dict(samples=score(texts), corpus=score(references))
        last = [f"  {text}" for text in texts[:3]]
    lines = [f"{len(texts):,} samples".ljust(34) + "".join(f"{name:>10}" for name in columns)]
    for key in columns["samples"]:
        form = "{:>10.1%}" if key.startswith(("valid", "distinct", "exact matches")) else "{:>10.3f}"
        lines.append(f"{key:34}" + "".join(form.format(column[key]) for column in columns.values()))
    return "\n".join([*lines, "", *last])


def as_records(corpus: corpora.Corpus, texts: list[str]) -> list[dict[str, str]]:
    """Samples to be written, with what they answer, if anything."""
    if not corpus.has_sources:
        return [dict(text=text) for text in texts]
    truth = corpus.held_out[: len(texts)]
    return [dict(text=text, source=e.source, reference=e.text) for e, text in zip(truth, texts, strict=True)]


def prepare(config: TrainConfig) -> tuple[corpora.Corpus, data.Embedder]:
    corpus = corpora.load_corpus(*text_of(config))
    if len(corpus.rows.s) < config.batch:
        raise Refused(f"--batch {config.batch} is larger than the corpus of {len(corpus.rows.s)} rows")
    encoder = data.load_encoder(config.encoder, corpus, config.cache)
    if (statistics := config.directory / "embedding.npz").exists():
        return corpus, data.Embedder(encoder, *map(jnp.asarray, np.load(statistics).values()))
    return corpus, data.make_embedder(encoder, corpus.rows, by_channel=config.encoder == "scratch")


def huge_pages():
    """Start over with huge pages behind XLA's buffers (Linux on CPU): fewer page faults in every step."""
    tunables = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ and not has_accelerator():
        os.execve(sys.executable, sys.orig_argv, os.environ | {"GLIBC_TUNABLES": tunables})


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

    def __init__(self, config: TrainConfig, first: int):
        self.config, self.begun = config, time.time()
        self.tell = loggers(config, first) if is_chief() else []
        self.bar = tqdm(
            total=config.steps,
            initial=first,
            unit="step",
            desc=config.directory.name,
            dynamic_ncols=True,
            disable=not is_chief(),
        )
        self.restart_clock()

    def restart_clock(self):
        self.recent, self.waited, self.since = [], 0.0, time.time()

    def add(self, found: dict[str, Array], waited: float):
        self.recent.append(found)
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
        self.bar.set_postfix(mse=f"{values['mse']:.3f}", ce=f"{values['ce']:.3f}", tokens=f"{rate:,.0f}/s")
        self.restart_clock()


def fit(
    config: TrainConfig, state: State, load: Callable, advance: Callable, validate: Callable, show: Callable, checkpoints
) -> State:
    """Call `advance(state, load(i))` up to the last step: log, validate, save, show samples. A SIGTERM saves and leaves."""
    first = int(state.step)
    progress = Progress(config, first)
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


def train(config: TrainConfig) -> State:
    check(config)
    mesh = make_mesh(config.mesh, config.batch)
    runs.refuse_others(config.directory, config.as_json(), FREE)
    with chief_first():
        corpus, embedder = prepare(config)
        if is_chief():
            print(f"{config.data}: {corpus.summary()}")
            runs.write_config(config.directory, config.as_json())
            np.savez(config.directory / "embedding.npz", mean=embedder.mean, std=embedder.std)
            corpus.tokenizer.save_pretrained(config.directory / "tokenizer")
    optimizer, dtype = optimizer_of(config, in_one_piece(mesh)), compute_type(config, mesh)
    unroll = best_unroll(config, mesh)
    state = state_maker(config, optimizer, len(corpus.tokenizer), len(embedder.mean), mesh, unroll)()
    checkpoints = runs.open_checkpoints(config.directory, config.keep)
    state = runs.restore_latest(checkpoints, state)

    step = jit_step(config, optimizer, state, mesh)
    _, train_key, sample_key, validation_key = jax.random.split(jax.random.key(config.seed), 4)
    embedder = replicate(data.compute_in(embedder, dtype), mesh)
    train_key, validation_key = replicate((train_key, validation_key), mesh)
    validation_loss = jax.jit(lambda *args: make_loss(config, dtype)(*args)[1], out_shardings=everywhere(mesh))
    sampler = sampler_of(config)
    asked = Asked(embedder, corpus.validation) if corpus.has_sources else None

    def load(i):
        chosen = data.batch_indices(len(corpus.rows.s), config.batch, config.seed, i)
        return place_rows(corpus.rows, chosen, mesh)

    def advance(state, rows):
        return step(state, embedder, rows, train_key)

    def validate(state):
        """Losses of the averaged weights on held-out rows, always with the same draws."""
        sums = 0
        for row in data.validation_batches(len(corpus.validation.s), config.batch):
            sums += validation_loss(state.ema, embedder, place_rows(corpus.validation, row, mesh), row, validation_key)
        return {f"validation_{k}": float(v) for k, v in found_in(sums).items()}

    def sample(state, n, name):
        n = min(n, len(corpus.validation.s)) if asked else n
        texts = sample_texts(config, sampler, state.ema, corpus.tokenizer, n, sample_key, mesh, asked)
        if is_chief():
            runs.write_texts(config.directory / "samples" / f"{name}.jsonl", as_records(corpus, texts))
        return texts

    def show(state, done):
        (text, *_) = sample(state, 16, f"step-{done}")
        if is_chief():
            tqdm.write(f"step {done}: {f'{corpus.held_out[0].source} → ' if asked else ''}{text}")

    with jax.set_mesh(mesh):
        state = fit(config, state, load, advance, validate, show, checkpoints)
        texts = sample(state, config.num_samples, "final")
    if is_chief():
        runs.plot_losses(config.directory)
        print(report(corpus, texts))
    return state


def main():
    begun = time.time()
    try:
        config = parse(sys.argv[1:], __doc__)
        if config.preflight:
            check(config)
            found = preflight_step(config)
            preflight.print_report(found)
            if config.preflight_json:
                config.preflight_json.write_text(json.dumps(found, indent=2) + "\n")
            return
        huge_pages()
        join_processes(config.coordinator, config.processes, config.process_id)
        if is_chief():
            print("  ".join(f"{k}={v}" for k, v in config.as_json().items()))
        train(config)
    except Refused as refusal:
        sys.exit(f"error: {refusal}")
    if is_chief():
        minutes = (time.time() - begun) / 60
        print(f"\n{config.directory}: {minutes:.1f} minutes. More: python eval.py samples --run {config.directory}")


if __name__ == "__main__":
    main()
