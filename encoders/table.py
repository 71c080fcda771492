"""Embedding tables in place of an encoder (Appendix E.3): one embedding per token, whatever its context."""

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, Int


def unit(table: Float[Array, "V E"]) -> Float[Array, "V E"]:
    """Normalise every token's embedding to mean 0 and standard deviation 1."""
    return jax.nn.standardize(table, axis=-1)


class Table(eqx.Module):
    """A frozen table with the interface of an encoder."""

    embed: Float[Array, "V E"]

    def __call__(self, s: Int[Array, "N L"], sees: Bool[Array, "N L L"]) -> Float[Array, "N L E"]:
        return self.embed[s]
