"""Check what the paper claims of ELF, at a desk: small variants trained on the embedded corpora in several seeds.

    python claims.py                          train, measure and report what is missing; stop and continue at any point
    python claims.py --only bottleneck gamma  some claims
    python claims.py --seeds 6 7 8            more seeds, which verdicts then rest on too
    python claims.py --report                 only write what has been measured so far

Every variant is a run of train.py with the flags told here, two at a time (--jobs), as two cores do more for two networks of this
size than for one. What was measured is kept in claims.json, the report in RESULTS.md between the two lines that name this file,
and a picture for each claim in images/.
"""

import dataclasses
import fcntl
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tyro
from scipy.special import stdtrit
from tqdm import tqdm

import paper
import runs
import settings
import train
import trained
from corpora import digest
from errors import Refused, one_line
from generate import Sampler
from measure import bench_for, measure
from mesh import make_mesh
from metrics import DISTINCT, ENTROPY, EXACT_PERPLEXITY, VALID_SENTENCES, VALID_TEXTS, WORDS, mean_and_error, mean_of

SEEDS = (0, 1, 2)  # of networks and noise: a verdict needs as many, and takes all that there are
BUDGET = "--steps 1000 --num-samples 0 --sample-every 0 --save-every 500"  # for every variant alike
SAMPLES = 1024
TWO_STAGE = "--decoder separate --conditioning adaln-zero"  # the paper's setting for prediction targets
VARIANTS = {
    "base": "",
    "table": "--embeddings table",
    "gaussian": "--embeddings gaussian",
    "learned": "--embeddings learned",
    "separate": "--decoder separate",
    "tiny": "--model tiny",
    "desk-m": "--model desk-m",
    **{
        f"{p}-{width}": f"--prediction {p} --encoder {encoder} --bottleneck {width} {TWO_STAGE}"
        for encoder, width in (("scratch", 128), ("scratch-256", 256))
        for p in ("x", "v", "eps")
    },
    "v-shared": "--prediction v",
    **{f"bottleneck-{n}": f"--bottleneck {n}" for n in (8, 32)},
    **{f"decode-{p}": f"--p-decode {p}" for p in (0.05, 0.5, 0.8)},
    "adaln-zero": "--conditioning adaln-zero",
    **{f"adamw-{rate:g}": f"--optimizer adamw --learning-rate {rate:g}" for rate in (1e-3, 3e-3, 1e-2)},
    "translate": "--data translate",
    "distilled": "--steps 100",  # in each of the five rounds of distill.py; "base" is the teacher
}
PARAMETERS, ENCODER = "parameters", "encoder"
NET_ENTROPY = "entropy - ln(words)"  # Entropy grows with length: a text of n different words has ln(n).
ODE, SDE = Sampler(32, 1.0, 1.0, 0.0), Sampler(32, 1.0, 1.0, 1.0)
RELEASED = dataclasses.replace(SDE, form="released")


class Arm(NamedTuple):
    """One of the things that are compared."""

    label: str
    variant: str
    sampler: Sampler


class Claim(NamedTuple):
    says: str
    where: str
    """In the paper."""
    arms: list[Arm]
    orders: dict[str, list[tuple[str, str]]]
    """By score: pairs of arms, of which the first should have more of it."""
    as_good: bool = False
    """Of valid texts, the first may have fewer than the second by up to MARGIN."""


def arms(variants: str, sampler: Sampler = SDE) -> list[Arm]:
    return [Arm(name, name, sampler) for name in variants.split()]


def vary(label: str, values, variant: str = "base", sampler: Sampler = SDE) -> list[Arm]:
    """The same network with other settings of its sampler."""
    field = {"γ": "gamma"}.get(label, label)
    return [Arm(f"{label} {v:g}", variant, dataclasses.replace(sampler, **{field: float(v)})) for v in values]


def with_steps(name: str, n: int) -> str:
    return f"{name}, {n} step{'s' * (n > 1)}"


def at_steps(steps, *compared: Arm) -> list[Arm]:
    """Those that are compared, side by side at every number of steps."""
    return [
        Arm(with_steps(arm.label, n), arm.variant, dataclasses.replace(arm.sampler, steps=n)) for n in steps for arm in compared
    ]


def each(first: str, second: str, steps) -> list[tuple[str, str]]:
    return [(with_steps(first, n), with_steps(second, n)) for n in steps]


FEW = (4, 8, 16)
DISTILLED = (1, 2, 4, 8)
STUDENT = Sampler(1, paper.ROUNDS_SAMPLING[1].w, 1.0, paper.ROUNDS_SAMPLING[1].gamma)
UNIFORM = dataclasses.replace(ODE, grid="uniform")
CLAIMS = {
    "guidance": Claim(
        "A larger guidance scale lowers perplexity and entropy",
        "Fig. 4",
        vary("w", (0.5, 1, 2, 3), sampler=ODE),
        {score: [("w 0.5", "w 3")] for score in (EXACT_PERPLEXITY, NET_ENTROPY)},
    ),
    "embeddings": Claim(
        "Contextual embeddings are better than tables, a trained table (here the scratch encoder's) better than a Gaussian one, "
        "and a learned one the worst",
        "Fig. 5a",
        [Arm("encoder", "base", ODE), *arms("table gaussian learned", ODE)],
        {  # The last two write hardly a valid text here; by that, they would be equal.
            VALID_TEXTS: [("encoder", "table"), ("encoder", "gaussian"), ("table", "gaussian")],
            VALID_SENTENCES: [("gaussian", "learned")],
        },
    ),
    "decoder": Claim(
        "A decoder that shares the network's weights is as good as a separate one",
        "Fig. 5b",
        [Arm("shared", "base", ODE), *arms("separate", ODE)],
        {VALID_TEXTS: [("shared", "separate")]},
        as_good=True,
    ),
    "samplers": Claim(
        "With few steps, the SDE is better than the ODE",
        "Fig. 5c",
        at_steps(FEW, Arm("SDE", "base", SDE), Arm("ODE", "base", ODE)),
        {VALID_TEXTS: each("SDE", "ODE", FEW)},
    ),
    "samplers-as-released": Claim(
        "The same, with the SDE of the authors' code, which goes on from the re-noised state",
        "Fig. 5c",
        at_steps(FEW, Arm("SDE", "base", RELEASED), Arm("ODE", "base", ODE)),
        {VALID_TEXTS: each("SDE", "ODE", FEW)},
    ),
    "sizes": Claim(
        "A larger network is better",
        "Fig. 6",
        [*arms("tiny"), Arm("desk", "base", SDE), *arms("desk-m")],
        {VALID_TEXTS: [("desk", "tiny"), ("desk-m", "desk")]},
    ),
    "predictions": Claim(
        "Predicting x or v is better than noise and, for wide embeddings, x better than v",
        "Fig. 11",
        [Arm(f"{p}, {width} wide", f"{p}-{width}", ODE) for width in (128, 256) for p in ("x", "v", "eps")],
        {
            VALID_TEXTS: [
                (f"{more}, {width} wide", f"{less}, {width} wide")
                for more, less, width in (("x", "eps", 128), ("v", "eps", 128), ("x", "v", 256), ("v", "eps", 256))
            ]
        },
    ),
    "predictions-shared": Claim(
        "Predicting v is worse than x where the decoder shares the network's weights",
        "Sec. 3.1",
        [Arm("x", "base", ODE), Arm("v", "v-shared", ODE)],
        {VALID_TEXTS: [("x", "v")]},
    ),
    "bottleneck": Claim(
        "A bottleneck of a quarter of the embeddings' width is best",
        "Fig. 12",
        [*arms("bottleneck-8 bottleneck-32"), Arm("as wide as embeddings", "base", SDE)],
        {VALID_TEXTS: [("bottleneck-32", "bottleneck-8"), ("bottleneck-32", "as wide as embeddings")]},
    ),
    "mode": Claim(
        "Denoising four rows of five (decoding 0.2) is best",
        "Fig. 13",
        [*arms("decode-0.05"), Arm("decode-0.2", "base", SDE), *arms("decode-0.5 decode-0.8")],
        {VALID_TEXTS: [("decode-0.2", "decode-0.05"), ("decode-0.2", "decode-0.5"), ("decode-0.2", "decode-0.8")]},
    ),
    "conditioning": Claim(
        "Control tokens are as good as adaLN-Zero, with fewer parameters",
        "Fig. 14",
        [Arm("control tokens", "base", SDE), *arms("adaln-zero")],
        {VALID_TEXTS: [("control tokens", "adaln-zero")], PARAMETERS: [("adaln-zero", "control tokens")]},
        as_good=True,
    ),
    "optimizers": Claim(
        "Muon is better than AdamW in as many steps",
        "Fig. 15",
        [Arm("muon", "base", SDE), *arms("adamw-0.001 adamw-0.003 adamw-0.01")],
        {VALID_TEXTS: [("muon", f"adamw-{rate}") for rate in (0.001, 0.003, 0.01)]},
    ),
    "schedules": Claim(
        "A few steps at logit-normal times are better than at uniform ones",
        "Fig. 16a",
        at_steps(FEW, Arm("logit-normal", "base", ODE), Arm("uniform", "base", UNIFORM)),
        {VALID_TEXTS: each("logit-normal", "uniform", FEW)},
    ),
    "gamma": Claim(
        "Noise re-injected while sampling lowers perplexity and, somewhat, entropy",
        "Fig. 16b",
        vary("γ", (0, 1, 2)),
        {score: [("γ 0", "γ 2")] for score in (EXACT_PERPLEXITY, NET_ENTROPY)},
    ),
    "gamma-as-released": Claim(
        "The same, with the SDE of the authors' code",
        "Fig. 16b",
        vary("γ", (0,)) + vary("γ", (1, 2), sampler=RELEASED),
        {score: [("γ 0", "γ 2")] for score in (EXACT_PERPLEXITY, NET_ENTROPY)},
    ),
    "cfg": Claim(
        "Guidance by the source is best near 2",
        "Fig. 17",
        vary("cfg", (1, 2, 4), "translate", ODE),
        {"BLEU": [("cfg 2", "cfg 1"), ("cfg 2", "cfg 4")]},
    ),
    "distillation": Claim(
        "After distillation, texts of 1 to 8 steps are better",
        "App. B",
        at_steps(DISTILLED, Arm("distilled", "distilled", STUDENT), Arm("base", "base", STUDENT)),
        {VALID_TEXTS: each("distilled", "base", DISTILLED)},
    ),
}


# Runs and measurements

PLACE, KEPT = Path("runs/claims"), Path("claims.json")
COMPILED = {"JAX_COMPILATION_CACHE_DIR": str(PLACE / "compiled")}  # by one seed, for the others
Kept = dict[str, dict[str, Any]]  # scores, by what was measured, and the encoder behind them


def key_of(variant: str, seed: int, sampler: Sampler) -> str:
    """What was measured: it changes with whatever changes the numbers, but for the code."""
    how = [f"{v:g}" if isinstance(v, float) else str(v) for v in dataclasses.astuple(sampler)]
    return " ".join([variant, str(seed), *how, digest([BUDGET, VARIANTS[variant], VARIANTS["base"], SAMPLES])])


def seed_of(key: str) -> int:
    return int(key.split()[1])


def read_kept() -> Kept:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def run_of(variant: str, seed: int) -> Path:
    return PLACE / f"{variant}-{seed}" / ("1" if variant == "distilled" else "")


def command_of(variant: str, seed: int) -> str:
    place = f"--runs {PLACE} --name {variant}-{seed}"
    if variant == "distilled":
        return f"python distill.py --teacher {PLACE}/base-{seed} --num-samples 0 {place} {VARIANTS[variant]}"
    return f"python train.py --seed {seed} {place} {BUDGET} {VARIANTS[variant]}".strip()


def make_run(variant: str, seed: int) -> bool:
    """Train a variant, or go on with it; whether it is finished."""
    command, run = command_of(variant, seed), run_of(variant, seed)
    print(command, flush=True)
    child = subprocess.Popen([sys.executable, *command.split()[1:]], start_new_session=True)
    try:
        child.wait()
    finally:  # Interrupted, it saves before it ends.
        child.terminate()
        child.wait()
    if child.returncode or not (run / "config.json").exists():  # refused, perhaps as a run of other settings is there
        return False
    return runs.is_finished(run)


def missing(variant: str, seed: int, kept: Kept) -> list[Sampler]:
    """How a run has still to be sampled from, for all claims."""
    own = dict.fromkeys(arm.sampler for claim in CLAIMS.values() for arm in claim.arms if arm.variant == variant)
    return [sampler for sampler in own if key_of(variant, seed, sampler) not in kept]


def keep(key: str, scores: dict[str, float]):
    """Several processes add to the same file, one after the other."""
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs.write_whole(KEPT, json.dumps(read_kept() | {key: scores}, indent=1, sort_keys=True) + "\n")


def encoder_of(variant: str, seed: int) -> str:
    """The recipe of the encoder behind a variant, and its weights; trained first, if need be."""
    _, _, *flags = command_of("base" if variant == "distilled" else variant, seed).split()
    config = settings.parse(flags, "")
    corpus = train.load_corpus(config)
    stage, own = train.encoder_stage(config, corpus), config.directory / "encoder"
    train.train_encoder(config, corpus, make_mesh(config.mesh, config.batch))
    weights = (own if own.exists() else stage.directory / "t5") / "model.safetensors"
    return f"{stage.name} {digest(weights.read_bytes().hex())}"


def refuse_mixed(variant: str, seed: int, encoder: str, kept: Kept):
    """What would be trained in vain: differences are those of networks with the same encoder, in the same seed."""
    recipe, _ = encoder.split()
    variants = [{arm.variant for arm in claim.arms} for claim in CLAIMS.values()]
    compared = set().union(*(each for each in variants if variant in each))
    before = {scores[ENCODER] for key, scores in kept.items() if seed_of(key) == seed and key.split()[0] in compared}
    if others := [each for each in before - {encoder} if each.startswith(recipe)]:
        raise Refused(
            f"{KEPT} has numbers of seed {seed} with another encoder ({others[0]}, here {encoder}), as machines and numbers of "
            f"cores round differently: measure other seeds (--seeds), or move {KEPT} away to begin anew"
        )


def do_run(variant: str, seed: int):
    """All that a variant needs in one seed: training, and its samples."""
    encoder = encoder_of(variant, seed)
    refuse_mixed(variant, seed, encoder, read_kept())
    if (variant == "distilled" and not make_run("base", seed)) or not make_run(variant, seed):
        raise Refused(f"{command_of(variant, seed)} did not finish")
    mesh = make_mesh("1", 0)
    bench = bench_for(trained.load(str(run_of(variant, seed)), mesh), mesh, SAMPLES)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(bench.trained.model))
    for sampler in missing(variant, seed, read_kept()):
        scores = {k: mean_of(v) for k, v in measure(bench, sampler, seed).scores.items()}
        keep(key_of(variant, seed, sampler), scores | {PARAMETERS: parameters, ENCODER: encoder})


def my_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count()))


def stay_on(cores: list[int]):
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def start(variant: str, seed: int, said: Path) -> subprocess.Popen:
    """`do_run` in a process of its own, whose words go to a file."""
    command, environment = [sys.executable, __file__, "--run", variant, str(seed)], os.environ | COMPILED
    with said.open("a") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)


def side_by_side(todo: list[tuple[str, int]], jobs: int) -> list[str]:
    """`do_run` for all of them, each on its share of the cores; what those that failed said."""
    cores = my_cores()
    free, running, failed = [cores[i::jobs] for i in range(jobs)], {}, []
    with tqdm(total=len(todo), desc="claims", unit="run") as bar:
        try:
            while todo or running:
                while todo and free:
                    (variant, seed), *todo = todo
                    share, said = free.pop(), PLACE / f"{variant}-{seed}.log"
                    stay_on(share)  # as the process that begins here will
                    running[start(variant, seed, said)] = share, said
                    bar.set_postfix_str(", ".join(said.stem for _, said in running.values()))
                time.sleep(1)
                for child in [child for child in running if child.poll() is not None]:
                    share, said = running.pop(child)
                    free.append(share)
                    failed += [str(said)] * bool(child.returncode)
                    bar.update()
        finally:
            stay_on(cores)
            if running:
                tqdm.write(f"stopping; {len(running)} runs save first")
            for child in running:
                child.terminate()
            for child in running:
                child.wait()
    return failed


def study(claims: list[Claim], seeds: tuple[int, ...], jobs: int) -> list[str]:
    """Do what is missing, seed by seed, so that every claim has numbers early; what the runs that failed said.

    Without seeds, claims that have a verdict are left as they are."""
    kept = read_kept()
    claims = [claim for claim in claims if seeds or verdict(claim, kept).startswith(NOT_RUN)]
    runs_of_all = dict.fromkeys((arm.variant, seed) for seed in seeds or SEEDS for claim in claims for arm in claim.arms)
    todo = [job for job in runs_of_all if missing(*job, kept)]
    PLACE.mkdir(parents=True, exist_ok=True)
    print(f"{len(todo)} runs to make; what each says is in {PLACE}/VARIANT-SEED.log")
    students = [job for job in todo if job[0] == "distilled"]  # last, as they need their teachers
    return side_by_side([job for job in todo if job not in students], jobs) + side_by_side(students, jobs)


# The report

MARGIN = 0.05  # of valid texts, which the first of two that are as good may have fewer
LEVEL = 0.05  # of chance


def scores_of(kept: Kept, arm: Arm, score: str) -> dict[int, Any]:
    """Of an arm in every seed that was measured."""
    keys = {seed: key_of(arm.variant, seed, arm.sampler) for seed in sorted(set(map(seed_of, kept)))}
    found = {seed: kept[key] for seed, key in keys.items() if key in kept}
    if score == NET_ENTROPY:
        return {seed: scores[ENTROPY] - math.log(scores[WORDS]) for seed, scores in found.items()}
    return {seed: scores[score] for seed, scores in found.items()}


def seeds_of(claim: Claim, kept: Kept) -> list[int]:
    """Those in which all arms were measured that were measured at all: others would change means, and not differences."""
    begun = filter(None, (scores_of(kept, arm, ENCODER).keys() for arm in claim.arms))
    return sorted(functools.reduce(set.intersection, map(set, begun), set(map(seed_of, kept))))


HOLDS, FAILS, OPEN, NOT_RUN = "holds", "does not hold at this scale", "inconclusive", "not yet run"


class Difference(NamedTuple):
    """Between two arms in the same seeds."""

    score: str
    pair: tuple[str, str]
    by_seed: dict[int, float]
    verdict: str


def differences(claim: Claim, kept: Kept) -> list[Difference]:
    """What a claim says, pair by pair."""
    found, by_label = [], {arm.label: arm for arm in claim.arms}
    pairs = [(score, pair) for score, pairs in claim.orders.items() for pair in pairs]
    by_chance = sum(score != PARAMETERS for score, _ in pairs)
    for score, pair in pairs:
        (more, less), (one, other) = ([scores_of(kept, by_label[name], what) for name in pair] for what in (score, ENCODER))
        same = [seed for seed in seeds_of(claim, kept) if seed in one and one[seed] == other.get(seed)]
        by_seed = {seed: more[seed] - less[seed] for seed in same}
        least = -MARGIN if claim.as_good and score == VALID_TEXTS else 0.0
        found.append(Difference(score, pair, by_seed, judge([*by_seed.values()], least, by_chance)))
    return found


def judge(values: list[float], least: float, pairs: int) -> str:
    """Whether a mean is above the least it should be, beyond chance; any of the pairs could by chance be below it."""
    if len(values) < len(SEEDS):
        return f"{NOT_RUN} ({len(values)} of {len(SEEDS)} seeds)"
    mean, error = mean_and_error(values)
    above, below = (stdtrit(len(values) - 1, 1 - level) * error for level in (LEVEL, LEVEL / pairs))
    return HOLDS if mean - above > least else FAILS if mean + below < least else OPEN


def verdict(claim: Claim, kept: Kept) -> str:
    """A claim holds if all that it says does, and does not if any of it does not."""
    judged = [difference.verdict for difference in differences(claim, kept)]
    not_run = [each for each in judged if each.startswith(NOT_RUN)]
    return min(not_run) if not_run else next((each for each in (FAILS, OPEN) if each in judged), HOLDS)


def is_begun(claim: Claim, kept: Kept) -> bool:
    return any(scores_of(kept, arm, score) for arm in claim.arms for score in claim.orders)


SHARES = (VALID_TEXTS, VALID_SENTENCES, DISTINCT, "exact matches")


def shown(name: str, values: list[float], share: str = "%", sign: str = "") -> str:
    """Their mean and standard error; `share` is the unit of what is a share."""
    if not values or not all(map(math.isfinite, values)):
        return "-"
    mean, error = mean_and_error(values)
    if name == PARAMETERS:
        return f"{mean:,.0f}"
    scale, digits, unit = (100, 1, share) if name in SHARES else (1, 4 if name == NET_ENTROPY else 3, "")
    spread = f" ± {scale * error:.{digits}f}" if len(values) > 1 else ""
    return f"{scale * mean:{sign}.{digits}f}{spread}{unit}"


def listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds))) or "none"


def shown_difference(difference: Difference) -> str:
    return shown(difference.score, [*difference.by_seed.values()], share=" points", sign="+")


def picture(name: str, claim: Claim, kept: Kept, file: Path):
    """A panel for each score: the mean of every arm with its standard error, and every seed in grey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, PercentFormatter

    n, labels, seeds = len(claim.orders), [arm.label for arm in claim.arms], seeds_of(claim, kept)
    canvas, axes = plt.subplots(1, n, figsize=(1.6 + 4 * n, 1.1 + 0.3 * len(labels)), layout="constrained", squeeze=False)
    for axis, score in zip(axes[0], claim.orders, strict=True):
        found = [scores_of(kept, arm, score) for arm in claim.arms]
        for y, of_arm in enumerate(found):
            values = [of_arm[seed] for seed in seeds if seed in of_arm]
            if values and all(map(math.isfinite, values)):
                mean, error = mean_and_error(values)
                axis.errorbar(mean, y, xerr=error, fmt="o", color="C0", capsize=3)
        for seed in seeds:
            axis.plot([of_arm.get(seed, math.nan) for of_arm in found], range(len(found)), ".-", color="0.75", lw=0.8, zorder=0)
        axis.set(xlabel=score, yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.5, -0.5))
        axis.locator_params(axis="x", nbins=6)
        if score in SHARES or score == PARAMETERS:
            axis.xaxis.set_major_formatter(PercentFormatter(1) if score in SHARES else EngFormatter())
        axis.grid(alpha=0.3)
    canvas.suptitle(f"{name}: {verdict(claim, kept)}", fontsize=9)
    canvas.savefig(file, dpi=110)
    plt.close(canvas)


def table_of(claim: Claim, kept: Kept) -> list[str]:
    """All arms, with more than what decides: a share of valid texts can be bought with dull ones."""
    of_texts = [VALID_TEXTS, VALID_SENTENCES, EXACT_PERPLEXITY, ENTROPY, WORDS, DISTINCT]
    names = ["BLEU", "exact matches"] if "BLEU" in claim.orders else of_texts
    names += [NET_ENTROPY] if NET_ENTROPY in claim.orders else []
    names += [PARAMETERS] if len({n for arm in claim.arms for n in scores_of(kept, arm, PARAMETERS).values()}) > 1 else []
    lines = [f"| | {' | '.join(names)} | seeds |", f"|---|{'---:|' * (len(names) + 1)}"]
    for arm in claim.arms:
        seeds = [seed for seed in seeds_of(claim, kept) if seed in scores_of(kept, arm, ENCODER)]
        found = [[scores_of(kept, arm, name)[seed] for seed in seeds] for name in names]
        lines.append(f"| {arm.label} | {' | '.join(map(shown, names, found))} | {listed(seeds)} |")
    lines += ["", "| difference | of | mean ± standard error | |", "|---|---|---:|---|"]
    for d in differences(claim, kept):
        lines.append(f"| {' − '.join(d.pair)} | {d.score} | {shown_difference(d)} | {d.verdict} |")
    return lines


def row_of(name: str, claim: Claim, kept: Kept) -> str:
    """A claim in one row: what decides it, and the verdict."""
    found = differences(claim, kept)
    told = [f"{' − '.join(d.pair)}: {shown_difference(d)}{f' ({d.score})' * (d.score != VALID_TEXTS)}" for d in found]
    seeds = listed(set.intersection(*(set(d.by_seed) for d in found)))
    return f"| [{claim.says}](#{name}) | {claim.where} | {'<br>'.join(told)} | {seeds} | {verdict(claim, kept)} |"


def same_for_all(arms: list[Arm]) -> str:
    """What their samplers have in common."""
    words = dict(steps="{} steps", w="w {:g}", gamma="γ {:g}")
    values = {field: {getattr(arm.sampler, field) for arm in arms} for field in words}
    return ", ".join(words[field].format(*found) for field, found in values.items() if len(found) == 1)


def introduction() -> str:
    stages = f"five rounds of distill.py with `{VARIANTS['distilled']}`, the embedded translation for guidance by a source"
    stages += f", and {settings.STORIES.decoder_steps:,} steps before ELF's own for a separate decoder"
    return (
        f"`python claims.py`: variants of the embedded default, each a run of train.py with `{BUDGET}` ({stages}), in "
        f"{len(SEEDS)} seeds, or more with `--seeds`; {SAMPLES:,} samples for each number, of {SDE.steps} steps where no others "
        "are told. Perplexity is exact, of the valid texts. A claim holds where all differences that it tells are beyond chance "
        f"by Student's t at {LEVEL:.0%} (one-sided) over the same seeds, and does not where one is beyond it the other way (at "
        f'{LEVEL:.0%} divided by their number). "As good" means not worse by more than {100 * MARGIN:g} points of valid texts. '
        "Entropy is compared less the logarithm of the mean number of words, as longer texts have more. Two kinds of embeddings "
        "write hardly a valid text in this budget and are compared with each other by valid sentences. γ 0 is the ODE. In the "
        "pictures, means with standard errors are blue, and every seed is a grey line."
    )


def report(kept: Kept) -> str:
    head = "| claim | in the paper | differences, of valid texts where nothing else is told | seeds | verdict |"
    rows = [row_of(name, claim, kept) for name, claim in CLAIMS.items()]
    lines = [introduction(), "", head, "|---|---|---|---:|---|", *rows]
    for name, claim in CLAIMS.items():
        lines += ["", f"### {name}", "", f"{claim.says} ({claim.where}): **{verdict(claim, kept)}**.", "", *table_of(claim, kept)]
        lines += ["", f"![{claim.says}](images/claim-{name}.png)"] if is_begun(claim, kept) else []
        lines += ["", f"`python claims.py --only {name}`, sampled with {same_for_all(claim.arms)}. It runs for every seed:", ""]
        seed = min(seeds_of(claim, kept), default=SEEDS[0])
        lines += [f"- `{command_of(variant, seed)}`" for variant in dict.fromkeys(arm.variant for arm in claim.arms)]
    return "\n".join(lines)


def write_report():
    """Into RESULTS.md, in the place of the report before."""
    kept, file = read_kept(), Path("RESULTS.md")
    begin, end = "<!-- claims.py writes from here -->", "<!-- to here -->"
    before, _, rest = file.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise Refused(f"{file}: the report goes between a line {begin} and a line {end}, which are not there")
    runs.write_whole(file, f"{before}{begin}\n\n{report(kept)}\n\n{end}{after}")
    for name, claim in CLAIMS.items():
        file = Path("images") / f"claim-{name}.png"
        picture(name, claim, kept, file) if is_begun(claim, kept) else file.unlink(missing_ok=True)
        print(f"{name:20} {verdict(claim, kept)}")


@dataclass(frozen=True)
class Claims:
    only: tuple[str, ...] = ()
    """Claims to check; all by default."""
    seeds: tuple[int, ...] = ()
    """Seeds of networks and noise; by default the first three, for claims without a verdict."""
    report: bool = False
    """Train and measure nothing: only write the report."""
    jobs: int = min(2, len(my_cores()))
    """Runs at a time, each on its share of the cores."""
    run: tuple[str, int] | None = None
    """Train and measure this variant in this seed, and nothing else."""


def main():
    asked = tyro.cli(Claims, description=__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with one_line():
        if unknown := set(asked.only) - CLAIMS.keys():
            raise Refused(f"--only {' '.join(sorted(unknown))}: unknown; known are {', '.join(CLAIMS)}")
        if asked.run and asked.run[0] not in VARIANTS:
            raise Refused(f"--run {asked.run[0]}: unknown; variants are {', '.join(VARIANTS)}")
        if not 1 <= asked.jobs <= len(my_cores()):
            raise Refused(f"--jobs {asked.jobs}: must be between 1 and the number of cores, {len(my_cores())}")
        train.huge_pages()
        os.chdir(Path(__file__).parent)
        if asked.run:
            return do_run(*asked.run)
        if asked.seeds and min(asked.seeds) < 0:
            raise Refused(f"--seeds {min(asked.seeds)}: must be at least 0")
        failed = [] if asked.report else study([CLAIMS[name] for name in asked.only or CLAIMS], asked.seeds, asked.jobs)
        write_report()
        if failed:
            raise Refused(f"these did not finish, and say why: {', '.join(failed)}. The same command tries them again.")


if __name__ == "__main__":
    main()
