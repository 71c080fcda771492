"""The train step, compiled for a TPU that is not there: does it fit, what does it cost, how long will it take.

    python train.py --model elf-b --mesh 64 --preflight v5p:4x4x4

The TPU compiler is in the package libtpu and knows the chips by name. It counts the body of a loop once and sees nothing of a
Pallas kernel. So each loop is compiled a second time with two rounds of its body in one, the difference is what a round costs,
and the kernels are counted by their formulas.
"""

import math
import os
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from tqdm import tqdm

from elf import CONTROL_TOKENS, ELF
from errors import Refused
from pretrained import T5Encoder


class Chip(NamedTuple):
    flops: float
    """Peak of bfloat16 matrix products, per second."""
    hbm: float
    """Bytes of memory."""
    bandwidth: float
    """Bytes to and from memory, per second."""
    mxu: int
    """Side of the matrix unit: products with a shorter inner or outer side leave part of it idle."""
    example: str
    accelerator: str
    """What libtpu calls one host of them."""


CHIPS = {
    "v5e": Chip(197e12, 16e9, 819e9, 128, "v5e:4x4", "v5litepod-8"),
    "v5p": Chip(459e12, 95e9, 2_765e9, 128, "v5p:4x4x4", "v5p-8"),
    "v6e": Chip(918e12, 32e9, 1_640e9, 256, "v6e:4x4", "v6e-8"),
}


def topology(name: str) -> tuple[Chip, list]:
    """The kind of chip and the devices that a name such as v5p:4x4x4 stands for."""
    known = f"known are {', '.join(chip.example for chip in CHIPS.values())} and other shapes of these"
    kind = name.split(":")[0]
    if kind not in CHIPS or ":" not in name:
        raise Refused(f"--preflight {name}: unknown TPU; {known}")
    chip = CHIPS[kind]
    jax.config.update("jax_enable_compilation_cache", False)  # What is compiled for absent devices cannot be read back.
    jax.config.update("jax_platforms", "cpu")  # Nothing is to run on whatever accelerator may be here,
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE=chip.accelerator)
    os.environ.update(ALLOW_MULTIPLE_LIBTPU_LOAD="1")  # nor to be kept from others.
    try:
        return chip, topologies.get_topology_desc(name, platform="tpu").devices
    except jax.errors.JaxRuntimeError as error:
        raise Refused(f"--preflight {name}: {str(error).splitlines()[0]}; {known}") from None
    except RuntimeError as error:
        raise Refused(f"--preflight needs the TPU compiler: pip install libtpu ({str(error).splitlines()[0]})") from None


Counts = Counter[str]  # what is counted of a program, by name: flops, bytes, seconds, and what `read_hlo` finds


def compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, Counts]:
    """The program, and what the compiler and its text say of it: loop bodies once, kernels not in flops, bytes and seconds."""
    with tempfile.TemporaryDirectory() as directory:
        program = lowered.compile(compiler_options={"xla_dump_to": directory, "xla_dump_hlo_as_text": True})
        texts = Path(directory).glob("*.after_optimizations.txt")
        counts = read_hlo(max(texts, key=lambda file: file.stat().st_size).read_text())
    found = program.cost_analysis()
    seconds = found["optimal_seconds"]
    seconds += math.ceil(max(0, -seconds))  # The compiler adds -1 for what it cannot estimate.
    counts.update(flops=found["flops"], bytes=found["bytes accessed"], seconds=seconds)
    return program, counts


def counted(plan, layers: int, parts: int) -> tuple[jax.stages.Compiled, float, Counts]:
    """The step, the seconds it took to compile, and its counts with every loop in full.

    In a step, each of the `parts` of a batch goes through the loop over the encoder's layers and those over ELF's `layers`; then
    the optimizer has loops of its own.
    """
    bar = tqdm(desc="compiling", unit="program", total=6 + (parts > 1) + len(plan.repeated), leave=False)
    bar.refresh()

    def count(lowered):
        _, counts = compiled(lowered)
        bar.update()
        return counts

    begun = time.time()
    program, once = compiled(plan.step())
    compile_seconds = time.time() - begun
    bar.update()
    layer = difference(count(plan.step(unroll_layers=2)), once)
    part = difference(count(plan.step(unroll_parts=2)), once) if parts > 1 else Counter()
    encoder, optimizer = (
        difference(count(lower(unroll=True)), count(lower(unroll=False))) for lower in (plan.encoder, plan.optimizer)
    )
    repeated = [(times, count(lower())) for times, lower in plan.repeated]
    bar.close()

    def full(k):
        inner = (layers - 1) * layer[k] + encoder[k] + sum(times * each[k] for times, each in repeated)
        return once[k] + (parts - 1) * part[k] + parts * inner + optimizer[k]

    return program, compile_seconds, Counter({k: full(k) for k in once})


def difference(more: Counts, less: Counts) -> Counts:
    return Counter({k: more[k] - less[k] for k in more})


NUMBER_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def sizes_of(shapes: str) -> list[int]:
    """Bytes of every array whose shape HLO writes here."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
    return [NUMBER_BYTES[kind] * math.prod(map(int, filter(None, n.split(",")))) for kind, n in found if kind in NUMBER_BYTES]


def read_hlo(hlo: str) -> Counts:
    """Collectives and attention kernels in the text of a program; each is a line of its own, wherever it stands."""
    counts = Counter()
    for line in hlo.splitlines():
        if found := re.search(rf" = (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line):
            counts[f"{found[2]} count"] += 1
            counts[f"{found[2]} bytes"] += max(sizes_of(found[1]), default=0) if "-start(" in line else sum(sizes_of(found[1]))
        if "tpu_custom_call" in line and (
            kernel := re.search(r"%(flash|splash_mha_fwd|splash_mha_dkv)\S* = (.*?) custom-call\(", line)
        ):
            operands = re.search(r"operand_layout_constraints={(.*?})}", line)[1]
            rows, heads, *sides = map(int, re.search(r"bf16\[(\d+),(\d+),(\d+),(\d+)\]", operands).groups())
            products = 5 if kernel[1] == "splash_mha_dkv" else 2  # of all pairs of positions
            counts["kernel flops"] += products * 2 * rows * heads * max(sides) ** 2 * min(sides)
            counts["kernel bytes"] += sum(sizes_of(kernel[2])) + sum(sizes_of(operands))
    return counts


def matrices(tree) -> int:
    """Numbers in the weight matrices."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.ndim >= 2)


def useful_flops(model: ELF, encoder: T5Encoder, length: int, passes: float, p_decode: float) -> float:
    """What one row needs: `passes` forwards of ELF, three of the vocabulary head on its share of rows, one of the encoder."""
    depth, width, tokens = model.depth, model.x_norm.weight.size, length + 3 * CONTROL_TOKENS
    layers = [leaf for leaf in jax.tree.leaves((model.blocks.attend, model.blocks.mlp)) if leaf.ndim == 3]
    trunk = 2 * matrices(layers) * tokens + 4 * tokens**2 * width * depth
    ends = 2 * matrices((model.self_cond, model.squeeze, model.expand, model.x_head)) * length
    head = 2 * matrices((model.decode_head, model.unembed)) * length
    encoder_layers = [leaf for leaf in jax.tree.leaves(encoder.blocks) if leaf.ndim == 3]
    inner, encoder_depth = encoder.blocks.attend.q.weight.shape[-1], len(encoder.blocks.norm1.weight)
    encode = 2 * matrices(encoder_layers) * length + 4 * length**2 * inner * encoder_depth
    return passes * (trunk + ends) + 3 * p_decode * head + encode


METHOD = """flops, bytes and seconds are the TPU compiler's own estimate; loop bodies, which it counts once, are multiplied by \
their rounds, a round being the difference to a build with more of them written out; the attention kernels, which it cannot \
see, are added from their shapes in the compiled program, their time at the peak of the matrix unit as far as the width of a \
head fills it. Useful FLOPs for the utilisation leave out padding, unused slots and recomputation."""


def inspect(name: str, plan, *, layers: int, parts: int, chip: Chip, head_dim: int, useful: float) -> dict[str, Any]:
    """Compile the step of a plan and say what it costs a chip; `useful` FLOPs of it are the method's own."""
    program, compile_seconds, counts = counted(plan, layers, parts)
    memory, kernel_flops, kernel_bytes = program.memory_analysis(), counts["kernel flops"], counts["kernel bytes"]
    kernel_seconds = max(kernel_flops / (chip.flops * min(1, head_dim / chip.mxu)), kernel_bytes / chip.bandwidth)
    seconds = counts["seconds"] + kernel_seconds
    sent = [dict(kind=kind, count=counts[f"{kind} count"], bytes=counts[f"{kind} bytes"]) for kind in COLLECTIVES]
    return dict(
        topology=name,
        hbm_state_bytes=memory.argument_size_in_bytes,
        hbm_temp_bytes=memory.temp_size_in_bytes,
        hbm_limit_bytes=chip.hbm,
        fits=memory.argument_size_in_bytes + memory.temp_size_in_bytes <= chip.hbm,
        flops=counts["flops"] + kernel_flops,
        bytes_accessed=counts["bytes"] + kernel_bytes,
        kernel_flops=kernel_flops,
        kernel_bytes=kernel_bytes,
        kernel_seconds=kernel_seconds,
        predicted_seconds=seconds,
        mfu=useful / (seconds * chip.flops),
        collectives=[each for each in sent if each["count"]],
        compile_seconds=compile_seconds,
        method=METHOD,
    )


def print_report(report: dict[str, Any]):
    gb = {key: report[key] / 1e9 for key in ("hbm_state_bytes", "hbm_temp_bytes", "hbm_limit_bytes", "bytes_accessed")}
    fits = "fits" if report["fits"] else "DOES NOT FIT"
    print(f"{report['topology']}, per chip and step:")
    print(f"  memory        {gb['hbm_state_bytes']:.2f} GB state + {gb['hbm_temp_bytes']:.2f} GB temporaries", end="")
    print(f" of {gb['hbm_limit_bytes']:.0f} GB: {fits}")
    print(f"  operations    {report['flops'] / 1e12:.2f} TFLOP, of them {report['kernel_flops'] / 1e12:.2f} in kernels")
    print(f"  traffic       {gb['bytes_accessed']:.1f} GB, of them {report['kernel_bytes'] / 1e9:.1f} in kernels")
    for each in report["collectives"]:
        print(f"  {each['kind']:13} {each['count']} of {each['bytes'] / 1e9:.3f} GB in all")
    print(f"  step          {report['predicted_seconds']:.4f} s predicted, {report['mfu']:.0%} of peak in useful FLOPs")
    print(f"  OpenWebText   {report['owt_epoch_hours']:.2f} h an epoch")
    print(f"  compiled in   {report['compile_seconds']:.0f} s")
    print(f"How: {report['method']}")
