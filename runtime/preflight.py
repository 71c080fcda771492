"""The train step, compiled for a TPU that is not there: whether it fits, and what it costs.

    python train.py --model elf-b --mesh 64 --preflight v5p:4x4x4

The TPU compiler is in the package libtpu and knows the chips by name. It counts the body of a loop once and
cannot see into a Pallas kernel. So each loop is compiled a second time with two rounds of its body in one,
the difference is the cost of a round, and kernels are counted by formula.
"""

import math
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh
from tqdm import tqdm

import data
from config import OWT_ROWS, TrainConfig
from corpora.rows import Rows
from elf import CONTROL_TOKENS, ELF, SIZES
from encoders.t5 import T5Encoder
from methods import Method
from methods.elf import elf_method
from runtime.errors import UserError, first_line
from runtime.mesh import ALL, by_row, make_mesh, replicated, shapes_on, shardings


class Chip(NamedTuple):
    flops: float
    """Peak bfloat16 operations per second."""
    hbm: float
    """Bytes of memory."""
    bandwidth: float
    """Bytes to and from memory per second."""
    mxu: int
    """Side of the matrix unit; products with a shorter side leave part of it idle."""
    example: str
    accelerator: str
    """Name of one host in libtpu."""


CHIPS = {
    "v5e": Chip(197e12, 16e9, 819e9, 128, "v5e:4x4", "v5litepod-8"),
    "v5p": Chip(459e12, 95e9, 2_765e9, 128, "v5p:4x4x4", "v5p-8"),
    "v6e": Chip(918e12, 32e9, 1_640e9, 256, "v6e:4x4", "v6e-8"),
}


@lru_cache  # JAX takes the devices of a second topology for others.
def topology(name: str) -> tuple[Chip, list]:
    """Find the chip and the devices of a name such as v5p:4x4x4."""
    known = f"choose {', '.join(chip.example for chip in CHIPS.values())} or other shapes of these"
    kind = name.split(":")[0]
    if kind not in CHIPS or ":" not in name:
        raise UserError(f"--preflight {name}: unknown TPU; {known}")
    chip = CHIPS[kind]
    # Programs for absent devices cannot be read back from the cache. Accelerators of this machine stay free.
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_platforms", "cpu")
    libtpu = dict(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ.update(libtpu, TPU_ACCELERATOR_TYPE=chip.accelerator)
    try:
        return chip, topologies.get_topology_desc(name, platform="tpu").devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--preflight {name}: {first_line(error)}; {known}") from None
    except RuntimeError as error:
        missing = f"there is no TPU compiler ({first_line(error)})"
        raise UserError(f"--preflight {name}: {missing}; pip install libtpu") from None


Counts = Counter[str]  # costs of a program by name: flops, bytes, seconds, and the counts of `read_hlo`


def compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, Counts]:
    """Compile a program and count its costs: loop bodies once, kernels apart from flops and bytes."""
    with tempfile.TemporaryDirectory() as directory:
        program = lowered.compile(compiler_options={"xla_dump_to": directory, "xla_dump_hlo_as_text": True})
        texts = Path(directory).glob("*.after_optimizations.txt")
        counts = read_hlo(max(texts, key=lambda file: file.stat().st_size).read_text())
    costs = program.cost_analysis()
    seconds = costs["optimal_seconds"]
    seconds += math.ceil(max(0, -seconds))  # the compiler adds -1 for what it cannot estimate
    counts.update(flops=costs["flops"], bytes=costs["bytes accessed"], seconds=seconds)
    return program, counts


def counted(plan: "Plan") -> tuple[jax.stages.Compiled, float, Counts]:
    """Compile the step: program, seconds of compilation, and counts with every loop in full.

    Each part of a batch loops over the encoder's layers and over ELF's; the optimizer has its own loops.
    """
    layers, parts = SIZES[plan.config.model]["depth"], plan.config.accumulate
    total = 6 + (parts > 1) + (plan.teacher_steps > 0)
    with tqdm(desc="compiling", unit="program", total=total, leave=False) as bar:

        def count(lowered):
            _, counts = compiled(lowered)
            bar.update()
            return counts

        bar.refresh()
        started = time.time()
        program, once = compiled(plan.step())
        compile_seconds = time.time() - started
        bar.update()
        layer = difference(count(plan.step(unroll_layers=2)), once)
        part = difference(count(plan.step(unroll_parts=2)), once) if parts > 1 else Counter()
        encoder = difference(count(plan.encoder(unroll=True)), count(plan.encoder(unroll=False)))
        optimizer = difference(count(plan.optimizer(unroll=True)), count(plan.optimizer(unroll=False)))
        teacher = count(plan.teacher_step()) if plan.teacher_steps else Counter()

    def full(k):
        inner = (layers - 1) * layer[k] + encoder[k] + (plan.teacher_steps - 1) * teacher[k]
        return once[k] + (parts - 1) * part[k] + parts * inner + optimizer[k]

    return program, compile_seconds, Counter({k: full(k) for k in once})


def difference(more: Counts, less: Counts) -> Counts:
    return Counter({k: more[k] - less[k] for k in more})


NUMBER_BYTES = dict(pred=1, s8=1, u8=1, bf16=2, f16=2, s32=4, u32=4, f32=4, s64=8, u64=8)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def sizes_of(shapes: str) -> list[int]:
    """Count the bytes of every array in a piece of HLO."""
    arrays = re.findall(rf"\b({'|'.join(NUMBER_BYTES)})\[([\d,]*)\]", shapes)
    return [NUMBER_BYTES[kind] * math.prod(map(int, re.findall(r"\d+", sides))) for kind, sides in arrays]


def read_hlo(hlo: str) -> Counts:
    """Count collectives and attention kernels in the text of a program."""
    counts = Counter()
    for line in hlo.splitlines():
        if match := re.search(rf" = (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line):
            counts[f"{match[2]} count"] += 1
            sizes = sizes_of(match[1])
            counts[f"{match[2]} bytes"] += max(sizes, default=0) if "-start(" in line else sum(sizes)
        kernel = re.search(r"%(flash|splash_mha_fwd|splash_mha_dkv)\S* = (.*?) custom-call\(", line)
        if kernel and "tpu_custom_call" in line:
            operands = re.search(r"operand_layout_constraints={(.*?})}", line)[1]
            rows, heads, *sides = map(int, re.search(r"bf16\[(\d+),(\d+),(\d+),(\d+)\]", operands).groups())
            products = 5 if kernel[1] == "splash_mha_dkv" else 2  # of all pairs of positions
            counts["kernel flops"] += products * 2 * rows * heads * max(sides) ** 2 * min(sides)
            counts["kernel bytes"] += sum(sizes_of(kernel[2])) + sum(sizes_of(operands))
    return counts


def products(tree, ndim: int = 2) -> int:
    """Count the operations on a token by weight matrices, which have 3 axes if stacked by layer."""
    return 2 * sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.ndim == ndim)


def useful_flops(model: ELF, encoder: T5Encoder, length: int, passes: float, p_decode: float) -> float:
    """Count the FLOPs of a row in a train step: `passes` through ELF and one through the encoder.

    The vocabulary head runs forward and backward, as 3 passes, on the share of rows that decode.
    """
    width, tokens = model.x_norm.weight.size, length + 3 * CONTROL_TOKENS
    layers = (model.blocks.attend, model.blocks.mlp)
    trunk = products(layers, ndim=3) * tokens + 4 * tokens**2 * width * model.depth
    ends = products((model.self_cond, model.squeeze, model.expand, model.x_head)) * length
    head = products((model.decode_head, model.unembed)) * length
    inner, depth = encoder.blocks.attend.q.weight.shape[-1], len(encoder.blocks.norm1.weight)
    encode = products(encoder.blocks, ndim=3) * length + 4 * length**2 * inner * depth
    return passes * (trunk + ends) + 3 * p_decode * head + encode


class Plan(NamedTuple):
    """The step that `train` would run on a mesh, and its parts, from shapes alone."""

    config: TrainConfig
    build: Callable
    """Builds a trainer from (config, method, mesh); `train.build`."""
    method: Callable = elf_method
    """(config, vocab, width, mesh, unroll) -> Method"""
    frozen: Callable = lambda embedder, network: embedder
    """(embedder, network) -> frozen networks of the loss"""
    teacher: Callable | None = None
    """(network on the mesh, width, mesh) -> one step of a teacher, lowered"""
    teacher_steps: int = 0
    """Passes of a frozen teacher in a step; their loop counts as one in the compiled step."""

    @property
    def mesh(self) -> Mesh:
        return make_mesh(self.config.mesh, self.config.batch, topology(self.config.preflight)[1])

    def embedder(self, unroll: int = 1) -> data.Embedder:
        """Shapes of the embedder on the mesh."""
        _, embedder = data.abstract_embedder(self.config, unroll)
        dtype = data.compute_type(self.config, self.mesh)
        embedder = jax.eval_shape(lambda e: data.cast_encoder(e, dtype), embedder)
        return shapes_on(embedder, replicated(self.mesh))

    def make(self, unroll: int = 1) -> tuple[Method, Any]:
        """Make the method, and the shapes of its network."""
        vocab, embedder = data.abstract_embedder(self.config)
        method = self.method(self.config, vocab, len(embedder.mean), self.mesh, unroll)
        return method, jax.eval_shape(method.make, jax.random.key(0))

    def rows(self, n: int) -> Rows:
        """Shapes of n rows on the mesh."""
        shapes = Rows((n, self.config.length), (n,), (n,))
        return Rows(*(jax.ShapeDtypeStruct(shape, "int32", sharding=by_row(self.mesh)) for shape in shapes))

    def step(self, unroll_layers: int = 1, unroll_parts: int = 1) -> jax.stages.Lowered:
        """Lower the whole step, with some layers or parts of the batch unrolled in each round of the loop."""
        method, network = self.make(unroll_layers)
        trainer = self.build(self.config, method, self.mesh, unroll_parts=unroll_parts)
        key = jax.eval_shape(jax.random.key, 0)
        frozen, key = shapes_on((self.frozen(self.embedder(), network), key), replicated(self.mesh))
        with jax.set_mesh(self.mesh):
            return trainer.step.lower(trainer.state, frozen, self.rows(self.config.batch), key)

    def encoder(self, unroll: bool) -> jax.stages.Lowered:
        """Lower the encoder on one part of the batch."""
        n, embedder = self.config.batch // self.config.accumulate, self.embedder()
        if unroll:
            embedder = self.embedder(len(embedder.encoder.blocks.norm1.weight))
        drop = jax.ShapeDtypeStruct((n,), bool, sharding=by_row(self.mesh))
        with jax.set_mesh(self.mesh):
            return jax.jit(data.Embedder.__call__).lower(embedder, self.rows(n), drop)

    def optimizer(self, unroll: bool) -> jax.stages.Lowered:
        """Lower the optimizer: gradients to updates."""
        method, network = self.make()
        trainer = self.build(self.config, method, self.mesh, unroll_muon=unroll)
        model = shapes_on(network, shardings(network, self.mesh, ALL))
        with jax.set_mesh(self.mesh):
            return jax.jit(trainer.optimizer.update).lower(model, trainer.state.optimizer, model)

    def teacher_step(self) -> jax.stages.Lowered:
        """Lower one step of the teacher, with its layers unrolled."""
        _, network = self.make(SIZES[self.config.model]["depth"])
        return self.teacher(shapes_on(network, replicated(self.mesh)), len(self.embedder().mean), self.mesh)


METHOD = """flops, bytes and seconds are the TPU compiler's own estimate; loop bodies, which it counts once, \
are multiplied by their rounds, a round being the difference to a build with more of them unrolled; the \
attention kernels, which it cannot see, are added from their shapes in the compiled program, their time at \
the peak of the matrix unit as far as the width of a head fills it. Useful FLOPs for the utilisation leave \
out padding, unused slots and recomputation."""


def inspect(plan: Plan) -> dict[str, Any]:
    """Compile the step of a plan and estimate what it costs a chip."""
    config, mesh = plan.config, plan.mesh
    chip, _ = topology(config.preflight)
    _, width, heads = SIZES[config.model].values()
    passes = 3 + (1 - config.p_decode) * (config.p_self_cond + plan.teacher_steps)
    _, network = plan.make()
    row_flops = useful_flops(network, plan.embedder().encoder, config.length, passes, config.p_decode)
    program, compile_seconds, counts = counted(plan)
    memory = program.memory_analysis()
    state_bytes, temp_bytes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    kernel_flops, kernel_bytes = counts["kernel flops"], counts["kernel bytes"]
    peak = chip.flops * min(1, width // heads / chip.mxu)
    kernel_seconds = max(kernel_flops / peak, kernel_bytes / chip.bandwidth)
    seconds = counts["seconds"] + kernel_seconds
    collectives = [
        dict(kind=kind, count=counts[f"{kind} count"], bytes=counts[f"{kind} bytes"])
        for kind in COLLECTIVES
        if counts[f"{kind} count"]
    ]
    return dict(
        topology=config.preflight,
        hbm_state_bytes=state_bytes,
        hbm_temp_bytes=temp_bytes,
        hbm_limit_bytes=chip.hbm,
        fits=state_bytes + temp_bytes <= chip.hbm,
        flops=counts["flops"] + kernel_flops,
        bytes_accessed=counts["bytes"] + kernel_bytes,
        kernel_flops=kernel_flops,
        kernel_bytes=kernel_bytes,
        kernel_seconds=kernel_seconds,
        predicted_seconds=seconds,
        mfu=row_flops * config.batch / mesh.size / (seconds * chip.flops),
        collectives=collectives,
        compile_seconds=compile_seconds,
        method=METHOD,
        owt_epoch_hours=OWT_ROWS / config.batch * seconds / 3600,
    )


def print_costs(costs: dict[str, Any]):
    gb = {key: value / 1e9 for key, value in costs.items() if "bytes" in key}
    fits, mfu = "fits" if costs["fits"] else "DOES NOT FIT", costs["mfu"]
    memory = f"{gb['hbm_state_bytes']:.2f} GB state + {gb['hbm_temp_bytes']:.2f} GB temporaries"
    print(f"""{costs["topology"]}, per chip and step:
  memory        {memory} of {gb["hbm_limit_bytes"]:.0f} GB: {fits}
  operations    {costs["flops"] / 1e12:.2f} TFLOP, of them {costs["kernel_flops"] / 1e12:.2f} in kernels
  traffic       {gb["bytes_accessed"]:.1f} GB, of them {gb["kernel_bytes"]:.1f} in kernels""")
    for each in costs["collectives"]:
        print(f"  {each['kind']:13} {each['count']} of {each['bytes'] / 1e9:.3f} GB in all")
    print(f"""  step          {costs["predicted_seconds"]:.4f} s predicted, {mfu:.0%} of peak in useful FLOPs
  OpenWebText   {costs["owt_epoch_hours"]:.2f} h an epoch
  compiled in   {costs["compile_seconds"]:.0f} s
How: {costs["method"]}""")
