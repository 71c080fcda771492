"""Seconds, tokens per second and memory of a network on this machine, part by part."""

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import losses
import samplers
from config import PRESETS
from corpora.rows import Rows
from data import Embedder, batch_indices, prefetched
from elf import ELF, SIZES
from encoders import scratch
from encoders.t5 import t5_from_config
from methods.elf import draw_step, elf_method, noise_scales, slots_of
from runtime.errors import UserError
from runtime.mesh import make_mesh, place_rows


@dataclass(frozen=True)
class Speed:
    """Time the parts of a train step and of sampling on this machine, with random weights and data."""

    model: str = "desk"
    """Size of the network, as in train.py."""
    length: int = 32
    """Tokens per row."""
    batch: int = 64
    """Rows per step."""
    vocab: int = 436
    """Tokens in the vocabulary."""
    embedding: int = 128
    """Width of the embeddings."""
    bottleneck: int = 128
    """Width of the bottleneck; 0 for none."""
    encoder_layers: int = 2
    """Layers of the frozen T5 encoder."""
    repeats: int = 10
    """Timed calls of each part; the median is printed."""

    def __call__(self, build: Callable):
        """Print the times; `build` is `train.build`."""
        if self.model not in SIZES:
            raise UserError(f"--model {self.model}: unknown; choose {', '.join(SIZES)}")
        calls, compile_seconds = {}, {}
        for name, (function, args) in self.parts(build).items():
            started = time.time()
            calls[name] = partial(jax.jit(function).lower(*args).compile(), *args)
            compile_seconds[name] = time.time() - started
        seconds = self.time(calls)
        n, device = self.batch * self.length, jax.devices()[0].device_kind
        print(f"{self.model}, {self.batch} rows of {self.length} tokens on {jax.device_count()} {device}")
        print(f"{'':24}{'seconds':>10}{'forwards':>10}{'tokens/s':>12}{'compile s':>11}")
        for name, s in seconds.items():
            compiling = compile_seconds[name]
            print(f"{name:24}{s:>10.4f}{s / seconds['forward']:>10.2f}{n / s:>12,.0f}{compiling:>11.1f}")
        print(f"waiting for data: {self.waiting(calls['whole step']):.2%} of the time of a step")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"peak memory of the process: {peak:.2f} GiB")

    def parts(self, build: Callable) -> dict[str, tuple[Callable, tuple]]:
        """Make the functions to time, with their arguments."""
        n, key, mesh = self.batch, jax.random.key(0), make_mesh("1", self.batch)
        changes = dict(model=self.model, length=self.length, batch=n, bottleneck=self.bottleneck)
        config = replace(PRESETS["stories"], **changes)
        trainer = build(config, elf_method(config, self.vocab, self.embedding, mesh), mesh)
        state, embedder, slots = trainer.init(), self.random_embedder(key), slots_of(config)
        model = state.model
        rows = Rows(jnp.ones((n, self.length), jnp.int32), jnp.full(n, self.length), jnp.zeros(n, jnp.int32))
        draws, drop = draw_step(config, key, jnp.arange(n), self.length, self.embedding, slots.group)
        batch = jax.jit(embedder.__call__)(rows, drop)

        def forward(model, batch, draws):
            """Pass all rows through the network, and the decoder slots through the vocabulary head."""
            h = model.trunk(batch.x, batch.x, draws.t, draws.w, draws.t)
            decoded = losses.take_rows(slots.group, h, slice(0, slots.decode))
            return model.predict(h, batch.x, draws.t), model.logits(decoded)

        def gradient(model, batch, draws):
            token_losses = partial(losses.token_losses, **noise_scales(config))
            return jax.grad(lambda m: token_losses(m, batch, draws, slots).mean())(model)

        sample = partial(samplers.sample.__wrapped__, w=1.0, gamma=1.0)
        start = (batch.x, samplers.uniform_grid(16), jax.random.split(key, n))
        return {
            "forward": (forward, (model, batch, draws)),
            "forward, denoising only": (ELF.denoise, (model, batch.x, batch.x, draws.t, draws.w)),
            "losses and gradients": (gradient, (model, batch, draws)),
            "encoder": (Embedder.__call__, (embedder, rows, drop)),
            "optimizer": (trainer.optimizer.update, (model, state.optimizer, model)),
            "whole step": (trainer.step.__wrapped__, (state, embedder, rows, key)),
            "sampling, 16 steps": (sample, (model, *start)),
        }

    def time(self, calls: dict[str, Callable]) -> dict[str, float]:
        """Time each call: the median of alternating turns, so that a busy moment affects all alike.

        The first call of a turn is not counted, as it has to reclaim memory from the others.
        """
        taken = {name: [] for name in calls}
        for _ in range(self.repeats):
            for name, call in calls.items():
                jax.block_until_ready(call())
                started = time.time()
                jax.block_until_ready(call())
                taken[name].append(time.time() - started)
        return {name: float(np.median(times)) for name, times in taken.items()}

    def waiting(self, call: partial) -> float:
        """Share of the time that steps wait for their rows, read by memory map as in training."""
        state, embedder, _, key = call.args
        with tempfile.NamedTemporaryFile() as file:
            np.lib.format.open_memmap(file.name, "w+", np.int32, (100_000, self.length))[:] = 1
            s = np.load(file.name, mmap_mode="r")
            full, mesh = np.full(len(s), self.length, np.int32), make_mesh("1", self.batch)
            rows = Rows(s, full, np.zeros_like(full))

            def load(i):
                return place_rows(rows, batch_indices(len(s), self.batch, 0, i), mesh)

            started, waited = time.time(), 0.0
            ahead = prefetched(load, 0, self.repeats)
            for _ in range(self.repeats):
                since = time.time()
                part = next(ahead)
                waited += time.time() - since
                state, metrics = call.func(state, embedder, part, key)
                jax.block_until_ready(metrics)
            return waited / (time.time() - started)

    def random_embedder(self, key) -> Embedder:
        """Make an encoder with random weights."""
        width = self.embedding
        heads = max(1, width // 64)
        sizes = dict(vocab_size=self.vocab, d_model=width, num_layers=self.encoder_layers, num_heads=heads)
        sizes |= dict(d_kv=width // heads, d_ff=4 * width, feed_forward_proj="relu")
        encoder = t5_from_config(scratch.SMALL | sizes, key)
        return Embedder(encoder, jnp.zeros(width), jnp.ones(width))
