"""Train ELF.

    python train.py                              the embedded stories on this machine, in minutes
    python train.py --model elf-b --mesh 64      the paper's Table 7: OpenWebText on 64 chips

A choice of model and data brings the paper's settings as defaults; every one of them is a flag. The same command continues an
interrupted run.
"""

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from tqdm import tqdm

import ablations
import corpora
import data
import generate
import judges
import losses
import preflight
import pretrained
import runs
import scratch
from elf import ELF, SIZES
from errors import Refused, one_line
from loop import fit
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
)
from optimizers import make_optimizer, warmed_up
from pretrained import T5Encoder
from settings import FREE, LEARNED_WITH_SOURCES, OWT_ROWS, TrainConfig, check, parse

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
        t = losses.TIMES[config.times](jax.random.normal(k[0]), config.t_mean, config.t_std)
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
    optimizer = make_optimizer(config.optimizer, rate, config.clip, unroll=unroll)
    return optax.chain(optimizer, ablations.unit_table()) if config.embeddings == "learned" else optimizer


def slots_of(config: TrainConfig) -> losses.Slots:
    return losses.make_slots(config.batch // config.accumulate, config.p_decode, config.p_self_cond)


def make_loss(config: TrainConfig, dtype) -> Callable:
    """(model, embedder, rows, their numbers, key) -> summed loss, and its sum and count in each branch."""
    slots = slots_of(config)
    scales = dict(noise_scale=config.noise_scale, decode_noise_scale=config.decode_noise_scale)

    def loss(model: ELF, embedder: data.Embedder, rows: corpora.Rows, row: Int[Array, " N"], key: PRNGKeyArray):
        draws, drop = draw(config, key, row, rows.s.shape[1], len(embedder.mean), slots.group)
        batch = embedder(rows, drop)
        if config.embeddings == "learned":
            batch = ablations.embed_learned(model, batch, draws.decode)
        per_token = losses.token_losses(cast(model, dtype), batch, draws, slots, **scales)
        sums = losses.branch_sums(per_token, batch, draws)
        return sums[:, 0].sum(), sums

    return loss


def found_in(sums: Float[Array, "2 2"]) -> dict[str, Float[Array, ""]]:
    """What is told of the losses: per token, over all, and in each branch."""
    total, count = sums.sum(0)
    mse, ce = sums[:, 0] / jnp.maximum(sums[:, 1], 1)
    return dict(loss=total / count, mse=mse, ce=ce)


class Objective(NamedTuple):
    """What a network is to learn."""

    loss: Callable
    """(model, frozen, rows, their numbers, key) -> summed loss, and its sum and count in each branch."""
    frozen: Any
    """Networks that the loss needs and that do not change."""
    make: Callable[[PRNGKeyArray], Any]
    """The network before its first step,"""
    start: Any = None
    """or weights that it starts from."""
    label: str = ""
    """On the progress bar, before the name of the run."""


MakeObjective = Callable[[TrainConfig, data.Embedder, Any, Callable[[PRNGKeyArray], ELF]], Objective]  # of the compute type too


def flow_matching(config: TrainConfig, embedder: data.Embedder, dtype, make: Callable[[PRNGKeyArray], ELF]) -> Objective:
    """The paper's training (Alg. 3 and 4)."""
    return Objective(make_loss(config, dtype), embedder, make)


def reconstruction(config: TrainConfig, embedder: data.Embedder, dtype, _) -> Objective:
    """The training of a separate decoder."""
    shape = pretrained.t5_config(embedder.encoder)

    def loss(decoder: ablations.Decoder, embedder: data.Embedder, rows: corpora.Rows, row: Int[Array, " N"], key: PRNGKeyArray):
        batch = embedder(rows, jnp.zeros(len(row), bool))
        ce = ablations.reconstruction_loss(cast(decoder, dtype), batch, row, key, config.decode_noise_scale)
        ces = jnp.stack([jnp.sum(ce * batch.counts), jnp.sum(batch.counts)])
        return ces[0], jnp.stack([jnp.zeros(2), ces])

    return Objective(loss, embedder, lambda key: ablations.Decoder(pretrained.t5_from_config(shape, key)))


def span_corruption(config: TrainConfig, tokenizer, dtype) -> Objective:
    """The training of an encoder from scratch."""
    recipe = scratch.recipe_of(config.encoder, len(tokenizer))
    loss = scratch.make_loss(recipe, scratch.sentinels_of(tokenizer), tokenizer.eos_token_id, partial(cast, dtype=dtype))
    return Objective(loss, (), lambda key: scratch.T5(recipe.shape, embed_std=recipe.embed_std, key=key))


def make_step(config: TrainConfig, optimizer, loss: Callable, mesh: Mesh, unroll_parts: int = 1) -> Callable:
    """The train step: (state, frozen networks, rows, key) -> state, metrics."""
    gradient = jax.grad(loss, has_aux=True)
    in_parts = partial(rearrange, pattern="(m k g) ... -> k (m g) ...", k=config.accumulate, g=slots_of(config).group)

    def step(state: State, frozen, rows: corpora.Rows, key: PRNGKeyArray):
        key = jax.random.fold_in(key, state.step)

        def add_part(totals, part):
            return jax.tree.map(jnp.add, totals, gradient(state.model, frozen, *part, key)), None

        if config.accumulate == 1:
            grads, sums = gradient(state.model, frozen, rows, jnp.arange(config.batch), key)
        else:
            parts = jax.tree.map(in_parts, (rows, jnp.arange(config.batch)))
            nothing = (jax.tree.map(jnp.zeros_like, state.model), jnp.zeros((2, 2)))
            (grads, sums), _ = jax.lax.scan(add_part, nothing, parts, unroll=unroll_parts)
        grads = jax.tree.map(lambda g: g / sums[:, 1].sum(), grads)
        grads = jax.lax.with_sharding_constraint(grads, split(grads, mesh, ALL))  # From here on, every device does its part.
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        ema = jax.tree.map(lambda e, m: config.ema_decay * e + (1 - config.ema_decay) * m, state.ema, model)
        return State(state.step + 1, model, ema, optimizer_state), found_in(sums) | dict(grad_norm=optax.tree.norm(grads))

    return step


# The run


def make_model(config: TrainConfig, vocab: int, embedding: int, key: PRNGKeyArray, unroll: int = 1) -> ELF:
    sizes = dict(vocab=vocab, embedding=embedding, bottleneck=config.bottleneck)
    kind = ablations.AdaLNZero if config.conditioning == "adaln-zero" else ELF
    model = kind(**SIZES[config.model], **sizes, prediction=config.prediction, unroll=unroll, remat=config.remat, key=key)
    return ablations.with_unit_table(model) if config.embeddings == "learned" else model


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


def state_maker(
    config: TrainConfig, optimizer, make: Callable[[PRNGKeyArray], Any], mesh: Mesh, start=None
) -> Callable[[], State]:
    """Makes the state of a run before its first step, every leaf where it belongs."""

    def init(start):
        model_key, *_ = jax.random.split(jax.random.key(config.seed), 3)
        model = make(model_key) if start is None else start
        return State(jnp.zeros((), jnp.int32), model, model, optimizer.init(model))

    return partial(jax.jit(init, out_shardings=shard_state(jax.eval_shape(init, start), mesh)), start)


def jit_step(config: TrainConfig, optimizer, loss: Callable, state: State, mesh: Mesh, unroll_parts: int = 1) -> Callable:
    step = make_step(config, optimizer, loss, mesh, unroll_parts)
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
    objective: MakeObjective = flow_matching
    repeated: tuple[tuple[int, Callable[[], jax.stages.Lowered]], ...] = ()
    """How often what else is repeated in a step, besides the once that it is counted in it; with its loops written out."""

    def make(self, unroll: int = 1) -> Callable[[PRNGKeyArray], ELF]:
        vocab, embedder = data.shapes_for(self.config.encoder, *text_of(self.config))
        return partial(make_model, self.config, vocab, len(embedder.mean), unroll=unroll)

    def state(self, optimizer, unroll: int = 1) -> State:
        return jax.eval_shape(state_maker(self.config, optimizer, self.make(unroll), self.mesh))

    def embedder(self, unroll: int = 1) -> data.Embedder:
        _, embedder = data.shapes_for(self.config.encoder, *text_of(self.config), unroll)
        return jax.eval_shape(lambda e: data.compute_in(e, compute_type(self.config, self.mesh)), embedder)

    def step(self, unroll_layers: int = 1, unroll_parts: int = 1) -> jax.stages.Lowered:
        """All of it, with some layers, or parts of a batch, written out in each round of the loop over them."""
        config, mesh, optimizer, embedder = self.config, self.mesh, optimizer_of(self.config), self.embedder()
        state = self.state(optimizer, unroll_layers)
        goal = self.objective(config, embedder, compute_type(config, mesh), self.make(unroll_layers))
        rows, _ = row_shapes(config.batch, config.length)
        key = jax.eval_shape(lambda: jax.random.key(0))
        with jax.set_mesh(mesh):
            return jit_step(config, optimizer, goal.loss, state, mesh, unroll_parts).lower(
                shapes_on(state, shard_state(state, mesh)),
                shapes_on(goal.frozen, everywhere(mesh)),
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
        state = self.state(optimizer)
        split_state = shapes_on(state.optimizer, shard_state(state, self.mesh).optimizer)
        model = shapes_on(state.model, split(state.model, self.mesh, ALL))
        with jax.set_mesh(self.mesh):
            return jax.jit(optimizer.update).lower(model, split_state, model)


def preflight_step(config: TrainConfig, plan_of: Callable[[TrainConfig, Mesh], Plan] = Plan, more_passes: float = 0) -> dict:
    """What the step would cost on a TPU that need not be there; `more_passes` of the network are the objective's own."""
    chip, devices = preflight.topology(config.preflight)
    mesh = make_mesh(config.mesh, config.batch, devices)
    plan = plan_of(config, mesh)
    depth, width, heads = SIZES[config.model].values()
    embedder = plan.embedder()
    model = plan.state(optimizer_of(config)).model
    passes = 3 + (1 - config.p_decode) * (config.p_self_cond + more_passes)
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


def text_of(config: TrainConfig) -> tuple[str, str, corpora.Layout, Path]:
    """What a corpus is told by."""
    return (
        config.data_dir or config.data,
        config.tokenizer or config.encoder,
        corpora.Layout(config.length, config.source_length, config.pack),
        config.cache,
    )


def load_corpus(config: TrainConfig) -> corpora.Corpus:
    corpus = corpora.load_corpus(*text_of(config))
    if len(corpus.rows.s) < config.batch:
        raise Refused(f"--batch {config.batch} is larger than the corpus of {len(corpus.rows.s)} rows: lower it")
    return corpus


def load_embedder(config: TrainConfig, corpus: corpora.Corpus) -> data.Embedder:
    encoder = load_encoder(config, corpus, config.directory)
    if (config.directory / data.EMBEDDING).exists():
        return data.read_embedder(encoder, config.directory, corpus)
    return data.make_embedder(encoder, corpus.rows, by_channel=trained_here(config))


def trained_here(config: TrainConfig) -> bool:
    """Whether embeddings come from an encoder that was trained on the corpus itself."""
    return corpora.is_scratch(config.encoder) and config.embeddings == "encoder"


TABLE = "table.npy"  # in the directory of a run: its embeddings, where they are of a table; if ELF learns it, only their shape


def load_encoder(config: TrainConfig, corpus: corpora.Corpus, run: Path) -> T5Encoder | ablations.Table:
    """The frozen encoder, or the table in its place; a learned one is of the network, and only as large as this."""
    if (run / TABLE).exists():
        return ablations.Table(jnp.load(run / TABLE))
    if config.embeddings in ("gaussian", "learned"):
        _, like = data.shapes_for(config.encoder, *text_of(config))
        key = jax.random.fold_in(jax.random.key(config.seed), 4)
        return ablations.Table(ablations.unit(jax.random.normal(key, (len(corpus.tokenizer), like.encoder.embed.shape[1]))))
    if not corpora.is_scratch(config.encoder):
        encoder = data.load_encoder(config.encoder, corpus)
    elif (run / "encoder" / "config.json").exists():
        encoder = pretrained.load_t5(run / "encoder")
    else:
        encoder = pretrained.load_t5(encoder_stage(config, corpus).directory / "t5")
    return ablations.Table(ablations.unit(encoder.embed)) if config.embeddings == "table" else encoder


def write_config(config: TrainConfig):
    runs.write_whole(config.directory / "config.json", json.dumps(config.as_json(), indent=2) + "\n")


def keep_embedding(config: TrainConfig, corpus: corpora.Corpus, embedder: data.Embedder):
    """Into the run: what its embeddings were made with, and the tokenizer."""
    runs.write_whole(config.directory / data.EMBEDDING, data.describe(embedder, corpus))
    corpus.tokenizer.save_pretrained(config.directory / "tokenizer")
    if isinstance(embedder.encoder, ablations.Table):
        jnp.save(config.directory / TABLE, embedder.encoder.embed)
    if trained_here(config) and not (config.directory / "encoder" / "config.json").exists():
        pretrained.save_t5(embedder.encoder, config.directory / "encoder")


def encoder_stage(config: TrainConfig, corpus: corpora.Corpus) -> TrainConfig:
    """The run that trains an encoder on the corpus, before that of ELF. It is in the cache, for all that need the same."""
    steps, rate = config.encoder_steps, config.encoder_learning_rate
    identity = [corpus.key, config.encoder, steps, rate, config.batch, config.precision, Path(scratch.__file__).read_text()]
    return TrainConfig(
        model=config.encoder,
        data=config.data,
        data_dir=config.data_dir,
        name=f"encoder-{corpora.digest(identity)}",
        runs=config.cache,
        cache=config.cache,
        encoder=config.encoder,
        tokenizer=config.tokenizer,
        length=config.length,
        source_length=config.source_length,
        pack=config.pack,
        steps=steps,
        batch=config.batch,
        accumulate=config.accumulate,
        learning_rate=rate,
        warmup_steps=int(0.08 * steps),  # 0.4 of 5 epochs
        schedule="cosine",
        num_samples=0,
        sample_every=0,
        mesh=config.mesh,
        precision=config.precision,
        log_every=config.log_every,
        save_every=config.save_every,
    )


def train_encoder(config: TrainConfig, corpus: corpora.Corpus, mesh: Mesh):
    """The first stage of a run whose encoder is to learn from the corpus itself, unless it is there already."""
    stage = encoder_stage(config, corpus)
    place = stage.directory / "t5"
    if (config.directory / TABLE).exists() or (config.directory / "encoder" / "config.json").exists():
        return
    with chief_first():
        if is_chief():
            runs.claim(stage.directory, wait=True)  # until which another run may train it
        is_there = (place / "config.json").exists()
    if not is_there:
        goal = span_corruption(stage, corpus.tokenizer, compute_type(stage, mesh))
        if is_chief():
            write_config(stage)
        trained = fetch(fit_objective(stage, corpus, goal, mesh).model)
        if is_chief():
            pretrained.save_t5(trained.encoder, place)
    if is_chief():
        runs.release(stage.directory)


def train_decoder(config: TrainConfig):
    """The first of two stages, a run of its own inside that of ELF; what it leaves there is sampled from with ELF."""
    if config.decoder == "shared":
        return
    where = config.directory / "decoder"
    changes = dict(steps=config.decoder_steps, learning_rate=config.decoder_learning_rate, optimizer="adamw", schedule="cosine")
    changes |= dict(warmup_steps=config.decoder_steps // 20, num_samples=0, sample_every=0, wandb="", tensorboard=False)
    first = replace(config, name=str(where.relative_to(config.runs)), **changes)
    for each in (config, first):
        runs.refuse_others(each.directory, each, FREE)
    if not (where / "t5" / "config.json").exists():
        decoder = fetch(train(first, reconstruction).ema)
        if is_chief():
            pretrained.save_t5(decoder.body, where / "t5")


def to_sample(config: TrainConfig, model: ELF, run: Path, mesh: Mesh) -> ELF | ablations.TwoStage:
    """A network with what decodes for it."""
    if config.decoder == "shared":
        return model
    decoder = pretrained.load_t5(run / "decoder" / "t5")
    return ablations.TwoStage(model, replicate(ablations.Decoder(decoder), mesh))


def huge_pages():
    """Start over with huge pages behind XLA's buffers (Linux on CPU): fewer page faults in every step. And without libtpu, which
    may be installed for preflights, looking for TPUs."""
    tunables = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ and not has_accelerator():
        os.execve(sys.executable, sys.orig_argv, {"JAX_PLATFORMS": "cpu"} | os.environ | {"GLIBC_TUNABLES": tunables})


def train(config: TrainConfig, objective: MakeObjective = flow_matching) -> State:
    """Train a network on embeddings of a frozen encoder, which is itself trained first if it is to be."""
    check(config)
    mesh = make_mesh(config.mesh, config.batch)
    runs.refuse_others(config.directory, config, FREE)
    with chief_first():
        if is_chief():
            runs.claim(config.directory)
        corpus = load_corpus(config)
        if is_chief():
            print(f"{config.data}: {corpus.summary()}")
    if config.embeddings == "learned" and corpus.has_sources:
        raise Refused(LEARNED_WITH_SOURCES)
    if corpora.is_scratch(config.encoder) and config.embeddings in ("encoder", "table"):
        train_encoder(config, corpus, mesh)
    with chief_first():
        embedder = load_embedder(config, corpus)
        if is_chief():
            write_config(config)
            keep_embedding(config, corpus, embedder)
    dtype = compute_type(config, mesh)
    embedder = data.compute_in(embedder, dtype)
    make = partial(make_model, config, len(corpus.tokenizer), len(embedder.mean), unroll=best_unroll(config, mesh))
    asked = generate.Asked(replicate(embedder, mesh), corpus.validation) if corpus.has_sources else None
    return fit_objective(config, corpus, objective(config, embedder, dtype, make), mesh, asked)


def fit_objective(
    config: TrainConfig, corpus: corpora.Corpus, goal: Objective, mesh: Mesh, asked: generate.Asked | None = None
) -> State:
    """All steps of a run, from its last checkpoint on; at the end, samples and what they are worth."""
    optimizer = optimizer_of(config, in_one_piece(mesh))
    state = state_maker(config, optimizer, goal.make, mesh, goal.start)()
    checkpoints = runs.open_checkpoints(config.directory, config.keep)
    state = runs.restore_latest(checkpoints, state)

    step = jit_step(config, optimizer, goal.loss, state, mesh)
    _, train_key, validation_key = jax.random.split(jax.random.key(config.seed), 3)
    sample_key = generate.sampling_key(config.seed)
    frozen, train_key, validation_key = replicate((goal.frozen, train_key, validation_key), mesh)
    validation_loss = jax.jit(lambda *args: goal.loss(*args)[1], out_shardings=everywhere(mesh))
    sampler = generate.sampler_of(config)

    def load(i):
        chosen = data.batch_indices(len(corpus.rows.s), config.batch, config.seed, i)
        return place_rows(corpus.rows, chosen, mesh)

    def advance(state, rows):
        return step(state, frozen, rows, train_key)

    def validate(state):
        """Losses of the averaged weights on held-out rows, always with the same draws."""
        sums = 0
        for row in data.validation_batches(len(corpus.validation.s), config.batch):
            sums += validation_loss(state.ema, frozen, place_rows(corpus.validation, row, mesh), row, validation_key)
        return {f"validation_{k}": float(v) for k, v in found_in(sums).items()}

    def sample(state, n, name):
        n = min(n, len(corpus.validation.s)) if asked else n
        model = to_sample(config, state.ema, config.directory, mesh)
        texts = generate.sample_texts(config, sampler, model, corpus.tokenizer, n, sample_key, mesh, asked)
        if is_chief():
            runs.write_texts(config.directory / "samples" / f"{name}.jsonl", generate.as_records(corpus, texts))
        return texts

    def show(state, done):
        (text, *_) = sample(state, 16, f"step-{done}")
        if is_chief():
            tqdm.write(f"step {done}:\n{judges.some_texts(corpus, [text])}")

    with jax.set_mesh(mesh):
        state = fit(config, state, load, advance, validate, show, checkpoints, goal.label)
        texts = sample(state, config.num_samples, "final") if config.num_samples else []
    if is_chief():
        runs.plot_losses(config.directory)
        if texts:
            judge = judges.judge_by(corpus)
            print(judges.report(judge, corpus, texts, judge.judge(texts).scores))
            print(f"\n{judges.some_texts(corpus, texts)}")
            without = " --judge none" if judge is judges.NO_JUDGE else ""
            print(f"\nMore: python eval.py samples --run {config.directory}{without}")
    return state


def main():
    begun = time.time()
    with one_line():
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
        check(config)
        if is_chief():
            told = "  ".join(f"{k}={v}" for k, v in config.as_json().items() if v not in ("", None))
            print(textwrap.fill(told, shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False))
        train_decoder(config)
        train(config)
    if is_chief():
        minutes = (time.time() - begun) / 60
        print(f"{config.directory}: {minutes:.1f} minutes")


if __name__ == "__main__":
    main()
