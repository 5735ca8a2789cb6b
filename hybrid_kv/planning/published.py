"""Cache layers of models, as data: published sizes, and one example of three kinds.

Sources: configuration files of Kimi Linear 48B-A3B (arXiv 2510.26692) and Kimi K3 (arXiv 2607.24653) and of its block
draft. bf16 rows and convolution inputs, fp32 states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from hybrid_kv.geometry import GroupKind
from hybrid_kv.planning.layers import LayerSpec, delta_state_bytes, key_value_row_bytes, latent_row_bytes

BF16, FP32 = 2, 4
LATENT_ROW = latent_row_bytes(512, 64, BF16)


def kimi_linear() -> tuple[LayerSpec, ...]:
    """27 layers: 7 MLA (one-based 4, 8, ..., 24 and 27), 20 KDA of 32 heads of 128."""
    return _kimi(layers=27, mla=(*range(3, 24, 4), 26), heads=32)


def kimi_k3() -> tuple[LayerSpec, ...]:
    """93 layers: 24 MLA (one-based 4, 8, ..., 92 and 93), 69 KDA of 96 heads of 128."""
    return _kimi(layers=93, mla=(*range(3, 92, 4), 92), heads=96)


def kimi_k3_with_draft() -> tuple[LayerSpec, ...]:
    """K3 and the five MLA layers of its block draft, whose rows are as wide as the target's."""
    draft = LayerSpec("draft", 0, GroupKind.MLA, LATENT_ROW, draft=True)
    return kimi_k3() + tuple(dataclasses.replace(draft, index=93 + i) for i in range(5))


def kimi_k3_with_replicated_draft() -> tuple[LayerSpec, ...]:
    """The same with the draft's rows on every dcp rank, so that drafting needs no exchange between ranks."""
    return tuple(dataclasses.replace(layer, replicated=layer.draft) for layer in kimi_k3_with_draft())


def full_window_gdn() -> tuple[LayerSpec, ...]:
    """An example, not a published model: six times gdn gdn swa gdn gdn swa gdn full.

    Full: 8 key/value heads of 128. Sliding window of 1,024 tokens: 4 heads of 128. Gated DeltaNet: 32 value and 16
    key heads of 128, convolution of 4.
    """
    full = LayerSpec("full", 0, GroupKind.FULL, key_value_row_bytes(8, 128, 128, BF16), heads=8)
    narrow = key_value_row_bytes(4, 128, 128, BF16)
    window = LayerSpec("swa", 0, GroupKind.SLIDING_WINDOW, narrow, heads=4, window=1024)
    state = delta_state_bytes(32, 128, 128, 4, state_itemsize=FP32, conv_itemsize=BF16, key_heads=16)
    delta = LayerSpec("gdn", 0, GroupKind.RECURRENT, state, heads=16)
    pattern = (delta, delta, window, delta, delta, window, delta, full) * 6
    return tuple(dataclasses.replace(layer, index=index) for index, layer in enumerate(pattern))


MODELS: Mapping[str, Callable[[], tuple[LayerSpec, ...]]] = {
    "kimi-linear": kimi_linear,
    "kimi-k3": kimi_k3,
    "kimi-k3+draft": kimi_k3_with_draft,
    "kimi-k3+replicated-draft": kimi_k3_with_replicated_draft,
    "full+window+gdn": full_window_gdn,
}


def _kimi(layers: int, mla: Collection[int], heads: int) -> tuple[LayerSpec, ...]:
    state = delta_state_bytes(heads, 128, 128, 4, state_itemsize=FP32, conv_itemsize=BF16)
    return tuple(
        LayerSpec("mla", index, GroupKind.MLA, LATENT_ROW)
        if index in mla
        else LayerSpec("kda", index, GroupKind.RECURRENT, state, heads=heads)
        for index in range(layers)
    )
