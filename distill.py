"""Distill a trained ELF into students that need few sampling steps (progressive distillation, Appendix B).

    python distill.py --teacher runs/stories-desk --steps 300      # rounds of 16, 8, 4, 2, 1 steps; tables
    python distill.py --teacher runs/owt-elf-b --mesh 64 --rounds 16 8

In each round, a student with N sampling steps learns to do in one step what the teacher does in 64 / N. Each
round is a run that starts from the student of the round before. Without --steps, a round is one epoch.
Run the same command again to resume.
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
from losses import Batch, Draws, Slots, State
from methods import Method
from methods.elf import draw_step, elf_method, noise_scales, slots_of
from report import paper, tables
from report.samples import bench_for
from runtime import checkpoints, preflight
from runtime.checkpoints import Trained, load, load_run
from runtime.errors import UserError, one_line_errors
from runtime.files import lock
from runtime.mesh import by_row, make_mesh, to_host
from runtime.processes import is_process_0, join_processes, restart_with_huge_pages

PerRow = Float[Array, " N"]
Times = Float[Array, "K N"]


@dataclass(frozen=True)
class Distill:
    teacher: str
    """Directory of a run, or a released checkpoint. Its EMA weights teach."""
    rounds: tuple[int, ...] = tuple(paper.CURRICULUM)
    """Sampling steps of the student in each round.

    The first student starts from the finished one with twice as many steps, if there is one under this name.
    Otherwise it starts from the teacher.
    """
    steps: int | None = None
    """Optimizer steps of a round; by default one epoch."""
    batch: int | None = None
    """Rows per optimizer step; by default the teacher's."""
    learning_rate: float | None = None
    """Peak learning rate; by default the teacher's."""
    mesh: str = "1"
    """Devices: 64 splits the batch over 64; 16x4 does too, and shards the weights over groups of 4."""
    num_samples: int | None = None
    """Texts sampled after each round and for the tables; 0 for none. By default as in the teacher's run."""
    judge: str = ""
    """Judge of the samples: a GPT-2 by name or directory, or none; by default as in eval.py."""
    name: str = ""
    """The rounds are runs in <runs>/<name>/<student steps>; by default, the name is <teacher>-distilled."""
    runs: Path = Path("runs")
    """Directory of all runs."""
    teacher_steps: int = 64
    """Sampling steps of the teacher."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; by default a tenth of the round."""
    save_every: int | None = None
    """Steps between checkpoints; by default the teacher's."""
    data: str = ""
    """Training data of a released teacher (owt, de-en, xsum), if its name does not say."""
    data_dir: str = ""
    """Local directory with the texts of a released teacher, to use instead of the hub."""
    encoder: str = ""
    """T5 directory with encoder and tokenizer of a released teacher; by default t5-small from the hub."""
    coordinator: str = ""
    """Address (host:port) of process 0, on hosts where JAX does not find the other processes."""
    processes: int = 1
    """Number of processes; only with --coordinator."""
    process_id: int = 0
    """Index of this process, from 0; only with --coordinator."""
    preflight: str = ""
    """Do not train: print the cost of the first and last round on a TPU slice, such as v5p:4x4x4."""
    preflight_json: Path | None = None
    """JSON file for the numbers of the preflight, by round."""

    def load_teacher(self, mesh: Mesh) -> Trained:
        return load(self.teacher, mesh, corpus=self.data, data_dir=self.data_dir, encoder=self.encoder)

    def directory(self, student_steps: int) -> Path:
        return Path(self.name or f"{Path(self.teacher).name}-distilled") / str(student_steps)


# The objective


def sub_grid(
    key: PRNGKeyArray, row: Int[Array, " N"], t: PerRow, r: PerRow, k: int, times: Callable
) -> Times:
    """Draw times of k teacher steps in [t, r] of each row, ends included: sorted `times` of normal draws."""

    def draw(i):
        return jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, i), 6), (k - 1,))

    inner = jnp.sort(times(jax.vmap(draw)(row)), axis=1).T
    return jnp.concatenate([t[None], t + (r - t) * inner, r[None]])


def follow(teacher: ELF, z: State, x_prev: State, w: PerRow, ts: Times, keep: Callable) -> State:
    """Take the teacher's Euler steps over the times `ts`; `keep` puts the clean prefix back into a state."""

    def step(carry, times):
        z, x_prev = carry
        t, t_next = times
        x_hat = keep(teacher.denoise(z, x_prev, t, w))
        return (keep(z + (t_next - t)[:, None, None] * losses.velocity(x_hat, z, t, clip=0.0)), x_hat), None

    (z, _), _ = jax.lax.scan(step, (z, x_prev), (ts[:-1], ts[1:]))
    return z


def token_losses(
    model: ELF, teacher: ELF, batch: Batch, draws: Draws, ts: Times, slots: Slots, decoding: int, **noise
) -> Float[Array, "N L"]:
    """Compute Eq. 4 in denoiser rows and Alg. 4 in decoder rows, of which `decoding` lead every group.

    Teacher and student see the same w and self-conditioning. The teacher is not followed in the leading rows.
    """
    z, x_prev, t, _ = losses.make_inputs(teacher, batch, draws, slots, **noise)
    others = slice(decoding, slots.group)
    take = partial(losses.take_rows, slots.group, rows=others)
    start, start_prev, w, prefix, clean = map(take, (z, x_prev, draws.w, batch.prefix, batch.x))
    keep = partial(jnp.where, prefix[..., None], clean)
    z_r = follow(teacher, start, start_prev, w, take(ts.T).T, keep)
    z_r = losses.put_rows(len(t), slots.group, z_r, others)
    x_target = losses.distill_target(z, z_r, ts[0], ts[-1])
    h = model.trunk(z, x_prev, t, draws.w, draws.decode.astype(jnp.float32))
    denoised = losses.distill_loss(model.predict(h, z, t), x_target)
    return losses.with_decoder(model, h, batch, draws, slots, denoised)


def always_decoding(config: TrainConfig) -> int:
    """Count the rows of a group that decode in every batch; 0 where a group is not whole on a device."""
    group, devices = slots_of(config).group, math.prod(map(int, config.mesh.split("x")))
    whole = config.batch // config.accumulate % (group * devices) == 0
    return int(group * config.p_decode) if whole else 0


def make_loss(config: TrainConfig, dtype) -> Callable:
    """Make the loss of a round; frozen are the embedder and the teacher."""
    slots, decoding = slots_of(config), always_decoding(config)
    n, k = config.student_steps, config.teacher_steps // config.student_steps
    times = partial(losses.TIMES[config.times], mean=config.t_mean, std=config.t_std)

    def loss(model: ELF, frozen: tuple[data.Embedder, ELF], rows: Rows, row, key: PRNGKeyArray):
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
    """Make ELF with the loss of a round."""
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
        rounds = " ".join(map(str, args.rounds))
        raise UserError(f"--rounds {rounds}: each must have fewer steps than the one before")


def check_teacher(args: Distill, config: TrainConfig):
    """Raise a UserError for a teacher that cannot be distilled."""
    problem = ""
    if config.embeddings == "learned" or config.decoder == "separate":
        problem = "needs frozen embeddings and a shared decoder"
    elif config.prediction == "eps":
        problem = "predicts noise, which says nothing of x at t = 0, where students start"
    elif config.model not in SIZES:
        problem = f"its size has no name here; known are {', '.join(SIZES)}"
    if problem:
        raise UserError(f"--teacher {args.teacher}: {problem}")


def round_config(
    args: Distill, teacher: TrainConfig, student_steps: int, epoch: int, few_step: bool
) -> TrainConfig:
    """Make the config of a round from the teacher's; with `few_step`, it samples as in Appendix B."""
    changes = {k: getattr(args, k) for k in ("learning_rate", "batch", "save_every", "num_samples")}
    base = replace(teacher, **{k: v for k, v in changes.items() if v is not None})
    if few_step and (sampler := paper.FEW_STEP_SAMPLING.get(student_steps)):
        base = replace(base, w=sampler.w, gamma=sampler.gamma)
    steps = max(1, epoch // base.batch) if args.steps is None else args.steps
    warmup = max(1, steps // 10) if args.warmup_steps is None else args.warmup_steps
    training = dict(steps=steps, warmup_steps=warmup, seed=teacher.seed + student_steps)
    training |= dict(teacher=str(Path(args.teacher)), teacher_steps=args.teacher_steps)
    sampling = dict(student_steps=student_steps, sample_steps=student_steps, sample_every=0)
    name = str(args.directory(student_steps))
    return replace(base, **training, **sampling, name=name, runs=args.runs, mesh=args.mesh)


def distill(args: Distill) -> list[Path]:
    """Train all rounds, one after the other; return the directories of their runs."""
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
        label = f"round {i} of {len(args.rounds)}"
        if is_process_0():
            origin = f"the student of {start}" if start else "the teacher"
            print(f"\n{label}: {described(args, n)}, from {origin}")
            lock(config.directory)
            data.save_embedder(config, corpus, teacher_embedder)
        mesh = make_mesh(config.mesh, config.batch)
        corpus, embedder = train.prepare(config, mesh)
        method = student_method(config, len(corpus.tokenizer), len(embedder.mean), mesh)
        settings = dict(start=student, conditions=train.conditions_of(embedder, corpus, mesh), label=label)
        student = train.fit(config, method, (embedder, teacher.model), corpus, mesh, **settings).ema
        start = n
        directories.append(config.directory)
    return directories


def described(args: Distill, n: int) -> str:
    """Describe the student of a round."""
    return f"a student of {n} steps, each {args.teacher_steps // n} of the teacher's"


def first_student(args: Distill, teacher: Trained, mesh: Mesh) -> tuple[ELF, int | None]:
    """Choose the start of the first round: the finished student of twice as many steps, else the teacher."""
    twice = 2 * args.rounds[0]
    before = args.runs / args.directory(twice)
    if not (before / "config.json").exists() or not checkpoints.is_finished(before):
        return teacher.model, None
    student = load_run(before, mesh)
    if student.config.weights.split()[0] != teacher.weights:
        other = f"another teacher ({student.config.teacher})"
        raise UserError(f"{before} was distilled from {other}: choose another --name")
    return student.model, twice


def show_tables(args: Distill, directories: list[Path]):
    """Write the paper's Tables 4 and 5: the last student beside its teacher, and all students."""
    mesh, out = make_mesh(args.mesh, 0), directories[-1].parent
    teacher = args.load_teacher(mesh)
    n = teacher.config.num_samples if args.num_samples is None else args.num_samples
    if n:
        benches = [bench_for(load(str(directory), mesh), n, args.judge) for directory in directories]
        pair = [benches[-1], bench_for(teacher, n, args.judge)]
        tables.write(tables.TABLES["few-step"](pair, [0]), out / "few-step")
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
        plan = preflight.Plan(config, train.build, student_method, frozen=lambda *both: both)
        follows = dict(teacher=partial(lower_follow, config), teacher_steps=args.teacher_steps // n)
        costs[n] = preflight.inspect(plan._replace(**follows))
        print(f"{described(args, n)}:")
        preflight.print_costs(costs[n])
    if args.preflight_json:
        args.preflight_json.write_text(json.dumps(costs, indent=2) + "\n")


def teacher_config(args: Distill) -> TrainConfig:
    """Find the config of a run, a released checkpoint, or a size by name, which is enough for planning."""
    if args.teacher in SIZES:
        return preset(args.teacher, args.data or None)
    if (Path(args.teacher) / "config.json").exists():
        return checkpoints.read_config(Path(args.teacher))
    return args.load_teacher(make_mesh("1", 0)).config


def lower_follow(config: TrainConfig, teacher: ELF, width: int, mesh: Mesh) -> jax.stages.Lowered:
    """Lower one step of the teacher on the rows that follow it."""
    n = config.batch // config.accumulate
    n -= n // slots_of(config).group * always_decoding(config)
    array = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    z = array((n, config.length, width), sharding=by_row(mesh))
    w = array((n,), sharding=by_row(mesh))
    ts = array((2, n), sharding=NamedSharding(mesh, P(None, mesh.axis_names)))
    dtype = data.compute_type(config, mesh)
    step = jax.jit(lambda teacher, *args: follow(data.cast(teacher, dtype), *args, keep=lambda z: z))
    with jax.set_mesh(mesh):
        return step.lower(teacher, z, z, w, ts)


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
