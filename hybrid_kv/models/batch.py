"""What passes between the runtime and a model: caches and the description of one step.

All are plain tuples of arrays (pytrees) with fixed shapes. Block 0 and slot 0 are null.
"""

from typing import NamedTuple

from hybrid_kv.typing import Array, Float, Int32
from pallas_kernels.rows import RaggedRows


class Caches(NamedTuple):
    """Device pools of a model; donated to a step and returned with the same sharding.

    Shapes are global. Mesh axes are (data, model, dcp); `model x dcp` is the tensor group.

    Plain forms are given; kernels of an accelerator take pages in planes and histories in columns of 128
    channels instead, see `planning.forms`.

    Attributes:
      mla: latent rows, [MLA layers, blocks, shards * rows_per_rank, L + P], axis 2 split over
        "dcp" (each rank sees its own rows_per_rank).
      kda: recurrent states, [KDA layers, slots, H, K, V] fp32 by default, axis 2 split over
        the model's `kda_axes`, by default ("model", "dcp").
      conv: last W - 1 pre-convolution inputs, oldest first, [KDA layers, slots, W - 1, H * 3 * K],
        channels ordered (head, {q, k, v}, K) and split over the same axes.
    """

    mla: Float[Array, "mla_layers B *page"]
    kda: Float[Array, "kda_layers S H K V"]
    conv: Float[Array, "kda_layers S W1 *channels"]


class AttentionInputs(NamedTuple):
    """Block table of the MLA group: global ids, [R, C]; 0 where there is no block."""

    table: Int32[Array, "R C"]


class RecurrentInputs(NamedTuple):
    """State slots of the KDA group, for recurrent and convolution state alike.

    Attributes:
      read: [R] slot of the state before the row; 0 starts from zeros.
      write: [R] slot of the state after the row; 0 drops it.
      emit_position: [R, E] absolute token counts of further saves.
      emit_slot: [R, E] their slots; 0 means none.
    """

    read: Int32[Array, "R"]
    write: Int32[Array, "R"]
    emit_position: Int32[Array, "R E"]
    emit_slot: Int32[Array, "R E"]


class ModelBatch(NamedTuple):
    """One step of a model.

    Attributes:
      tokens: [T] packed token ids; slack may hold anything.
      rows: which tokens belong to which row.
      attention, recurrent: inputs of the two groups.
      logits_index: [Q] packed tokens that want logits; out of range gives the nearest token's.
    """

    tokens: Int32[Array, "T"]
    rows: RaggedRows
    attention: AttentionInputs
    recurrent: RecurrentInputs
    logits_index: Int32[Array, "Q"]
