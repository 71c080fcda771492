"""Train ELF.

    python train.py                              the embedded stories on this machine, in minutes
    python train.py --model elf-b --mesh 64      the paper's Table 7: OpenWebText on 64 chips

A choice of model and data brings the paper's settings as defaults; every one of them is a flag. The same command continues an
interrupted run.
"""

import argparse
import dataclasses
import importlib.util
import os
import signal
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
import tyro
from einops import rearrange
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, PRNGKeyArray
from tqdm import tqdm

import data
import losses
import metrics
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
    replicate,
    split,
)
from optimizers import make_optimizer, warmed_up


@dataclass(frozen=True)
class TrainConfig:
    model: str
    """Size of the network: elf-b, elf-m, elf-l, or a desk size for CPU (desk, tiny)."""
    data: str
    """What to train on: stories (embedded) or owt."""
    name: str = ""
    """Name of the run, which lives in <runs>/<name>; by default data-model."""
    runs: Path = Path("runs")
    """Directory of all runs."""
    cache: Path = Path("cache")
    """Directory of prepared data and encoders, shared by all runs."""

    encoder: str = "t5-small"
    """Frozen encoder of the clean embeddings; scratch trains a small T5 on the corpus first."""
    length: int = 1024
    """Tokens per row."""
    bottleneck: int = 128
    """Width of the bottleneck between embeddings and network."""

    steps: int = 5 * 19_017
    """Optimizer steps."""
    batch: int = 512
    """Rows per step, over all devices."""
    accumulate: int = 1
    """Parts a batch is worked through in, one after the other, to save memory."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Muon for matrices and Adam for the rest, or AdamW (0.9, 0.95) for all."""
    learning_rate: float = 0.002
    """Peak learning rate; the paper's AdamW runs use 1e-4."""
    warmup_steps: int = 9_508
    """Steps of linear warm-up from zero: half an epoch of OpenWebText."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    clip: float = 1.0
    """Largest global norm of a gradient."""
    ema: float = 0.9999
    """Decay of the averaged weights, which are the ones sampled from."""

    t_mean: float = -1.5
    """Mean of the logit-normal time of a denoised row, and of the sampling grid."""
    t_std: float = 0.8
    """Standard deviation of the same."""
    noise_scale: float = 2.0
    """Scale of the noise that denoised rows start from."""
    p_mean: float = 0.8
    """Mean of the logit-normal corruption level of a token in decoded rows."""
    p_std: float = 0.8
    """Standard deviation of the same."""
    decode_noise_scale: float = 5.0
    """Scale of the noise in decoded rows; the paper uses 5 on OpenWebText and 1 on conditional tasks."""
    p_decode: float = 0.2
    """Share of rows that train the decoder (cross-entropy) rather than the denoiser (velocity error)."""
    p_self_cond: float = 0.5
    """Share of denoised rows that see their own first prediction."""
    w_min: float = 0.5
    """Smallest guidance scale trained on."""
    w_max: float = 5.0
    """Largest guidance scale trained on."""
    p_drop: float = 0.1
    """Share of rows that lose their condition, where the data has one."""

    sample_steps: int = 64
    """Steps of the sampler behind the samples shown."""
    w: float = 1.0
    """Guidance scale of these samples."""
    gamma: float = 1.0
    """Noise re-injected by their sampler; 0 is the ODE."""
    num_samples: int = 1000
    """Texts sampled and scored at the end."""

    mesh: str = "1"
    """Devices: 64 is 64 data shards, 16x4 is 16 data shards with the weights of each split over 4."""
    coordinator: str = ""
    """Address (host:port) of process 0, where JAX cannot find the processes of a run by itself."""
    processes: int = 1
    """Number of processes, if a coordinator is given."""
    process_id: int = 0
    """Which of them this is."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; auto is bfloat16 on TPU and GPU and float32 on CPU. State is always float32."""
    remat: bool = False
    """Recompute activations in the backward pass to save memory."""
    seed: int = 0
    """All randomness of the run follows from it."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    sample_every: int = 5_000
    """Steps between samples shown while training; 0 for none."""
    save_every: int = 1_000
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept."""
    wandb: str = ""
    """Weights & Biases project to log to (pip install wandb)."""
    tensorboard: bool = False
    """Also log for TensorBoard (pip install tensorboardX)."""

    @property
    def directory(self) -> Path:
        return self.runs / (self.name or f"{self.data}-{self.model}")

    def as_json(self) -> dict[str, Any]:
        return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self).items()}


def config_from(values: dict[str, Any]) -> TrainConfig:
    """The configuration that `as_json` wrote."""
    paths = {f.name for f in dataclasses.fields(TrainConfig) if f.type is Path}
    return TrainConfig(**{k: Path(v) if k in paths else v for k, v in values.items()})


# Fields that may change when a run is continued: they do not change what is computed.
FREE = {"name", "runs", "cache", "mesh", "coordinator", "processes", "process_id", "remat", "num_samples", "sample_steps"}
FREE |= {"w", "gamma", "log_every", "sample_every", "save_every", "keep", "wandb", "tensorboard"}

OWT_EPOCHS = {"elf-b": 5, "elf-m": 4, "elf-l": 3}
PRESETS = {
    "owt": TrainConfig(model="elf-b", data="owt"),
    "stories": TrainConfig(
        model="desk",
        data="stories",
        encoder="scratch",
        length=32,
        steps=2_600,
        batch=32,
        learning_rate=0.01,
        warmup_steps=100,
        schedule="cosine",
        ema=0.995,
        noise_scale=1.0,
        decode_noise_scale=1.0,
        num_samples=512,
        log_every=20,
        sample_every=400,
        save_every=400,
    ),
}


def preset(model: str | None, corpus: str | None) -> TrainConfig:
    """The settings that a choice of model and data stands for. A paper size alone means the paper's OpenWebText run."""
    corpus = corpus or ("owt" if model in OWT_EPOCHS else "stories")
    if corpus not in PRESETS:
        raise Refused(f"--data {corpus}: unknown; known are {', '.join(PRESETS)}")
    chosen = PRESETS[corpus]
    model = model or chosen.model
    if model not in SIZES:
        raise Refused(f"--model {model}: unknown; known are {', '.join(SIZES)}")
    steps = OWT_EPOCHS.get(model, 5) * 19_017 if corpus == "owt" else chosen.steps
    return dataclasses.replace(chosen, model=model, steps=steps)


def parse(args: list[str]) -> TrainConfig:
    """Flags over the preset that --model and --data name; --help shows the defaults of that preset."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--model")
    first.add_argument("--data")
    chosen, _ = first.parse_known_args(args)
    return tyro.cli(TrainConfig, default=preset(chosen.model, chosen.data), description=__doc__, args=args)


def check(config: TrainConfig):
    """Refuse what cannot work before anything is written."""
    for field in (
        "steps",
        "batch",
        "accumulate",
        "length",
        "bottleneck",
        "log_every",
        "save_every",
        "keep",
        "num_samples",
        "sample_steps",
    ):
        if getattr(config, field) < 1:
            raise Refused(f"--{field.replace('_', '-')} {getattr(config, field)}: must be at least 1")
    for field in ("p_decode", "p_self_cond", "p_drop", "ema"):
        if not 0 <= getattr(config, field) <= 1:
            raise Refused(f"--{field.replace('_', '-')} {getattr(config, field)}: must be between 0 and 1")
    if not 0 < config.w_min <= config.w_max:
        raise Refused(f"--w-min {config.w_min} --w-max {config.w_max}: guidance scales must be positive, the smaller first")
    if config.batch % config.accumulate:
        raise Refused(f"--accumulate {config.accumulate} does not divide --batch {config.batch}")
    if config.warmup_steps >= config.steps:
        raise Refused(f"--warmup-steps {config.warmup_steps} leaves nothing of --steps {config.steps}: lower it")
    for flag, package in ((config.wandb, "wandb"), (config.tensorboard, "tensorboardX")):
        if flag and importlib.util.find_spec(package) is None:
            raise Refused(f"logging to {package} was asked for and it is not installed: pip install {package}")


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


def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    rate = warmed_up(config.learning_rate, config.warmup_steps, config.steps, config.schedule)
    return make_optimizer(config.optimizer, rate, config.clip)


def make_step(config: TrainConfig, optimizer, dtype, mesh: Mesh) -> Callable:
    """The train step: (state, embedder, rows, key) -> state, metrics."""
    slots = losses.make_slots(config.batch // config.accumulate, config.p_decode, config.p_self_cond)
    scales = dict(noise_scale=config.noise_scale, decode_noise_scale=config.decode_noise_scale)

    def part_loss(model, batch: losses.Batch, draws: losses.Draws):
        per_token = losses.token_losses(cast(model, dtype), batch, draws, slots, **scales)
        sums = losses.branch_sums(per_token, batch, draws)
        return sums[:, 0].sum(), sums

    def add_part(model, embedder, key, totals, part):
        rows, row = part
        draws, drop = draw(config, key, row, *rows.s.shape[1:], len(embedder.mean), slots.group)
        grads, sums = jax.grad(part_loss, has_aux=True)(model, embedder(rows, drop), draws)
        return jax.tree.map(jnp.add, totals, (grads, sums)), None

    def step(state: State, embedder: data.Embedder, rows: data.Rows, key: PRNGKeyArray):
        key = jax.random.fold_in(key, state.step)
        in_parts = partial(rearrange, pattern="(m k g) ... -> k (m g) ...", k=config.accumulate, g=slots.group)
        parts = jax.tree.map(in_parts, (rows, jnp.arange(config.batch)))
        totals = (jax.tree.map(jnp.zeros_like, state.model), jnp.zeros((2, 2)))
        (grads, sums), _ = jax.lax.scan(partial(add_part, state.model, embedder, key), totals, parts)
        total, count = sums.sum(0)
        grads = jax.tree.map(lambda g: g / count, grads)
        grads = jax.lax.with_sharding_constraint(grads, split(grads, mesh, ALL))  # From here on, every device does its part.
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        ema = jax.tree.map(lambda e, m: config.ema * e + (1 - config.ema) * m, state.ema, model)
        mse, ce = sums[:, 0] / jnp.maximum(sums[:, 1], 1)
        found = dict(loss=total / count, mse=mse, ce=ce, grad_norm=optax.tree.norm(grads))
        return State(state.step + 1, model, ema, optimizer_state), found

    return step


# The run


def make_model(config: TrainConfig, vocab: int, embedding: int, key: PRNGKeyArray) -> ELF:
    sizes = dict(vocab=vocab, embedding=embedding, bottleneck=config.bottleneck)
    on_cpu = jax.default_backend() == "cpu"
    return ELF(**SIZES[config.model], **sizes, unroll=on_cpu, remat=config.remat, key=key)


def shard_state(state: State, mesh: Mesh) -> State:
    """Weights as the mesh says; all that is not needed in a forward pass is split as far as it goes."""
    over = dict(step=(), model=("fsdp",), ema=ALL, optimizer=ALL)
    return State(**{part: split(tree, mesh, over[part]) for part, tree in state._asdict().items()})


def init_state(config: TrainConfig, optimizer, vocab: int, embedding: int, mesh: Mesh) -> State:
    def init():
        model_key, _, _ = jax.random.split(jax.random.key(config.seed), 3)
        model = make_model(config, vocab, embedding, model_key)
        return State(jnp.zeros((), jnp.int32), model, model, optimizer.init(model))

    return jax.jit(init, out_shardings=shard_state(jax.eval_shape(init), mesh))()


@dataclass(frozen=True)
class Sampler:
    steps: int = 64
    """Steps from noise to data."""
    w: float = 1.0
    """Self-conditioning guidance scale."""
    gamma: float = 1.0
    """Noise re-injected at every step; 0 is the ODE."""
    grid: Literal["logit-normal", "uniform"] = "logit-normal"
    """Times of the steps."""
    form: Literal["paper", "released"] = "paper"
    """Whose SDE step: the paper's Alg. 6 or the released code's."""


def sample_texts(
    config: TrainConfig, sampler: Sampler, model: ELF, tokenizer, n: int, key: PRNGKeyArray, mesh: Mesh
) -> list[str]:
    """n texts from noise, in parts of 64 or one a device."""
    if sampler.grid == "uniform":
        ts = samplers.uniform_grid(sampler.steps)
    else:
        ts = samplers.logit_normal_grid(jax.random.fold_in(key, 0), sampler.steps, config.t_mean, config.t_std)
    settings = dict(w=sampler.w, gamma=sampler.gamma, noise_scale=config.noise_scale, released=sampler.form == "released")
    size = -(-min(n, max(64, mesh.size)) // mesh.size) * mesh.size
    shape = (size, config.length, model.unembed.weight.shape[0])
    noise = jax.jit(lambda key: config.noise_scale * jax.random.normal(key, shape), out_shardings=by_row(mesh))
    model, ts = replicate((model, ts), mesh)
    texts = []
    for start in tqdm(range(0, n, size), desc="sampling", unit="batch", leave=False, disable=n <= size or not is_chief()):
        z_key, sde_key = replicate(jax.random.split(jax.random.fold_in(key, 1 + start)), mesh)
        tokens = samplers.sample(model, noise(z_key), ts, sde_key, **settings)
        texts += data.texts_of(fetch(tokens), tokenizer)
    return texts[:n]


def report(corpus: data.Corpus, texts: list[str]) -> str:
    """Samples beside held-out texts of the corpus, as a table, and three of them to read."""
    ours, truth = (metrics.grammar_scores(corpus.rules, t) for t in (texts, corpus.held_out[: len(texts)]))
    lines = [f"{len(texts)} samples{'':24}{'samples':>10}{'corpus':>10}"]
    for key in ours:
        form = "{:>10.3f}" if truth[key] > 1 else "{:>10.1%}"
        lines.append(f"{key:34}" + form.format(ours[key]) + form.format(truth[key]))
    return "\n".join([*lines, "", *(f"  {text}" for text in texts[:3])])


def prepare(config: TrainConfig) -> tuple[data.Corpus, data.Embedder]:
    corpus = data.load_corpus(config.data, config.length)
    if len(corpus.rows.s) < config.batch:
        raise Refused(f"--batch {config.batch} is larger than the corpus of {len(corpus.rows.s)} rows")
    encoder = data.load_encoder(config.encoder, corpus, config.cache)
    return corpus, data.make_embedder(encoder, corpus.rows)


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


def fit(config: TrainConfig, state: State, load: Callable, advance: Callable, show: Callable, checkpoints) -> State:
    """Call `advance(state, load(i))` up to the last step: log, show samples, save. A SIGTERM saves and leaves."""
    stop: list[int] = []
    alone = jax.process_count() == 1
    if alone:
        before = signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    first = int(state.step)
    tell = loggers(config, first) if is_chief() else []
    recent, waited, since, begun = [], 0.0, time.time(), time.time()
    rows_ahead = data.prefetched(load, first, config.steps)
    bar = tqdm(
        total=config.steps,
        initial=first,
        unit="step",
        desc=config.directory.name,
        dynamic_ncols=True,
        disable=not is_chief(),
    )
    for done in range(first + 1, config.steps + 1):
        asked = time.time()
        rows = next(rows_ahead)
        waited += time.time() - asked
        state, found = advance(state, rows)
        recent.append(found)
        bar.update()
        last = done == config.steps
        stopping = bool(stop) if alone else multihost_utils.reached_preemption_sync_point(done)
        saves = done % config.save_every == 0 or last or stopping
        if done % config.log_every == 0 or saves:
            values = {k: float(np.mean([each[k] for each in recent])) for k in found}
            if not np.isfinite(values["loss"]):
                raise Refused(f"the loss became {values['loss']} by step {done}: lower --learning-rate, under another --name")
            taken = time.time() - since
            rate = len(recent) * config.batch * config.length / taken
            for each in tell:
                each(step=done, **values, tokens_per_second=rate, waiting=waited / taken, seconds=time.time() - begun)
            bar.set_postfix(mse=f"{values['mse']:.3f}", ce=f"{values['ce']:.3f}", tokens=f"{rate:,.0f}/s")
            recent, waited, since = [], 0.0, time.time()
        if saves:  # after the check above: a broken state is never saved
            runs.save(checkpoints, done, state)
        if config.sample_every and done % config.sample_every == 0 and not last:
            shown = show(state, done)
            if is_chief():
                tqdm.write(shown)
            since = time.time()
        if stopping:
            bar.close()
            checkpoints.wait_until_finished()
            if is_chief():
                print(f"stopped at step {done} and saved; the same command continues")
            sys.exit(0)
    bar.close()
    checkpoints.wait_until_finished()
    if alone:
        signal.signal(signal.SIGTERM, before)
    return state


def train(config: TrainConfig) -> State:
    check(config)
    mesh = make_mesh(config.mesh, config.batch)
    runs.refuse_others(config.directory, config.as_json(), FREE)
    with chief_first():
        corpus, embedder = prepare(config)
        if is_chief():
            runs.write_config(config.directory, config.as_json())
            np.savez(config.directory / "embedding.npz", mean=embedder.mean, std=embedder.std)
            corpus.tokenizer.save_pretrained(config.directory / "tokenizer")
    optimizer = optimizer_of(config)
    state = init_state(config, optimizer, len(corpus.tokenizer), len(embedder.mean), mesh)
    checkpoints = runs.open_checkpoints(config.directory, config.keep)
    state = runs.restore_latest(checkpoints, state)

    on_cpu = jax.default_backend() == "cpu"
    dtype = ("float32" if on_cpu else "bfloat16") if config.precision == "auto" else config.precision
    step = jax.jit(
        make_step(config, optimizer, dtype, mesh), donate_argnums=0, out_shardings=(shard_state(state, mesh), everywhere(mesh))
    )
    _, train_key, sample_key = jax.random.split(jax.random.key(config.seed), 3)
    embedder, train_key = replicate((embedder, train_key), mesh)
    sampler = Sampler(config.sample_steps, config.w, config.gamma)

    def load(i):
        chosen = data.batch_indices(len(corpus.rows.s), config.batch, config.seed, i)
        return place_rows(corpus.rows, chosen, mesh)

    def advance(state, rows):
        return step(state, embedder, rows, train_key)

    def sample(state, n, name):
        texts = sample_texts(config, sampler, state.ema, corpus.tokenizer, n, sample_key, mesh)
        if is_chief():
            runs.write_texts(config.directory / "samples" / f"{name}.jsonl", texts)
        return texts

    def show(state, done):
        return f"step {done}: {sample(state, 16, f'step-{done}')[0]}"

    with jax.set_mesh(mesh):
        state = fit(config, state, load, advance, show, checkpoints)
        texts = sample(state, config.num_samples, "final")
    if is_chief():
        runs.plot_losses(config.directory)
        print(report(corpus, texts))
    return state


def main():
    begun = time.time()
    try:
        config = parse(sys.argv[1:])
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
