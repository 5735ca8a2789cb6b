"""Filling the arrays of the devices piece by piece."""

from collections.abc import Callable, Mapping
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hybrid_kv.models.pieces import Box, Piece, Target
from hybrid_kv.models.sources import Shape
from hybrid_kv.typing import Array


class Placement:
    """Arrays of the parameters on their devices.

    A parameter of several pieces is allocated with the first and updated in place. While one piece travels the next
    may be read, but no third: `put` waits for the one before.
    """

    def __init__(self, table: Mapping[str, Target]) -> None:
        self._table = table
        self._last: tuple[str, ...] = ()
        self.arrays: dict[str, Array] = {}

    def put(self, piece: Piece, parts: Mapping[str, Mapping[Box, np.ndarray]]) -> None:
        """Place a piece: by parameter, the values of each of its boxes (`Piece.boxes`)."""
        self.wait()
        for name in piece.names:
            target = self._table[name]
            local = (*piece.size, *target.local[len(piece.size) :])
            shape = tuple(n * (whole // own) for n, whole, own in zip(local, target.shape, target.local, strict=True))
            shards = [
                jax.device_put(parts[name][box], device)
                for box, devices in piece.boxes(target).items()
                for device in devices
            ]
            values = jax.make_array_from_single_device_arrays(shape, target.sharding, shards)
            if piece.whole:
                self.arrays[name] = values
                continue
            if name not in self.arrays:
                self.arrays[name] = _zeros(target.shape, target.dtype, target.sharding)()
            at = np.array([*piece.start, *[0] * (len(shape) - len(piece.start))], np.int32)
            update = _update(target.sharding.mesh, target.sharding.spec)
            self.arrays[name] = update(self.arrays[name], values, at)
        self._last = piece.names

    def wait(self) -> None:
        """Until the last piece is where it belongs."""
        jax.block_until_ready([self.arrays[name] for name in self._last])


@cache
def _zeros(shape: Shape, dtype: np.dtype, sharding: NamedSharding) -> Callable[[], jax.Array]:
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)


@cache
def _update(mesh: Mesh, spec: PartitionSpec) -> Callable[..., jax.Array]:
    """update(whole, piece, at): every device writes its part of the piece into its part of the whole, in place."""

    def local(whole: jax.Array, piece: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(whole, piece, tuple(at[i] for i in range(whole.ndim)))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=0)
