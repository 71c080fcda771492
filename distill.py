"""Distill a trained ELF into one of few steps: progressive distillation, the paper's Appendix B.

    python distill.py --teacher runs/stories-desk --steps 300         rounds of 16, 8, 4, 2 and 1 steps, then
    their tables python distill.py --teacher runs/owt-elf-b --mesh 64 --rounds 16 8

One step of a student learns to go where 64 / N steps of the teacher go. Without --steps, a round is an epoch.
Every round is a run that starts from the one before. Run the same command again to resume.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

import data
import losses
import train
from config import OWT_ROWS, TrainConfig, check, preset
from corpora.rows import Rows
from elf import ELF, SIZES
from methods import Method
from methods.elf import draw_step, elf_method, noise_scales, slots_of
from report import paper, tables
from report.texts import bench_for
from runtime import checkpoints, preflight
from runtime.checkpoints import Trained, load, load_run
from runtime.errors import UserError, one_line_errors
from runtime.files import lock
from runtime.mesh import (
    ALL,
    by_row,
    is_process_0,
    join_processes,
    make_mesh,
    replicated,
    restart_with_huge_pages,
    shapes_on,
    to_host,
)


@dataclass(frozen=True)
class Distill:
    teacher: str
    """Directory of a run, or a released checkpoint. Its EMA weights teach."""
    rounds: tuple[int, ...] = tuple(paper.CURRICULUM)
    """Steps of the student in each round.

    The first starts from the finished round of twice as many, else from the teacher.
    """
    teacher_steps: int = 64
    """Steps of the teacher from noise to data."""
    steps: int | None = None
    """Optimizer steps of a round; by default one epoch."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; by default a tenth of the round."""
    learning_rate: float | None = None
    """Peak learning rate; by default the teacher's."""
    batch: int | None = None
    """Rows per step; by default the teacher's."""
    name: str = ""
    """Rounds are runs in <runs>/<name>/<steps of the student>; by default <teacher>-distilled."""
    runs: Path = Path("runs")
    """Directory of all runs."""
    num_samples: int | None = None
    """Texts after each round and for each number in the tables; by default as the teacher's run. 0 for none."""
    judge: str = ""
    """Judge of the samples: a GPT-2 by name or directory, or none; by default as in eval.py."""
    data: str = ""
    """Training data of a released teacher (owt, de-en, xsum), if its name does not say."""
    data_dir: str = ""
    """Local directory with the texts, where the hub cannot be reached."""
    encoder: str = ""
    """T5 directory for a released teacher; by default t5-small from the hub."""
    mesh: str = "1"
    """Devices: 64 is 64 data shards; 16x4 is 16 data shards with the weights of each sharded over 4."""
    coordinator: str = ""
    """Address (host:port) of process 0, where JAX cannot find the processes by itself."""
    processes: int = 1
    """Number of processes, if a coordinator is given."""
    process_id: int = 0
    """Number of this process, counted from 0."""
    save_every: int | None = None
    """Steps between checkpoints; by default the teacher's."""
    preflight: str = ""
    """Do not train: compile the first and the last round for an absent TPU, such as v5p:4x4x4, and print
    their cost."""
    preflight_json: Path | None = None
    """File for the numbers of the preflight, by round."""

    def load_teacher(self, mesh: Mesh) -> Trained:
        return load(self.teacher, mesh, corpus=self.data, data_dir=self.data_dir, encoder=self.encoder)

    def directory(self, student_steps: int) -> Path:
        return Path(self.name or f"{Path(self.teacher).name}-distilled") / str(student_steps)


# The objective


def sub_grid(
    key: PRNGKeyArray,
    row: Int[Array, " N"],
    t: Float[Array, " N"],
    r: Float[Array, " N"],
    k: int,
    times: Callable,
) -> Float[Array, "K N"]:
    """Times of k teacher steps inside [t, r] of every row, ends included: `times` of normal draws, sorted."""
    normal = jax.vmap(
        lambda i: jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, i), 6), (k - 1,))
    )(row)
    inner = jnp.sort(times(normal), axis=1).T
    return jnp.concatenate([t[None], t + (r - t) * inner, r[None]])


def follow(
    teacher: ELF,
    z: losses.State,
    x_prev: losses.State,
    w: Float[Array, " N"],
    ts: Float[Array, "K N"],
    keep: Callable,
) -> losses.State:
    """Take the teacher's Euler steps over the times `ts`; `keep` puts the clean prefix back into a state."""

    def step(carry, times):
        z, x_prev = carry
        t, t_next = times
        x_hat = keep(teacher.denoise(z, x_prev, t, w))
        return (keep(z + (t_next - t)[:, None, None] * losses.velocity(x_hat, z, t, clip=0.0)), x_hat), None

    (z, _), _ = jax.lax.scan(step, (z, x_prev), (ts[:-1], ts[1:]))
    return z


def token_losses(
    model: ELF,
    teacher: ELF,
    batch: losses.Batch,
    draws: losses.Draws,
    ts: Float[Array, "K N"],
    slots: losses.Slots,
    decoding: int,
    *,
    noise_scale: float,
    decode_noise_scale: float,
) -> Float[Array, "N L"]:
    """Eq. 4 in the denoiser rows, Alg. 4 in the decoder rows. Teacher and student see the same w and
    self-conditioning.

    The first `decoding` rows of every group are always decoder rows: no teacher is followed there.
    """
    z, x_prev, t, _ = losses.make_inputs(teacher, batch, draws, slots, noise_scale, decode_noise_scale)
    others = slice(decoding, slots.group)
    take, put = partial(losses.take_rows, slots.group), partial(losses.put_rows, len(t), slots.group)
    start, start_prev, w, prefix, clean = (
        take(a, others) for a in (z, x_prev, draws.w, batch.prefix, batch.x)
    )
    keep = partial(jnp.where, prefix[..., None], clean)
    z_r = put(follow(teacher, start, start_prev, w, take(ts.T, others).T, keep), others)
    x_target = losses.distill_target(z, z_r, ts[0], ts[-1])
    h = model.trunk(z, x_prev, t, draws.w, draws.decode.astype(jnp.float32))
    denoised = losses.distill_loss(model.predict(h, z, t), x_target)
    return losses.with_decoder(model, h, batch, draws, slots, denoised)


def always_decoding(config: TrainConfig) -> int:
    """Count the rows of a group that train the decoder in every batch.

    It is 0 where a group is not whole on a device, which would have to send rows to others.
    """
    group, devices = slots_of(config).group, math.prod(map(int, config.mesh.split("x")))
    whole = config.batch // config.accumulate % (group * devices) == 0
    return int(group * config.p_decode) if whole else 0


def make_loss(config: TrainConfig, dtype) -> Callable:
    """Make the loss of a round; frozen are the embedder and the teacher."""
    slots, decoding = slots_of(config), always_decoding(config)
    n, k = config.student_steps, config.teacher_steps // config.student_steps
    times = partial(losses.TIMES[config.times], mean=config.t_mean, std=config.t_std)

    def loss(
        model: ELF, frozen: tuple[data.Embedder, ELF], rows: Rows, row: Int[Array, " N"], key: PRNGKeyArray
    ):
        embedder, teacher = frozen
        draws, drop = draw_step(config, key, row, rows.s.shape[1], len(embedder.mean), slots.group)
        t = (1 - 1 / n) * draws.t
        ts = sub_grid(key, row, t, t + 1 / n, k, times)
        batch = embedder(rows, drop)
        draws = draws._replace(t=t)
        model, teacher = data.cast((model, teacher), dtype)
        per_token = token_losses(model, teacher, batch, draws, ts, slots, decoding, **noise_scales(config))
        return losses.summed(per_token, batch, draws)

    return loss


def student_method(config: TrainConfig, vocab: int, width: int, mesh: Mesh, unroll: int = 0) -> Method:
    """ELF with the loss of a round."""
    method = elf_method(config, vocab, width, mesh, unroll)
    return method._replace(loss=make_loss(config, data.compute_type(config, mesh)))


# The rounds


def check_args(args: Distill):
    """Raise a UserError for rounds that cannot work."""
    if not args.rounds:
        raise UserError("--rounds: give the steps of the student in each round, as 16 8 4 2 1")
    for n in args.rounds:
        if args.teacher_steps < 1 or n < 1 or args.teacher_steps % n:
            raise UserError(f"--rounds {n}: must divide the teacher's {args.teacher_steps} steps")
    if list(args.rounds) != sorted(set(args.rounds), reverse=True):
        raise UserError(
            f"--rounds {' '.join(map(str, args.rounds))}: each must have fewer steps than the one before"
        )


def check_teacher(args: Distill, config: TrainConfig):
    """Raise a UserError for a teacher that cannot be distilled."""
    for wrong, message in (
        (
            config.embeddings == "learned" or config.decoder == "separate",
            "needs frozen embeddings and a shared decoder",
        ),
        (
            config.prediction == "eps",
            "predicts noise, which says nothing of x at t = 0, where students start",
        ),
        (config.model not in SIZES, f"its size has no name here; known are {', '.join(SIZES)}"),
    ):
        if wrong:
            raise UserError(f"--teacher {args.teacher}: {message}")


def round_config(
    args: Distill, teacher: TrainConfig, student_steps: int, epoch: int, few_step: bool
) -> TrainConfig:
    """Config of a round: the teacher's, except for the length of training and, for texts without sources,
    the sampler of Appendix B."""
    changes = {k: getattr(args, k) for k in ("learning_rate", "batch", "save_every", "num_samples")}
    base = replace(teacher, **{k: v for k, v in changes.items() if v is not None})
    if few_step and (sampling := paper.FEW_STEP_SAMPLING.get(student_steps)):
        base = replace(base, w=sampling.w, gamma=sampling.gamma)
    steps = max(1, epoch // base.batch) if args.steps is None else args.steps
    return replace(
        base,
        steps=steps,
        warmup_steps=max(1, steps // 10) if args.warmup_steps is None else args.warmup_steps,
        teacher=str(Path(args.teacher)),
        teacher_steps=args.teacher_steps,
        student_steps=student_steps,
        name=str(args.directory(student_steps)),
        runs=args.runs,
        mesh=args.mesh,
        sample_steps=student_steps,
        sample_every=0,
        seed=teacher.seed + student_steps,
    )


def distill(args: Distill) -> list[Path]:
    """Train all rounds, one after the other; returns the directories of their runs."""
    check_args(args)
    mesh = make_mesh(args.mesh, 0)
    teacher = args.load_teacher(mesh)
    check_teacher(args, teacher.config)
    corpus = teacher.corpus()
    teacher_embedder = teacher.embedder(corpus)
    student, start = first_student(args, teacher, mesh)
    directories = []
    for i, n in enumerate(args.rounds, 1):
        weights = f"{teacher.weights} {data.fingerprint(to_host(student))}"
        config = round_config(args, teacher.config, n, len(corpus.rows.s), few_step=not corpus.has_sources)
        config = replace(config, start_steps=start, weights=weights)
        check(config)
        checkpoints.check_same_run(config)
        label, k = f"round {i} of {len(args.rounds)}", args.teacher_steps // n
        if is_process_0():
            origin = f"the student of {start}" if start else "the teacher"
            print(f"\n{label}: a student of {n} steps, each {k} of the teacher's, from {origin}")
            lock(config.directory)
            data.save_embedder(config, corpus, teacher_embedder)
        round_mesh = make_mesh(config.mesh, config.batch)
        corpus, embedder = train.prepare(config, round_mesh)
        method = student_method(config, len(corpus.tokenizer), len(embedder.mean), round_mesh)
        fit = partial(train.fit, config, method, (embedder, teacher.model), corpus, round_mesh)
        conditions = train.conditions_of(embedder, corpus, round_mesh)
        student, start = fit(start=student, conditions=conditions, label=label).ema, n
        directories.append(config.directory)
    return directories


def first_student(args: Distill, teacher: Trained, mesh: Mesh) -> tuple[ELF, int | None]:
    """Choose the start of the first round: the finished student of twice as many steps, else the teacher."""
    twice = 2 * args.rounds[0]
    before = args.runs / args.directory(twice)
    if not (before / "config.json").exists() or not checkpoints.is_finished(before):
        return teacher.model, None
    student = load_run(before, mesh)
    if student.config.weights.split()[0] != teacher.weights:
        its_teacher = student.config.teacher
        raise UserError(f"{before} was distilled from another teacher ({its_teacher}): choose another --name")
    return student.model, twice


def show_tables(args: Distill, directories: list[Path]):
    """Write the paper's Tables 4 and 5: the last student beside its teacher, and all students."""
    mesh, out = make_mesh(args.mesh, 0), directories[-1].parent
    teacher = args.load_teacher(mesh)
    n = teacher.config.num_samples if args.num_samples is None else args.num_samples
    if n:
        benches = [bench_for(load(str(directory), mesh), n, args.judge) for directory in directories]
        last_and_teacher = [benches[-1], bench_for(teacher, n, args.judge)]
        tables.write(tables.TABLES["few-step"](last_and_teacher, [0]), out / "few-step")
        print()
        tables.write(tables.TABLES["rounds"](benches, [0]), out / "rounds")


# Preflight


def preflight_rounds(args: Distill):
    """Compile a step of the first and of the last round."""
    check_args(args)
    teacher, costs = teacher_config(args), {}
    check_teacher(args, teacher)
    for n in dict.fromkeys([args.rounds[0], args.rounds[-1]]):
        config = round_config(args, teacher, n, OWT_ROWS, few_step=False)
        config = replace(config, preflight=args.preflight)
        check(config)
        k = args.teacher_steps // n
        plan = preflight.Plan(
            config, train.build, student_method, lambda *both: both, partial(lower_follow, config), k
        )
        costs[n] = preflight.inspect(plan)
        print(f"a student of {n} steps, each {k} of the teacher's:")
        preflight.print_costs(costs[n])
    if args.preflight_json:
        args.preflight_json.write_text(json.dumps(costs, indent=2) + "\n")


def teacher_config(args: Distill) -> TrainConfig:
    """Config of a run, a released checkpoint, or a size by name, which is enough for planning."""
    if args.teacher in SIZES:
        return preset(args.teacher, args.data or None)
    if (Path(args.teacher) / "config.json").exists():
        return checkpoints.read_config(Path(args.teacher))
    return args.load_teacher(make_mesh("1", 0)).config


def lower_follow(config: TrainConfig, teacher: ELF, width: int, mesh: Mesh) -> jax.stages.Lowered:
    """Lower one step of the teacher on the rows that follow it."""
    n = config.batch // config.accumulate
    n -= n // slots_of(config).group * always_decoding(config)
    z, w = (
        jax.ShapeDtypeStruct((n, config.length, width), jnp.float32),
        jax.ShapeDtypeStruct((n,), jnp.float32),
    )
    ts = jax.ShapeDtypeStruct((2, n), jnp.float32, sharding=NamedSharding(mesh, P(None, ALL)))
    dtype = data.compute_type(config, mesh)
    with jax.set_mesh(mesh):
        step = jax.jit(lambda teacher, *args: follow(data.cast(teacher, dtype), *args, keep=lambda z: z))
        return step.lower(shapes_on(teacher, replicated(mesh)), *shapes_on((z, z, w), by_row(mesh)), ts)


def main():
    started = time.time()
    args = tyro.cli(Distill, description=__doc__)
    with one_line_errors():
        if args.preflight:
            return preflight_rounds(args)
        restart_with_huge_pages()
        join_processes(args.coordinator, args.processes, args.process_id)
        directories = distill(args)
        show_tables(args, directories)
    if is_process_0():
        print(f"\n{directories[-1].parent}: {(time.time() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
