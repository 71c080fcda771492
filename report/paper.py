"""Numbers printed in the paper's tables, each with the settings it was measured with.

Pairs are (Gen. PPL, entropy) of 1,000 samples on OpenWebText, judged by GPT-2 Large.
Where the paper prints ±, a number is a pair (mean, standard error). Grids are logit-normal; γ = 0 is the ODE.
"""

from typing import NamedTuple

from report.metrics import Score


class Sampling(NamedTuple):
    """Sampler settings, in the order of the tables' columns."""

    steps: int
    w: float
    gamma: float


def printed(score: Score | None) -> str:
    """Format a number of the paper as it prints it: "-" for none, errors with at least two decimals."""
    if isinstance(score, tuple):
        mean, error = score
        return f"{mean} ± {max(str(error), f'{error:.2f}', key=len)}"
    return "-" if score is None else str(score)


# Table 1, downstream test sets: size, BLEU on WMT14 De-En, ROUGE-1, -2 and -L on XSum.
DOWNSTREAM_SAMPLING, DOWNSTREAM_CFG = Sampling(steps=64, w=1.0, gamma=0.0), 2.0
DOWNSTREAM = {
    "AR": ("99M", 25.2, (30.5, 0.13), (10.2, 0.11), (24.4, 0.12)),
    "MDLM": ("99M", 18.4, (33.4, 0.11), (11.6, 0.10), (25.8, 0.10)),
    "Duo": ("170M (+35M)", 21.3, (31.4, 0.12), (10.1, 0.10), (25.0, 0.12)),
    "E2D2": ("99M", 24.8, (28.4, 0.11), (8.3, 0.09), (22.0, 0.10)),
    "SeqDiffuSeq": ("-", 21.3, 19.3, 1.7, 14.1),
    "CDCD": ("-", 24.9, None, None, None),
    "ELF-B": ("105M (+35M)", 26.4, (36.0, 0.13), (12.2, 0.11), (27.8, 0.12)),
}

# Table 3, the curriculum of distillation: student steps -> teacher steps that each replaces.
CURRICULUM = {16: 4, 8: 8, 4: 16, 2: 32, 1: 64}

# Table 4, few steps after five rounds of distillation: number of steps -> one pair per method.
FEW_STEP_SAMPLING = {steps: Sampling(steps, w=2.5, gamma=1.5) for steps in (1, 2, 4, 8)}
FEW_STEP_SAMPLING |= {steps: Sampling(steps, w=2.0, gamma=2.0) for steps in (16, 32)}
FEW_STEP_METHODS = ("MDLM + SDTT", "Duo + DCD", "FMLM", "ELF + PD")
FEW_STEP = {
    1: ((1260.60, 5.26), (5743.90, 6.02), (168.30, 5.17), (136.10, 5.26)),
    2: ((877.22, 5.34), (891.16, 5.41), (133.29, 5.25), (68.25, 5.24)),
    4: ((339.73, 5.38), (250.86, 5.37), (111.31, 5.26), (34.33, 5.16)),
    8: ((112.66, 5.41), (118.21, 5.41), (86.50, 5.36), (23.18, 5.07)),
    16: ((57.74, 5.39), (78.74, 5.43), (63.63, 5.29), (22.12, 5.06)),
    32: ((40.41, 5.34), (63.98, 5.40), (45.09, 5.25), (21.32, 5.04)),
}

# Table 5, rounds of distillation: student steps of the round -> steps of the sampler -> pair.
ROUNDS_SAMPLING = {steps: Sampling(steps, w=2.5, gamma=1.5) for steps in (1, 2, 4, 8)}
ROUNDS = {
    16: {1: (4.9, 1.72), 2: (119.4, 5.10), 4: (143.4, 5.37), 8: (58.0, 5.26)},
    8: {1: (1.7, 0.64), 2: (171.1, 5.24), 4: (128.6, 5.40), 8: (36.6, 5.24)},
    4: {1: (30.7, 3.60), 2: (153.1, 5.44), 4: (69.0, 5.37), 8: (27.9, 5.20)},
    2: {1: (165.9, 5.35), 2: (92.2, 5.36), 4: (46.1, 5.28), 8: (27.3, 5.19)},
    1: {1: (136.1, 5.26), 2: (68.2, 5.24), 4: (34.3, 5.16), 8: (23.2, 5.07)},
}
DEGENERATE_ENTROPY = 5.0  # The paper calls OpenWebText samples below it degenerate.

# Table 6, sizes: depth, hidden size, heads, parameters, epochs on OpenWebText.
SIZES = {
    "elf-b": (12, 768, 12, "105M", 5),
    "elf-m": (24, 1056, 16, "342M", 4),
    "elf-l": (32, 1280, 16, "652M", 3),
}

# Table 7, ELF-B on OpenWebText.
HYPERPARAMETERS = dict(encoder="T5-small", embedding=512, bottleneck=128, width=768, length=1024)
HYPERPARAMETERS |= dict(t_mean=-1.5, t_std=0.8, noise_scale=2.0, p_mean=0.8, p_std=0.8)
HYPERPARAMETERS |= dict(decode_noise_scale=5.0, p_decode=0.2, p_self_cond=0.5, w_min=0.5, w_max=5.0)
HYPERPARAMETERS |= dict(gamma=1.0, optimizer="Muon", learning_rate=0.002, weight_decay=0.0)
HYPERPARAMETERS |= {"schedule": "constant", "ema": 0.9999, "control tokens of each kind": 4, "epochs": 5}
HYPERPARAMETERS |= {"warm-up epochs": 0.5, "batch": 512, "device": "TPU v5p x 64", "hours an epoch": 1.5}

# Table 8, training tokens: training and distillation as (batch, steps, length), billions, ratio to ELF.
OWT_TOKENS = 9.04e9
TOKENS = {
    "MDLM": ((512, 1_000_000, 1024), None, 524.3, 11.6),
    "Duo": ((512, 1_000_000, 1024), None, 524.3, 11.6),
    "MDLM + SDTT": ((512, 1_000_000, 1024), (512, 5 * 10_000, 1024), 550.5, 12.2),
    "Duo + DCD": ((512, 1_000_000, 1024), (512, 5 * 10_000, 1024), 550.5, 12.2),
    "FLM": ((512, 1_000_000, 1024), None, 524.3, 11.6),
    "FMLM": ((512, 1_000_000, 1024), (512, 100_000, 1024), 576.7, 12.8),
    "LangFlow": ((512, 1_000_000, 1024), None, 524.3, 11.6),
    "ELF-B": (None, None, 45.2, 1.0),  # 5 epochs of OpenWebText
}

# Table 9, system: (PPL, entropy), each a mean and standard error over six seeds.
SYSTEM_SEEDS = range(6)
SYSTEM = {
    Sampling(8, w=3.0, gamma=2.0): ((67.32, 2.25), (5.14, 0.085)),
    Sampling(16, w=3.0, gamma=2.0): ((33.66, 1.09), (5.16, 0.026)),
    Sampling(32, w=3.0, gamma=1.5): ((24.08, 0.16), (5.15, 0.002)),
}

# Table 10, scaling at 64 steps: sampler -> size -> pair; γ 1 is the SDE.
SCALING = {
    Sampling(64, w, gamma): dict(zip(SIZES, pairs, strict=True))
    for gamma, w, *pairs in (
        (1.0, 0.5, (36.77, 5.28), (39.21, 5.35), (37.50, 5.41)),
        (1.0, 1.0, (29.50, 5.23), (33.45, 5.30), (31.82, 5.37)),
        (1.0, 1.5, (25.25, 5.18), (28.42, 5.26), (28.72, 5.35)),
        (1.0, 2.0, (22.53, 5.14), (25.34, 5.23), (26.47, 5.32)),
        (1.0, 3.0, (19.72, 5.10), (21.69, 5.18), (23.31, 5.28)),
        (1.0, 3.5, (37.56, 5.30), (36.48, 5.34), (22.28, 5.27)),
        (1.0, 4.0, (36.50, 5.29), (34.93, 5.33), (21.37, 5.26)),
        (0.0, 0.5, (104.29, 5.51), (88.51, 5.51), (68.27, 5.52)),
        (0.0, 1.0, (65.30, 5.40), (62.47, 5.44), (49.72, 5.45)),
        (0.0, 1.5, (44.85, 5.31), (46.71, 5.37), (39.97, 5.40)),
        (0.0, 2.0, (34.65, 5.23), (37.66, 5.32), (33.72, 5.36)),
        (0.0, 3.0, (26.62, 5.15), (28.80, 5.24), (26.57, 5.29)),
    )
}
