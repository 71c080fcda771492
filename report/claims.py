"""The paper's claims, checked with small variants that are trained on the embedded corpora in several seeds.

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
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from scipy.special import stdtrit
from tqdm import tqdm

from config import PRESETS, Sampler
from report import metrics, paper
from report.figures import Panel, Point, plot, vary
from report.metrics import DISTINCT, ENTROPY, EXACT_PERPLEXITY, VALID_SENTENCES, VALID_TEXTS, WORDS
from report.tables import markdown_table
from report.texts import bench_for, measure
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
    """A trained variant and a sampler, which a claim compares with others."""

    label: str
    variant: str
    sampler: Sampler


Orders = dict[str, list[tuple[str, ...]]]  # by score: labels of two arms, of which the first should have more


class Claim(NamedTuple):
    arms: list[Arm]
    orders: Orders
    as_good: bool = False
    """Whether the first of two arms may have fewer valid texts, by up to MARGIN."""


def trained(labels: str, sampler: Sampler) -> list[Arm]:
    """Make arms of different variants from `variant; label=variant; …`."""
    pairs = [label.partition("=") for label in labels.split("; ")]
    return [Arm(label, variant or label, sampler) for label, _, variant in pairs]


def sampled(samplers: dict[str, Sampler], variant: str = "base") -> list[Arm]:
    return [Arm(label, variant, sampler) for label, sampler in samplers.items()]


def more(orders: str, *scores: str) -> Orders:
    """Make orders from `first > second; …` for each score, valid texts by default."""
    return {score: [tuple(o.split(" > ")) for o in orders.split("; ")] for score in scores or [VALID_TEXTS]}


def at_steps(compared: list[Arm], steps: Sequence[int] = (4, 8, 16)) -> Claim:
    """Claim that the first of two arms is better at every number of steps."""
    arms = [
        arm._replace(label=f"{arm.label}, {n} step{'s' * (n > 1)}", sampler=replace(arm.sampler, steps=n))
        for n in steps
        for arm in compared
    ]
    labels = [arm.label for arm in arms]
    return Claim(arms, {VALID_TEXTS: list(zip(labels[::2], labels[1::2], strict=True))})


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
CLAIMS = {
    "guidance": Claim(sampled(vary("w", (0.5, 1.0, 2.0, 3.0), ODE)), more("w 0.5 > w 3", *BOTH)),
    "embeddings": Claim(
        trained("encoder=base; table; gaussian; learned", ODE),
        more("encoder > table; encoder > gaussian; table > gaussian")
        | more("gaussian > learned", VALID_SENTENCES),  # as both have hardly any valid text
    ),
    "decoder": Claim(trained("shared=base; separate", ODE), more("shared > separate"), as_good=True),
    "samplers": at_steps([Arm("SDE", "base", SDE), Arm("ODE", "base", ODE)]),
    "samplers-as-released": at_steps([Arm("SDE", "base", RELEASED), Arm("ODE", "base", ODE)]),
    "sizes": Claim(trained("tiny; desk=base; desk-m", SDE), more("desk > tiny; desk-m > desk")),
    "predictions": Claim(
        trained("x-128; v-128; eps-128; x-256; v-256; eps-256", ODE),
        more("x-128 > eps-128; v-128 > eps-128; x-256 > v-256; v-256 > eps-256"),
    ),
    "predictions-shared": Claim(trained("x=base; v=v-shared", ODE), more("x > v")),
    "bottleneck": Claim(
        trained("bottleneck-8; bottleneck-32; as wide as embeddings=base", SDE),
        more("bottleneck-32 > bottleneck-8; bottleneck-32 > as wide as embeddings"),
    ),
    "mode": Claim(
        trained("decode-0.05; decode-0.2=base; decode-0.5; decode-0.8", SDE),
        more("decode-0.2 > decode-0.05; decode-0.2 > decode-0.5; decode-0.2 > decode-0.8"),
    ),
    "conditioning": Claim(
        trained("control tokens=base; adaln-zero", SDE),
        more("control tokens > adaln-zero") | more("adaln-zero > control tokens", PARAMETERS),
        as_good=True,
    ),
    "optimizers": Claim(
        trained("muon=base; adamw-0.001; adamw-0.003; adamw-0.01", SDE),
        more("muon > adamw-0.001; muon > adamw-0.003; muon > adamw-0.01"),
    ),
    "schedules": at_steps([Arm("logit-normal", "base", ODE), Arm("uniform", "base", UNIFORM)]),
    "gamma": Claim(sampled(vary("gamma", (0.0, 1.0, 2.0), SDE)), more("γ 0 > γ 2", *BOTH)),
    "gamma-as-released": Claim(
        sampled(vary("gamma", (0.0,), SDE) | vary("gamma", (1.0, 2.0), RELEASED)), more("γ 0 > γ 2", *BOTH)
    ),
    "cfg": Claim(
        sampled(vary("cfg", (1.0, 2.0, 4.0), ODE), "translate"), more("cfg 2 > cfg 1; cfg 2 > cfg 4", "BLEU")
    ),
    "distillation": at_steps(trained("distilled; base", STUDENT), (1, 2, 4, 8)),
}
ARMS = [arm for claim in CLAIMS.values() for arm in claim.arms]


# Runs and measurements

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
        scores = {name: metrics.mean_of(score) for name, score in scores.items()}
        keep(key_of(variant, seed, sampler), scores | about)


def my_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count()))


def run_all(todo: Sequence[tuple[str, int]], jobs: int) -> list[str]:
    """Do runs in processes, each on its share of the cores; return the logs of those that failed.

    When this process is stopped, it stops the others and waits, as they save first.
    """
    cores, children, stopping, failed = my_cores(), {}, threading.Event(), []
    shares = [cores[i::jobs] for i in range(jobs)]

    def pin():
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, shares.pop())  # of this thread, and so of its processes

    def run(variant: str, seed: int):
        log = PLACE / f"{variant}-{seed}.log"
        command = [sys.executable, "eval.py", "claims", "--run", variant, str(seed)]
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(PLACE / "compiled")}
        with log.open("a") as out:
            child = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
        children[log.stem] = child
        if stopping.is_set():
            child.terminate()
        bar.set_postfix_str(", ".join(children))
        if child.wait():
            failed.append(str(log))
        del children[log.stem]
        bar.update()

    pool = ThreadPoolExecutor(jobs, initializer=pin)
    with tqdm(total=len(todo), desc="claims", unit="run") as bar:
        try:
            for future in [pool.submit(run, *job) for job in todo]:
                future.result()
        finally:
            stopping.set()
            for name, child in list(children.items()):
                tqdm.write(f"stopping {name}, which saves first")
                child.terminate()
            pool.shutdown(cancel_futures=True)
    return failed


def study(names: Sequence[str], seeds: tuple[int, ...], jobs: int) -> list[str]:
    """Do what is missing, seed by seed; return the logs of runs that failed.

    Without seeds, claims that have a verdict are left out.
    """
    kept = read_kept()
    claims = [CLAIMS[name] for name in names if seeds or verdict(CLAIMS[name], kept).startswith(NOT_RUN)]
    every = dict.fromkeys((arm.variant, s) for s in seeds or SEEDS for claim in claims for arm in claim.arms)
    todo = [job for job in every if missing(*job, kept)]
    second = [job for job in todo if job[0] in AFTER_BASE]
    first = dict.fromkeys([job for job in todo if job not in second] + [("base", seed) for _, seed in second])
    PLACE.mkdir(parents=True, exist_ok=True)
    print(f"{len(first) + len(second)} runs to make; their output is in {PLACE}/VARIANT-SEED.log")
    return run_all(list(first), jobs) + run_all(second, jobs)


# The report

MARGIN = 0.05  # of valid texts, by which the first of two that are as good may be worse
LEVEL = 0.05  # of significance
HOLDS, FAILS, OPEN, NOT_RUN = "holds", "does not hold at this scale", "inconclusive", "not yet run"
SHARES = (VALID_TEXTS, VALID_SENTENCES, DISTINCT, "exact matches")


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
    """The difference of a score between two arms in the same seeds."""

    score: str
    pair: str
    by_seed: dict[int, float]
    verdict: str

    def text(self) -> str:
        return shown(self.score, [*self.by_seed.values()], unit=" points", sign="+")


def differences(claim: Claim, kept: Kept) -> list[Difference]:
    """Compare the pairs of a claim, between networks with the same encoder in the same seed."""
    by_arm, found = scores_of(claim, kept), []
    pairs = [(score, pair) for score, pairs in claim.orders.items() for pair in pairs]
    by_chance = sum(score != PARAMETERS for score, _ in pairs)
    for score, pair in pairs:
        more, less = (by_arm[label] for label in pair)
        same = [seed for seed in more if seed in less and more[seed][ENCODER] == less[seed][ENCODER]]
        by_seed = {seed: more[seed][score] - less[seed][score] for seed in same}
        least = -MARGIN if claim.as_good and score == VALID_TEXTS else 0.0
        result = judge([*by_seed.values()], least, by_chance)
        found.append(Difference(score, " − ".join(pair), by_seed, result))
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
    scale, digits, unit = (100, 1, unit) if name in SHARES else (1, 4 if name == NET_ENTROPY else 3, "")
    spread = f" ± {scale * error:.{digits}f}" if len(values) > 1 else ""
    return f"{scale * mean:{sign}.{digits}f}{spread}{unit}"


def picture(name: str, kept: Kept, file: Path):
    """Plot each score of a claim: every arm's mean with its standard error, and every seed in grey."""
    claim, panels = CLAIMS[name], []
    arms = scores_of(claim, kept)
    for score in claim.orders:
        means, by_seed = [], {}
        for y, scores in enumerate(arms.values()):
            for seed, own in scores.items():
                by_seed.setdefault(seed, []).append(Point(own[score], y))
            if scores:
                mean, error = metrics.mean_and_error([own[score] for own in scores.values()])
                means.append(Point(mean, y, error=error))
        grey, percent = [*by_seed.values()], score in SHARES
        panels.append(Panel("", score, "", {"": means}, grey=grey, rows=[*arms], percent=percent))
    size = (4 + 1.6 / len(panels), 1.1 + 0.3 * len(arms))
    plot(file, f"{name}: {verdict(claim, kept)}", panels, size)


def tables_of(claim: Claim, kept: Kept) -> list[str]:
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
    pairs = [[d.pair, d.score, d.text(), d.verdict] for d in differences(claim, kept)]
    heads = ["difference", "of", "mean ± standard error", ""]
    return [markdown_table(["", *names, "seeds"], rows, {0}), "", markdown_table(heads, pairs, {0, 1, 3})]


def listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds))) or "none"


def summary(name: str, kept: Kept) -> list[str]:
    """Format a claim as a row: its differences, their seeds and the verdict."""
    where, says = SAYS[name].split(": ", 1)
    claim, found = CLAIMS[name], differences(CLAIMS[name], kept)
    texts = [f"{d.pair}: {d.text()}" + f" ({d.score})" * (d.score != VALID_TEXTS) for d in found]
    seeds = listed(set.intersection(*(set(d.by_seed) for d in found)))
    return [f"[{says}](#{name})", where, "<br>".join(texts), seeds, verdict(claim, kept)]


def common_settings(arms: list[Arm]) -> str:
    """List the sampler settings that all arms share."""
    words = dict(steps="{} steps", w="w {:g}", gamma="γ {:g}")
    values = {field: {getattr(arm.sampler, field) for arm in arms} for field in words}
    return ", ".join(words[field].format(*own) for field, own in values.items() if len(own) == 1)


RECIPE = f"""\
`python eval.py claims` trains variants of the embedded default with `python train.py {BUDGET}`. Distillation
is five rounds of `python distill.py {VARIANTS["distilled"]}`; a separate decoder has
{PRESETS["stories"].decoder_steps:,} steps of its own first; guidance by a source is measured on the embedded
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
    heads = ["claim", "in the paper", "differences, of valid texts unless noted", "seeds", "verdict"]
    lines = [RECIPE, "", markdown_table(heads, [summary(name, kept) for name in CLAIMS], {0, 1, 2, 4})]
    for name, claim in CLAIMS.items():
        where, says = SAYS[name].split(": ", 1)
        seeds = set().union(*scores_of(claim, kept).values())
        lines += ["", f"### {name}", "", f"{says} ({where}): **{verdict(claim, kept)}**.", ""]
        lines += [*tables_of(claim, kept), ""] + [f"![{says}](images/claim-{name}.png)", ""] * bool(seeds)
        seed, how = min(seeds, default=SEEDS[0]), f"sampled with {common_settings(claim.arms)}"
        lines += [f"`python eval.py claims --only {name}`, {how}. Runs of seed {seed}:", ""]
        lines += [f"- `{command_of(v, seed)}`" for v in dict.fromkeys(arm.variant for arm in claim.arms)]
    return "\n".join(lines)


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
    """Check the paper's claims with small variants, trained in several seeds."""

    only: tuple[str, ...] = ()
    """Claims to check; all by default."""
    seeds: tuple[int, ...] = ()
    """Seeds of networks and noise; by default 0 to 2, for claims without a verdict."""
    report: bool = False
    """Only write the report, from the scores measured so far."""
    jobs: int = min(2, len(my_cores()))
    """Runs at a time, each on its share of the cores."""
    run: tuple[str, int] | None = None
    """Only train and measure this variant in this seed; used by the command itself."""

    def __call__(self):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        for flag, names, known in (("only", self.only, CLAIMS), ("run", (self.run or ())[:1], VARIANTS)):
            if unknown := " ".join(sorted(set(names) - known.keys())):
                raise UserError(f"--{flag} {unknown}: unknown; known are {', '.join(known)}")
        if not 1 <= self.jobs <= len(my_cores()):
            raise UserError(
                f"--jobs {self.jobs}: must be between 1 and {len(my_cores())}, the number of cores"
            )
        if min(self.seeds, default=0) < 0:
            raise UserError(f"--seeds {min(self.seeds)}: must be at least 0")
        os.chdir(Path(__file__).parents[1])
        if self.run:
            return do_run(*self.run)
        failed = [] if self.report else study(self.only or tuple(CLAIMS), self.seeds, self.jobs)
        write_report()
        if failed:
            raise UserError(f"these did not finish: see {', '.join(failed)}, then run the same command again")
