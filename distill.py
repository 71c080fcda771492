"""Distill a trained ELF into one of few steps: progressive distillation, the paper's Appendix B.

    python distill.py --teacher runs/stories-desk --steps 300         rounds of 16, 8, 4, 2 and 1 steps, then their tables
    python distill.py --teacher runs/owt-elf-b --mesh 64 --rounds 16 8

One step of a student learns to go where 64 / N steps of the teacher go. Without --steps, a round is an epoch.
Every round is a run of its own, begun from the one before it, and the same command continues an interrupted one.
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

import corpora
import data
import losses
import paper
import preflight
import runs
import tables
import train
import trained
from elf import ELF, SIZES
from errors import Refused, one_line
from measure import bench_for
from mesh import ALL, by_row, everywhere, fetch, is_chief, join_processes, make_mesh, shapes_on
from settings import OWT_ROWS, TrainConfig, preset


@dataclass(frozen=True)
class Distill:
    teacher: str
    """Directory of a run, or a released checkpoint; its averaged weights teach."""
    rounds: tuple[int, ...] = tuple(paper.CURRICULUM)
    """Steps of the student in each round. The first begins at the round of twice as many if that is finished, or else at the
    teacher."""
    teacher_steps: int = 64
    """Steps of the teacher from noise to data."""
    steps: int | None = None
    """Optimizer steps of a round; by default one epoch."""
    warmup_steps: int | None = None
    """Of them with a growing learning rate; by default a tenth of the round."""
    learning_rate: float | None = None
    """By default the teacher's."""
    batch: int | None = None
    """Rows per step; by default the teacher's."""
    name: str = ""
    """Rounds live in <runs>/<name>/<steps of the student>; by default <teacher>-distilled."""
    runs: Path = Path("runs")
    """Directory of all runs."""
    num_samples: int | None = None
    """Texts after each round and for each number in the tables; by default as many as the teacher's run says. 0 for none."""
    judge: str = ""
    """Who judges them, as in eval.py."""
    data: str = ""
    """What a released teacher was trained on, if its name does not tell."""
    data_dir: str = ""
    """As in eval.py."""
    encoder: str = ""
    """T5 directory for a released teacher, if not t5-small from the hub."""
    mesh: str = "1"
    """Devices, as in train.py."""
    coordinator: str = ""
    """As in train.py."""
    processes: int = 1
    """As in train.py."""
    process_id: int = 0
    """As in train.py."""
    save_every: int | None = None
    """Steps between checkpoints; by default the teacher's."""
    preflight: str = ""
    """Do not train: compile the step of each round for a TPU, as in train.py."""
    preflight_json: Path | None = None
    """File for the numbers of that, by round."""

    @property
    def released(self) -> dict[str, str]:
        """What has to be told of a released teacher."""
        return dict(corpus=self.data, data_dir=self.data_dir, encoder=self.encoder)

    def directory(self, student_steps: int) -> Path:
        return Path(self.name or f"{Path(self.teacher).name}-distilled") / str(student_steps)


# The objective


def sub_grid(
    key: PRNGKeyArray, row: Int[Array, " N"], t: Float[Array, " N"], r: Float[Array, " N"], k: int, times: Callable
) -> Float[Array, "K N"]:
    """k steps of the teacher inside [t, r] of every row, at sorted `times` made of normal draws; both ends included."""
    normal = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, i), 6), (k - 1,)))(row)
    inner = jnp.sort(times(normal), axis=1).T
    return jnp.concatenate([t[None], t + (r - t) * inner, r[None]])


def follow(
    teacher: ELF, z: Float[Array, "N L E"], x_prev: Float[Array, "N L E"], w: Float[Array, " N"], ts: Float[Array, "K N"], keep
) -> Float[Array, "N L E"]:
    """Where the teacher's Euler steps over the times `ts` lead; `keep` puts the clean prefix back into a state."""

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
    """Eq. 4 in the denoiser rows, Alg. 4 in the decoder rows. Teacher and student see the same w and self-conditioning.

    The first `decoding` rows of every group are always decoder rows: no teacher is followed there.
    """
    z, x_prev, t, _ = losses.make_inputs(teacher, batch, draws, slots, noise_scale, decode_noise_scale)
    others = slice(decoding, slots.group)
    take, put = partial(losses.take_rows, slots.group), partial(losses.put_rows, len(t), slots.group)
    start, seen, w, prefix, clean = (take(a, others) for a in (z, x_prev, draws.w, batch.prefix, batch.x))
    keep = partial(jnp.where, prefix[..., None], clean)
    z_r = put(follow(teacher, start, seen, w, take(ts.T, others).T, keep), others)
    x_target = losses.distill_target(z, z_r, ts[0], ts[-1])
    h = model.trunk(z, x_prev, t, draws.w, draws.decode.astype(jnp.float32))
    return losses.with_decoder(model, h, batch, draws, slots, losses.distill_loss(model.predict(h, z, t), x_target))


def always_decoding(config: TrainConfig) -> int:
    """How many rows of a group train the decoder in every batch; 0 where a group is not whole on a device, which would have to
    send rows to others."""
    group, devices = train.slots_of(config).group, math.prod(map(int, config.mesh.split("x")))
    whole = config.batch // config.accumulate % (group * devices) == 0
    return int(group * config.p_decode) if whole else 0


def make_loss(config: TrainConfig, dtype, student_steps: int, teacher_steps: int) -> Callable:
    """(model, (embedder, teacher), rows, their numbers, key) -> summed loss, and its sum and count in each branch."""
    slots = train.slots_of(config)
    decoding = always_decoding(config)
    times = partial(losses.TIMES[config.times], mean=config.t_mean, std=config.t_std)
    scales = dict(noise_scale=config.noise_scale, decode_noise_scale=config.decode_noise_scale)

    def loss(model: ELF, frozen: tuple[data.Embedder, ELF], rows: corpora.Rows, row: Int[Array, " N"], key: PRNGKeyArray):
        embedder, teacher = frozen
        draws, drop = train.draw(config, key, row, rows.s.shape[1], len(embedder.mean), slots.group)
        t = (1 - 1 / student_steps) * draws.t
        ts = sub_grid(key, row, t, t + 1 / student_steps, teacher_steps // student_steps, times)
        batch = embedder(rows, drop)
        draws = draws._replace(t=t)
        model, teacher = train.cast((model, teacher), dtype)
        per_token = token_losses(model, teacher, batch, draws, ts, slots, decoding, **scales)
        sums = losses.branch_sums(per_token, batch, draws)
        return sums[:, 0].sum(), sums

    return loss


# The rounds


def check(asked: Distill):
    if not asked.rounds:
        raise Refused("--rounds: give the steps of the student in each round, as 16 8 4 2 1")
    for n in asked.rounds:
        if asked.teacher_steps < 1 or n < 1 or asked.teacher_steps % n:
            raise Refused(f"--rounds {n}: must divide the teacher's {asked.teacher_steps} steps")
    if list(asked.rounds) != sorted(set(asked.rounds), reverse=True):
        raise Refused(f"--rounds {' '.join(map(str, asked.rounds))}: each must have fewer steps than the one before")


def check_teacher(asked: Distill, config: TrainConfig):
    if config.embeddings == "learned" or config.decoder == "separate":
        raise Refused(f"--teacher {asked.teacher}: only with frozen embeddings and a decoder shared with the network")
    if config.prediction == "eps":
        raise Refused(f"--teacher {asked.teacher}: it predicts noise, which at t = 0, where students begin, tells nothing of x")
    if config.model not in SIZES:
        raise Refused(f"--teacher {asked.teacher}: of a size that has no name here; known are {', '.join(SIZES)}")


def round_config(asked: Distill, teacher: TrainConfig, student_steps: int, epoch: int, few_step: bool) -> TrainConfig:
    """The settings of a round: the teacher's, but for the length of training and, for texts without sources, how samples are
    drawn (Appendix B)."""
    given = dict(learning_rate=asked.learning_rate, batch=asked.batch, save_every=asked.save_every, num_samples=asked.num_samples)
    base = replace(teacher, **{k: v for k, v in given.items() if v is not None})
    if few_step and (sampling := paper.FEW_STEP_SAMPLING.get(student_steps)):
        base = replace(base, w=sampling.w, gamma=sampling.gamma)
    steps = max(1, epoch // base.batch) if asked.steps is None else asked.steps
    warmup = max(1, steps // 10) if asked.warmup_steps is None else asked.warmup_steps
    return replace(
        base,
        steps=steps,
        warmup_steps=warmup,
        teacher=str(Path(asked.teacher)),
        teacher_steps=asked.teacher_steps,
        student_steps=student_steps,
        name=str(asked.directory(student_steps)),
        runs=asked.runs,
        mesh=asked.mesh,
        sample_steps=student_steps,
        sample_every=0,
        seed=teacher.seed + student_steps,
    )


def objective_of(teacher: ELF | None, student: ELF | None, label: str = "") -> train.MakeObjective:
    """Without a teacher and a student, of shapes alone."""

    def objective(config: TrainConfig, embedder: data.Embedder, dtype, make: Callable[[PRNGKeyArray], ELF]) -> train.Objective:
        loss = make_loss(config, dtype, config.student_steps, config.teacher_steps)
        teaching = jax.eval_shape(make, jax.random.key(0)) if teacher is None else teacher
        return train.Objective(loss, (embedder, teaching), make, student, label)

    return objective


def distill(asked: Distill) -> list[Path]:
    """All rounds, one after the other; the directories of their runs."""
    check(asked)
    mesh = make_mesh(asked.mesh, 0)
    teacher = trained.load(asked.teacher, mesh, **asked.released)
    check_teacher(asked, teacher.config)
    corpus = teacher.corpus()
    embedder = teacher.embedder(corpus)
    student, start = first_student(asked, teacher, mesh)
    directories = []
    for i, n in enumerate(asked.rounds, 1):
        weights = f"{teacher.weights} {data.fingerprint(fetch(student))}"
        config = round_config(asked, teacher.config, n, len(corpus.rows.s), few_step=not corpus.has_sources)
        config = replace(config, start_steps=start, weights=weights)
        train.check(config)
        runs.refuse_others(config.directory, config, train.FREE)
        label = f"round {i} of {len(asked.rounds)}"
        if is_chief():
            begun, k = f"begun as that of {start}" if start else "begun as the teacher", asked.teacher_steps // n
            print(f"\n{label}, steps of the student: {n}, {begun}; each is {k} of the teacher's")
            runs.claim(config.directory)
            train.keep_embedding(config, corpus, embedder)
        student = train.train(config, objective_of(teacher.model, student, label)).ema
        start = n
        directories.append(config.directory)
    return directories


def first_student(asked: Distill, teacher: trained.Trained, mesh: Mesh) -> tuple[ELF, int | None]:
    """What the first round begins as: the student of twice as many steps if it is finished, or else the teacher."""
    twice = 2 * asked.rounds[0]
    before = asked.runs / asked.directory(twice)
    if not (before / "config.json").exists() or not runs.is_finished(before):
        return teacher.model, None
    found = trained.load_run(before, mesh)
    if found.config.weights.split()[0] != teacher.weights:
        raise Refused(f"{before} was distilled from another teacher ({found.config.teacher}): choose another --name")
    return found.model, twice


def show_tables(asked: Distill, directories: list[Path]):
    """The paper's Tables 4 and 5: the last student beside its teacher, and all students."""
    mesh, out = make_mesh(asked.mesh, 0), directories[-1].parent
    teacher = trained.load(asked.teacher, mesh, **asked.released)
    n = teacher.config.num_samples if asked.num_samples is None else asked.num_samples
    if n == 0:
        return
    *_, last = students = [bench_for(trained.load(str(d), mesh), mesh, n, asked.judge) for d in directories]
    tables.write(tables.few_step([last, bench_for(teacher, mesh, n, asked.judge)], [0]), out / "few-step")
    print()
    tables.write(tables.rounds(students, [0]), out / "rounds")


def preflight_rounds(asked: Distill):
    """What a step costs in the first and the last round asked for."""
    check(asked)
    teacher, found = teacher_config(asked), {}
    check_teacher(asked, teacher)
    for n in dict.fromkeys([asked.rounds[0], asked.rounds[-1]]):
        config = replace(round_config(asked, teacher, n, OWT_ROWS, few_step=False), preflight=asked.preflight)
        train.check(config)
        k = asked.teacher_steps // n
        found[n] = train.preflight_step(config, partial(plan_of, k), more_passes=k)
        print(f"a student of {n} steps, each {k} of the teacher's:")
        preflight.print_report(found[n])
    if asked.preflight_json:
        asked.preflight_json.write_text(json.dumps(found, indent=2) + "\n")


def teacher_config(asked: Distill) -> TrainConfig:
    """Of a run, a released checkpoint, or a size by name, which is enough for planning."""
    if asked.teacher in SIZES:
        return preset(asked.teacher, asked.data or None)
    if (Path(asked.teacher) / "config.json").exists():
        return runs.read_config(Path(asked.teacher))
    return trained.load(asked.teacher, make_mesh("1", 0), **asked.released).config


def plan_of(k: int, config: TrainConfig, mesh: Mesh) -> train.Plan:
    """The step of a round; the k steps of its teacher are a loop, of which it shows one."""
    plan = train.Plan(config, mesh, objective_of(None, None))

    def one_step():
        embedding, dtype, n = len(plan.embedder().mean), train.compute_type(config, mesh), config.batch // config.accumulate
        n -= n // train.slots_of(config).group * always_decoding(config)
        teacher = jax.eval_shape(plan.make(SIZES[config.model]["depth"]), jax.random.key(0))
        z, w = jax.ShapeDtypeStruct((n, config.length, embedding), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.float32)
        ts = jax.ShapeDtypeStruct((2, n), jnp.float32, sharding=NamedSharding(mesh, P(None, ALL)))
        with jax.set_mesh(mesh):
            step = jax.jit(lambda teacher, *args: follow(train.cast(teacher, dtype), *args, keep=lambda z: z))
            return step.lower(shapes_on(teacher, everywhere(mesh)), *(shapes_on(a, by_row(mesh)) for a in (z, z, w)), ts)

    return plan._replace(repeated=((k - 1, one_step),))


def main():
    begun = time.time()
    asked = tyro.cli(Distill, description=__doc__)
    with one_line():
        if asked.preflight:
            return preflight_rounds(asked)
        train.huge_pages()
        join_processes(asked.coordinator, asked.processes, asked.process_id)
        directories = distill(asked)
        show_tables(asked, directories)
    if is_chief():
        print(f"\n{directories[-1].parent}: {(time.time() - begun) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
