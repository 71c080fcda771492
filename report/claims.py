"""The paper's claims, checked with small variants trained on the built-in corpora with several seeds.

    python eval.py claims                          train, measure and report what is missing; resumable
    python eval.py claims --only bottleneck gamma  some claims
    python eval.py claims --seeds 6 7 8            more seeds, which verdicts then use too
    python eval.py claims --report                 only write the report

Every variant is a run of train.py or distill.py. Scores are kept in results/claims.json. The report goes into
results/RESULTS.md, between two marker lines, and the pictures of claims into results/images/.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import tyro
from scipy.special import stdtrit
from tqdm import tqdm

from config import PRESETS, Sampler
from report import metrics, paper
from report.figures import Panel, Point, plot, vary
from report.metrics import DISTINCT, ENTROPY, EXACT_PERPLEXITY, VALID_SENTENCES, VALID_TEXTS, WORDS
from report.samples import bench_for, measure
from report.tables import markdown_table
from runtime import checkpoints
from runtime.errors import UserError
from runtime.files import hash_of, lock, unlock, write_file

SEEDS = (0, 1, 2)  # of networks and noise: a verdict needs as many, and uses all there are
BUDGET = "--steps 1000 --num-samples 0 --sample-every 0 --save-every 500"  # of every variant
SAMPLES = 1024
TWO_STAGE = "--decoder separate --conditioning adaln-zero"  # the paper's setting for prediction targets
VARIANTS = {
    "base": "",
    **{kind: f"--embeddings {kind}" for kind in ("table", "gaussian", "learned")},
    "separate": "--decoder separate",
    **{size: f"--model {size}" for size in ("tiny", "desk-m")},
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
    "distilled": "--steps 100",  # in each of the five rounds of distill.py, with "base" as the teacher
}
# Trained after "base", whose weights or encoder they need.
AFTER_BASE = ("distilled", "table", "gaussian", "learned")


class Arm(NamedTuple):
    """Trained variant and sampler, to compare with other arms."""

    label: str
    variant: str
    sampler: Sampler


class Claim(NamedTuple):
    arms: list[Arm]
    orders: dict[str, list[tuple[str, str]]]
    """Pairs of labels by score; the first arm of a pair should have more."""
    as_good: bool = False
    """True if the first of two arms may have fewer valid texts, by up to MARGIN."""


def pairs_of(chains: str) -> list[tuple[str, str]]:
    """Read chains such as `a < b=variant > c, d; …`: arms are labels, and variants where they differ."""
    pairs = []
    for chain in re.sub(r"=[\w-]+", "", chains).split("; "):
        words = re.split(" ([<>]) ", chain)
        for left, sign, right in zip(words[:-1:2], words[1::2], words[2::2], strict=True):
            more, less = (left, right) if sign == ">" else (right, left)
            pairs += product(more.split(", "), less.split(", "))
    return pairs


def trained(sampler: Sampler, chains: str, *others: tuple[str, str], as_good: bool = False) -> Claim:
    """Compare variants by valid texts, and by other scores with chains of their own."""
    orders, variants = {VALID_TEXTS: chains, **dict(others)}, {}
    for word in re.split("; | [<>] |, ", "; ".join(orders.values())):
        label, _, variant = word.partition("=")
        variants.setdefault(label, variant or label)
    arms = [Arm(label, variant, sampler) for label, variant in variants.items()]
    return Claim(arms, {score: pairs_of(own) for score, own in orders.items()}, as_good)


def sampled(samplers: dict[str, Sampler], chains: str, *scores: str, variant: str = "base") -> Claim:
    """Compare samplers of one variant by some scores."""
    arms = [Arm(label, variant, sampler) for label, sampler in samplers.items()]
    return Claim(arms, {score: pairs_of(chains) for score in scores})


def at_steps(first: Arm, second: Arm, steps: Sequence[int] = (4, 8, 16)) -> Claim:
    """Compare two arms at every number of steps."""
    arms, pairs = [], []
    for n in steps:
        many = f"{n} step{'s' * (n > 1)}"
        pair = [Arm(f"{a.label}, {many}", a.variant, replace(a.sampler, steps=n)) for a in (first, second)]
        arms += pair
        pairs.append((pair[0].label, pair[1].label))
    return Claim(arms, {VALID_TEXTS: pairs})


PARAMETERS, ENCODER = "parameters", "encoder"
NET_ENTROPY = "entropy - ln(words)"  # Entropy grows with length: a text of n different words has ln(n).
ODE, SDE = Sampler(32, 1.0, 1.0, 0.0), Sampler(32, 1.0, 1.0, 1.0)
RELEASED, UNIFORM = replace(SDE, form="released"), replace(ODE, grid="uniform")
STUDENT = Sampler(1, paper.ROUNDS_SAMPLING[1].w, 1.0, paper.ROUNDS_SAMPLING[1].gamma)
SAYS = {
    "guidance": "Fig. 4: A larger guidance scale lowers perplexity and entropy",
    "embeddings": "Fig. 5a: Contextual embeddings are better than tables, a trained table (here the scratch "
    "encoder's) better than a Gaussian one, and a learned one the worst",
    "decoder": "Fig. 5b: A decoder that shares the network's weights is as good as a separate one",
    "samplers": "Fig. 5c: With few steps, the SDE is better than the ODE",
    "samplers-as-released": "Fig. 5c: With few steps, the SDE of the authors' code is better than the ODE",
    "sizes": "Fig. 6: A larger network is better",
    "predictions": "Fig. 11: Predicting x or v is better than noise, and x better than v for wide embeddings",
    "predictions-shared": "Sec. 3.1: Predicting v is worse than x if the decoder shares the weights",
    "bottleneck": "Fig. 12: A bottleneck of a quarter of the embeddings' width is best",
    "mode": "Fig. 13: Denoising four rows of five (decoding 0.2) is best",
    "conditioning": "Fig. 14: Control tokens are as good as adaLN-Zero, with fewer parameters",
    "optimizers": "Fig. 15: Muon is better than AdamW in as many steps",
    "schedules": "Fig. 16a: A few steps at logit-normal times are better than at uniform ones",
    "gamma": "Fig. 16b: Noise re-injected while sampling lowers perplexity and, somewhat, entropy",
    "gamma-as-released": "Fig. 16b: Noise re-injected as in the authors' code lowers perplexity and entropy",
    "cfg": "Fig. 17: Guidance by the source is best near 2",
    "distillation": "App. B: After distillation, texts of 1 to 8 steps are better",
}
BOTH = (EXACT_PERPLEXITY, NET_ENTROPY)
FEWER_PARAMETERS = (PARAMETERS, "adaln-zero > control tokens")
FEW_VALID = (VALID_SENTENCES, "gaussian > learned")  # as both have hardly any valid text
GAMMAS = vary("gamma", (0.0, 1.0, 2.0), SDE)
GAMMAS_RELEASED = GAMMAS | vary("gamma", (1.0, 2.0), RELEASED)
DISTILLED = Arm("distilled", "distilled", STUDENT)
CLAIMS = {
    "guidance": sampled(vary("w", (0.5, 1.0, 2.0, 3.0), ODE), "w 0.5 > w 3", *BOTH),
    "embeddings": trained(ODE, "encoder=base > table, gaussian; table > gaussian", FEW_VALID),
    "decoder": trained(ODE, "shared=base > separate", as_good=True),
    "samplers": at_steps(Arm("SDE", "base", SDE), Arm("ODE", "base", ODE)),
    "samplers-as-released": at_steps(Arm("SDE", "base", RELEASED), Arm("ODE", "base", ODE)),
    "sizes": trained(SDE, "tiny < desk=base < desk-m"),
    "predictions": trained(ODE, "x-128, v-128 > eps-128; x-256 > v-256 > eps-256"),
    "predictions-shared": trained(ODE, "x=base > v=v-shared"),
    "bottleneck": trained(SDE, "bottleneck-8 < bottleneck-32 > as wide as embeddings=base"),
    "mode": trained(SDE, "decode-0.05 < decode-0.2=base > decode-0.5, decode-0.8"),
    "conditioning": trained(SDE, "control tokens=base > adaln-zero", FEWER_PARAMETERS, as_good=True),
    "optimizers": trained(SDE, "muon=base > adamw-0.001, adamw-0.003, adamw-0.01"),
    "schedules": at_steps(Arm("logit-normal", "base", ODE), Arm("uniform", "base", UNIFORM)),
    "gamma": sampled(GAMMAS, "γ 0 > γ 2", *BOTH),
    "gamma-as-released": sampled(GAMMAS_RELEASED, "γ 0 > γ 2", *BOTH),
    "cfg": sampled(vary("cfg", (1.0, 2.0, 4.0), ODE), "cfg 1 < cfg 2 > cfg 4", "BLEU", variant="translate"),
    "distillation": at_steps(DISTILLED, Arm("base", "base", STUDENT), (1, 2, 4, 8)),
}
ARMS = [arm for claim in CLAIMS.values() for arm in claim.arms]


PLACE, RESULTS = Path("runs/claims"), Path("results")
KEPT = RESULTS / "claims.json"
Kept = dict[str, dict[str, Any]]  # scores (and the hash of the encoder) by `key_of`


def key_of(variant: str, seed: int, sampler: Sampler) -> str:
    """Name a measurement by the settings that its scores depend on."""
    settings = [f"{v:g}" if isinstance(v, float) else str(v) for v in astuple(sampler)]
    recipe = hash_of([BUDGET, VARIANTS[variant], VARIANTS["base"], SAMPLES])
    return " ".join([variant, str(seed), *settings, recipe])


def read_kept() -> Kept:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def keep(key: str, scores: dict[str, Any]):
    """Add scores to the file, which several processes share."""
    lock(PLACE, wait=True)
    write_file(KEPT, json.dumps(read_kept() | {key: scores}, indent=1, sort_keys=True) + "\n")
    unlock(PLACE)


def run_of(variant: str, seed: int) -> Path:
    return PLACE / f"{variant}-{seed}" / ("1" if variant == "distilled" else "")


def command_of(variant: str, seed: int) -> str:
    name = f"--runs {PLACE} --name {variant}-{seed}"
    if variant == "distilled":
        return f"python distill.py --teacher {PLACE}/base-{seed} --num-samples 0 {name} {VARIANTS[variant]}"
    return f"python train.py --seed {seed} {name} {BUDGET} {VARIANTS[variant]}".strip()


def make_run(variant: str, seed: int):
    """Train a variant, or resume its training."""
    command, run = command_of(variant, seed), run_of(variant, seed)
    print(command, flush=True)
    child = subprocess.Popen([sys.executable, *command.split()[1:]], start_new_session=True)
    try:
        child.wait()
    finally:  # Interrupted, it saves before it ends.
        child.terminate()
        child.wait()
    if child.returncode or not (run / "config.json").exists() or not checkpoints.is_finished(run):
        raise UserError(f"`{command}` did not finish: see its message above")


def missing(variant: str, seed: int, kept: Kept) -> list[Sampler]:
    """List the samplers that claims need from a run and that are not measured yet."""
    samplers = dict.fromkeys(arm.sampler for arm in ARMS if arm.variant == variant)
    return [sampler for sampler in samplers if key_of(variant, seed, sampler) not in kept]


def do_run(variant: str, seed: int):
    """Train a variant in one seed and measure what is missing."""
    make_run(variant, seed)
    # Tables are compared with encoders: they count as the encoder of their seed, which the "base" run has.
    encoder = run_of("base" if "--embeddings" in VARIANTS[variant] else variant, seed) / "embedding.json"
    bench = bench_for(checkpoints.load(str(run_of(variant, seed))), SAMPLES)
    about = {PARAMETERS: sum(leaf.size for leaf in jax.tree.leaves(bench.trained.model))}
    about |= {ENCODER: json.loads(encoder.read_text())["encoder"]}
    for sampler in missing(variant, seed, read_kept()):
        scores = measure(bench, sampler, seed).scores
        means = {name: metrics.mean_of(score) for name, score in scores.items()}
        keep(key_of(variant, seed, sampler), means | about)


def my_cores() -> list[int]:
    can_pin = hasattr(os, "sched_getaffinity")
    return sorted(os.sched_getaffinity(0)) if can_pin else list(range(os.cpu_count()))


def run_all(todo: Sequence[tuple[str, int]], jobs: int) -> list[str]:
    """Do runs in processes, each on its share of the cores; return the logs of those that failed.

    When this process is stopped, it stops the others and waits, as they save first.
    """
    cores, children, stopping = my_cores(), {}, threading.Event()
    shares = [cores[i::jobs] for i in range(jobs)]

    def pin():
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, shares.pop())  # of this thread, and so of its processes

    def run(job: tuple[str, int]) -> str | None:
        name = "{}-{}".format(*job)
        log = PLACE / f"{name}.log"
        command = [sys.executable, "eval.py", "claims", "--run", *map(str, job)]
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(PLACE / "compiled")}
        with log.open("a") as out:
            child = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
        children[name] = child
        if stopping.is_set():
            child.terminate()
        bar.set_postfix_str(", ".join(children))
        failed = child.wait()
        del children[name]
        bar.update()
        return str(log) if failed else None

    pool = ThreadPoolExecutor(jobs, initializer=pin)
    with tqdm(total=len(todo), desc="claims", unit="run") as bar:
        try:
            return [log for log in pool.map(run, todo) if log]
        finally:
            stopping.set()
            for name, child in list(children.items()):
                tqdm.write(f"stopping {name}, which saves first")
                child.terminate()
            pool.shutdown(cancel_futures=True)


def study(names: Sequence[str], seeds: tuple[int, ...], jobs: int) -> list[str]:
    """Do what is missing, seed by seed; return the logs of runs that failed.

    Without seeds, claims that have a verdict are left out.
    """
    kept = read_kept()
    claims = [CLAIMS[name] for name in names if seeds or verdict(CLAIMS[name], kept).startswith(NOT_RUN)]
    every = dict.fromkeys((arm.variant, s) for s in seeds or SEEDS for claim in claims for arm in claim.arms)
    todo = [job for job in every if missing(*job, kept)]
    second = [job for job in todo if job[0] in AFTER_BASE]
    first = list(dict.fromkeys([job for job in todo if job not in second] + [("base", s) for _, s in second]))
    PLACE.mkdir(parents=True, exist_ok=True)
    print(f"{len(first + second)} runs to make; their output is in {PLACE}/VARIANT-SEED.log")
    return run_all(first, jobs) + run_all(second, jobs)


MARGIN = 0.05  # of valid texts, by which the first of two that are as good may be worse
LEVEL = 0.05  # of significance
SETTINGS = {"steps": "{} steps", "w": "w {:g}", "gamma": "γ {:g}"}
HOLDS, FAILS, OPEN, NOT_RUN = "holds", "does not hold at this scale", "inconclusive", "not yet run"


def scores_of(claim: Claim, kept: Kept) -> dict[str, dict[int, dict[str, Any]]]:
    """Collect scores by arm and seed, in the seeds that all measured arms have: others only move means."""
    by_arm, seeds = {}, sorted({int(key.split()[1]) for key in kept})
    for arm in claim.arms:
        keys = {seed: key_of(arm.variant, seed, arm.sampler) for seed in seeds}
        by_arm[arm.label] = {seed: dict(kept[key]) for seed, key in keys.items() if key in kept}
        for scores in by_arm[arm.label].values() if NET_ENTROPY in claim.orders else ():
            scores[NET_ENTROPY] = scores[ENTROPY] - math.log(scores[WORDS])
    common = set(seeds).intersection(*filter(None, by_arm.values()))
    return {label: {s: own[s] for s in sorted(common & own.keys())} for label, own in by_arm.items()}


class Difference(NamedTuple):
    """Difference of a score between two arms in the same seeds."""

    score: str
    pair: str
    by_seed: dict[int, float]
    text: str
    verdict: str


def differences(claim: Claim, kept: Kept) -> list[Difference]:
    """Compare the pairs of a claim, between networks with the same encoder in the same seed."""
    by_arm, found = scores_of(claim, kept), []
    pairs = [(score, pair) for score, pairs in claim.orders.items() for pair in pairs]
    by_chance = sum(score != PARAMETERS for score, _ in pairs)
    for score, pair in pairs:
        more, less = (by_arm[label] for label in pair)
        same = [seed for seed in more if seed in less and more[seed][ENCODER] == less[seed][ENCODER]]
        by_seed = {seed: more[seed][score] - less[seed][score] for seed in same}
        values = [*by_seed.values()]
        least = -MARGIN if claim.as_good and score == VALID_TEXTS else 0.0
        text = shown(score, values, " points", "+")
        found.append(Difference(score, " − ".join(pair), by_seed, text, judge(values, least, by_chance)))
    return found


def judge(values: list[float], least: float, pairs: int) -> str:
    """Test, one-sided, whether a mean is above `least` beyond chance, or below it (one of so many pairs)."""
    if len(values) < len(SEEDS):
        return f"{NOT_RUN} ({len(values)} of {len(SEEDS)} seeds)"
    mean, error = metrics.mean_and_error(values)
    above, below = (stdtrit(len(values) - 1, 1 - level) * error for level in (LEVEL, LEVEL / pairs))
    return HOLDS if mean - above > least else FAILS if mean + below < least else OPEN


def verdict(claim: Claim, kept: Kept) -> str:
    """Judge a claim: it holds if all its differences do, and fails if one fails."""
    verdicts = [difference.verdict for difference in differences(claim, kept)]
    not_run = [each for each in verdicts if each.startswith(NOT_RUN)]
    return min(not_run) if not_run else next((each for each in (FAILS, OPEN) if each in verdicts), HOLDS)


def shown(name: str, values: list[float], unit: str = "%", sign: str = "") -> str:
    """Format the mean and standard error of a score; `unit` is that of shares."""
    if not values or not all(map(math.isfinite, values)):
        return "-"
    mean, error = metrics.mean_and_error(values)
    if name == PARAMETERS:
        return f"{mean:,.0f}"
    scale, digits = (100, 1) if metrics.is_share(name) else (1, 4 if name == NET_ENTROPY else 3)
    spread = f" ± {scale * error:.{digits}f}" if len(values) > 1 else ""
    return f"{scale * mean:{sign}.{digits}f}{spread}{unit if metrics.is_share(name) else ''}"


def picture(name: str, kept: Kept, file: Path):
    """Plot each score of a claim: every arm's mean with its standard error, and every seed in grey."""
    claim, panels = CLAIMS[name], []
    arms = scores_of(claim, kept)
    for score in claim.orders:
        means, by_seed = [], defaultdict(list)
        for y, scores in enumerate(arms.values()):
            for seed, own in scores.items():
                by_seed[seed].append(Point(own[score], y))
            if scores:
                mean, error = metrics.mean_and_error([own[score] for own in scores.values()])
                means.append(Point(mean, y, error=error))
        panels.append(Panel("", score, "", {"": means}, grey=[*by_seed.values()], rows=[*arms]))
    size = (4 + 1.6 / len(panels), 1.1 + 0.3 * len(arms))
    plot(file, f"{name}: {verdict(claim, kept)}", panels, size)


def tables_of(claim: Claim, kept: Kept) -> str:
    """Format the scores of all arms, with more than those that decide, and the differences."""
    by_arm, names = scores_of(claim, kept), ["BLEU", "exact matches"]
    if "BLEU" not in claim.orders:
        names = [VALID_TEXTS, VALID_SENTENCES, EXACT_PERPLEXITY, ENTROPY, WORDS, DISTINCT]
    names += [NET_ENTROPY] if NET_ENTROPY in claim.orders else []
    sizes = {own[PARAMETERS] for scores in by_arm.values() for own in scores.values()}
    names += [PARAMETERS] if len(sizes) > 1 else []
    rows = []
    for label, scores in by_arm.items():
        cells = [shown(name, [own[name] for own in scores.values()]) for name in names]
        rows.append([label, *cells, listed(scores)])
    pairs = [[d.pair, d.score, d.text, d.verdict] for d in differences(claim, kept)]
    heads = ["difference", "of", "mean ± standard error", ""]
    return f"{markdown_table(['', *names, 'seeds'], rows, {0})}\n\n{markdown_table(heads, pairs, {0, 1, 3})}"


def listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds))) or "none"


RECIPE = f"""\
`python eval.py claims` trains variants of the default with `python train.py {BUDGET}`. Distillation
is five rounds of `python distill.py {VARIANTS["distilled"]}`; a separate decoder has
{PRESETS["stories"].decoder_steps:,} steps of its own first; guidance by a source is measured on the built-in
translation. Each number is a mean over {len(SEEDS)} seeds, or more with `--seeds`, and its standard error. It
is measured on {SAMPLES:,} samples, of {SDE.steps} steps unless noted.

A claim holds if all its differences are above zero beyond chance: by Student's t over seeds, one-sided, at
{LEVEL:.0%}. It does not hold if one is below zero beyond chance, at {LEVEL:.0%} divided by their number. "As
good" allows {100 * MARGIN:g} points fewer valid texts. Perplexity is exact, of the valid texts. Longer texts
have more entropy, so it is compared minus the logarithm of the mean number of words. Gaussian and learned
embeddings give hardly any valid text in this budget, so they are compared by valid sentences. γ 0 is the ODE.
In the pictures, means with standard errors are blue, and each seed is a grey line."""


def report(kept: Kept) -> str:
    """Format the introduction, a summary of all claims, and a section for each."""
    rows, sections = [], []
    for name, claim in CLAIMS.items():
        where, says = SAYS[name].split(": ", 1)
        found, result = differences(claim, kept), verdict(claim, kept)
        texts = [f"{d.pair}: {d.text}" + f" ({d.score})" * (d.score != VALID_TEXTS) for d in found]
        compared = set.intersection(*(set(d.by_seed) for d in found))
        rows.append([f"[{says}](#{name})", where, "<br>".join(texts), listed(compared), result])
        seeds = set().union(*scores_of(claim, kept).values())
        shared = {field: {getattr(arm.sampler, field) for arm in claim.arms} for field in SETTINGS}
        how = ", ".join(SETTINGS[field].format(*own) for field, own in shared.items() if len(own) == 1)
        seed = min(seeds, default=SEEDS[0])
        sections += [f"\n### {name}\n\n{says} ({where}): **{result}**.\n\n{tables_of(claim, kept)}\n"]
        sections += [f"![{says}](images/claim-{name}.png)\n"] * bool(seeds)
        sections += [f"`python eval.py claims --only {name}`, sampled with {how}. Runs of seed {seed}:\n"]
        sections += [f"- `{command_of(v, seed)}`" for v in dict.fromkeys(arm.variant for arm in claim.arms)]
    heads = ["claim", "in the paper", "differences, of valid texts unless noted", "seeds", "verdict"]
    return "\n".join([RECIPE, "", markdown_table(heads, rows, {0, 1, 2, 4}), *sections])


def write_report():
    """Replace the report in RESULTS.md, and its pictures."""
    kept, file = read_kept(), RESULTS / "RESULTS.md"
    start, end = "<!-- eval.py claims writes from here -->", "<!-- to here -->"
    before, _, rest = file.read_text().partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise UserError(f"{file} lacks the lines `{start}` and `{end}`: add them")
    write_file(file, f"{before}{start}\n\n{report(kept)}\n\n{end}{after}")
    for name, claim in CLAIMS.items():
        file = RESULTS / "images" / f"claim-{name}.png"
        picture(name, kept, file) if any(scores_of(claim, kept).values()) else file.unlink(missing_ok=True)
        print(f"{name:20} {verdict(claim, kept)}")


@dataclass(frozen=True)
class Claims:
    """Check the paper's claims with small variants, each trained with several seeds."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(help=f"Claims to check, of {', '.join(CLAIMS)}.")] = ()
    seeds: tuple[int, ...] = ()
    """Seeds of networks and noise. By default 0 to 2, only for claims that have no verdict yet."""
    report: bool = False
    """Train and measure nothing: write the report from the scores measured so far."""
    jobs: int = min(2, len(my_cores()))
    """Runs in parallel; each gets an equal share of the cores."""
    run: tuple[str, int] | None = None
    """Internal: train and measure one variant with one seed, in a process of its own."""

    def __call__(self):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        for flag, names, known in (("only", self.only, CLAIMS), ("run", (self.run or ())[:1], VARIANTS)):
            if unknown := " ".join(sorted(set(names) - known.keys())):
                raise UserError(f"--{flag} {unknown}: unknown; known are {', '.join(known)}")
        cores = len(my_cores())
        if not 1 <= self.jobs <= cores:
            raise UserError(f"--jobs {self.jobs}: must be between 1 and {cores}, the number of cores")
        if min(self.seeds, default=0) < 0:
            raise UserError(f"--seeds {min(self.seeds)}: must be at least 0")
        os.chdir(Path(__file__).parents[1])
        if self.run:
            return do_run(*self.run)
        failed = [] if self.report else study(self.only or tuple(CLAIMS), self.seeds, self.jobs)
        write_report()
        if failed:
            raise UserError(f"these did not finish: see {', '.join(failed)}, then run the same command again")
