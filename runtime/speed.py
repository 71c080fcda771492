"""Seconds, tokens per second and memory of a network on this machine, part by part, with random weights and data."""

import dataclasses
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import corpora
import data
import losses
import pretrained
import samplers
import scratch
import train
from elf import ELF, SIZES
from errors import Refused
from mesh import make_mesh, place_rows
from settings import PRESETS


@dataclass(frozen=True)
class Speed:
    """Time the parts of a train step and of sampling on this machine, with random weights and data."""

    model: str = "desk"
    """Size of the network."""
    length: int = 32
    """Tokens per row."""
    batch: int = 64
    """Rows per step."""
    vocab: int = 436
    """Tokens of the vocabulary."""
    embedding: int = 128
    """Width of the embeddings."""
    bottleneck: int = 128
    """Width of the bottleneck."""
    encoder_layers: int = 2
    """Layers of the frozen encoder, which is as wide as the embeddings."""
    repeats: int = 10
    """Timed calls of each part; the median is shown."""

    def __call__(self):
        if self.model not in SIZES:
            raise Refused(f"--model {self.model}: unknown; known are {', '.join(SIZES)}")
        config = dataclasses.replace(
            PRESETS["stories"], model=self.model, length=self.length, batch=self.batch, bottleneck=self.bottleneck
        )
        key = jax.random.key(0)
        mesh = make_mesh("1", self.batch)
        unroll = train.best_unroll(config, mesh)
        model = jax.jit(lambda: train.make_model(config, self.vocab, self.embedding, key, unroll))()
        embedder = self.random_embedder(key)
        n, length = self.batch, self.length
        rows = corpora.Rows(jnp.ones((n, length), jnp.int32), jnp.full(n, length), jnp.zeros(n, jnp.int32))
        slots = train.slots_of(config)
        draws, drop = train.draw(config, key, jnp.arange(n), length, self.embedding, slots.group)
        batch = jax.jit(embedder.__call__)(rows, drop)
        optimizer = train.optimizer_of(config, train.in_one_piece(mesh))
        state = train.State(jnp.zeros((), jnp.int32), model, model, optimizer.init(model))
        scales = dict(noise_scale=config.noise_scale, decode_noise_scale=config.decode_noise_scale)

        def forward(model, batch, draws):
            """All rows through the network, and those that decode through the vocabulary head."""
            h = model.trunk(batch.x, batch.x, draws.t, draws.w, draws.t)
            return model.predict(h, batch.x, draws.t), model.logits(losses.take_rows(slots.group, h, slice(0, slots.decode)))

        def gradient(model, batch, draws):
            return jax.grad(lambda model: losses.token_losses(model, batch, draws, slots, **scales).mean())(model)

        steps_16, keys = partial(samplers.sample.__wrapped__, w=1.0, gamma=1.0), jax.random.split(key, n)
        step = train.make_step(config, optimizer, train.make_loss(config, jnp.float32), mesh)
        parts = {
            "forward": (forward, (model, batch, draws)),
            "forward, denoising only": (ELF.denoise, (model, batch.x, batch.x, draws.t, draws.w)),
            "losses and gradients": (gradient, (model, batch, draws)),
            "encoder": (data.Embedder.__call__, (embedder, rows, drop)),
            "optimizer": (optimizer.update, (model, state.optimizer, model)),
            "whole step": (step, (state, embedder, rows, key)),
            "sampling, 16 steps": (steps_16, (model, batch.x, samplers.uniform_grid(16), keys)),
        }
        calls, compile_seconds = {}, {}
        for name, (function, args) in parts.items():
            begun = time.time()
            calls[name] = partial(jax.jit(function).lower(*args).compile(), *args)
            compile_seconds[name] = time.time() - begun
        seconds = self.time(calls)
        print(f"{self.model}, {n} rows of {length} tokens on {jax.device_count()} {jax.devices()[0].device_kind}")
        print(f"{'':24}{'seconds':>10}{'forwards':>10}{'tokens/s':>12}{'compile s':>11}")
        for name, taken in seconds.items():
            row = f"{taken:>10.4f}{taken / seconds['forward']:>10.2f}{n * length / taken:>12,.0f}{compile_seconds[name]:>11.1f}"
            print(f"{name:24}{row}")
        print(f"waiting for data: {self.waiting(calls['whole step'].func, state, embedder, key, mesh):.2%} of the time of a step")
        print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")

    def time(self, calls: dict[str, Callable]) -> dict[str, float]:
        """Median seconds of each call. They take turns, so that a busy moment of the machine falls on all alike; the first call
        of a turn is not counted, as it has to find memory again that the others used."""
        taken = {name: [] for name in calls}
        for _ in range(self.repeats):
            for name, call in calls.items():
                jax.block_until_ready(call())
                begun = time.time()
                jax.block_until_ready(call())
                taken[name].append(time.time() - begun)
        return {name: float(np.median(times)) for name, times in taken.items()}

    def waiting(self, step, state, embedder, key, mesh) -> float:
        """Share of the time that steps wait for their rows, which come from a file by memory map as in training."""
        with tempfile.NamedTemporaryFile() as file:
            np.lib.format.open_memmap(file.name, "w+", np.int32, (100_000, self.length))[:] = 1
            s = np.load(file.name, mmap_mode="r")
            full = np.full(len(s), self.length, np.int32)
            rows = corpora.Rows(s, full, np.zeros_like(full))
            load = lambda i: place_rows(rows, data.batch_indices(len(s), self.batch, 0, i), mesh)  # noqa: E731
            begun, waited, ahead = time.time(), 0.0, data.prefetched(load, 0, self.repeats)
            for _ in range(self.repeats):
                asked = time.time()
                part = next(ahead)
                waited += time.time() - asked
                state, found = step(state, embedder, part, key)
                jax.block_until_ready(found)
            return waited / (time.time() - begun)

    def random_embedder(self, key) -> data.Embedder:
        sizes = dict(vocab_size=self.vocab, d_model=self.embedding, num_layers=self.encoder_layers)
        heads = max(1, self.embedding // 64)
        sizes |= dict(num_heads=heads, d_kv=self.embedding // heads, d_ff=4 * self.embedding, feed_forward_proj="relu")
        encoder = pretrained.t5_from_config(scratch.SMALL | sizes, key)
        return data.Embedder(encoder, jnp.zeros(self.embedding), jnp.ones(self.embedding))
