"""The quantisation a configuration states: MXFP4 of the routed experts, or none; any other is refused by name."""

from collections.abc import Mapping
from typing import Any

from hybrid_kv.models.fields import refusal

_FIELD = "quantization_config"
FORMAT = "mxfp4-pack-quantized"
# What the weights of a group have to say where they say it. Absent passes: the format implies it.
_WEIGHTS = {
    "num_bits": (4,),
    "type": ("float",),
    "group_size": (32,),
    "strategy": ("group",),
    "symmetric": (True,),
    "dynamic": (False,),
    "actorder": (None, False),
}


def packed_experts(raw: Mapping) -> bool:
    """Whether routed experts are stored as `weight_packed` and `weight_scale` in the MXFP4 format.

    Which modules are packed follows from the tensor names alone, which the loader compares with those of the model:
    a checkpoint that packs more, or less, than the routed experts does not load.

    Raises:
      UserError: another method or format, other bits or groups, or quantised activations or cache.
    """
    stated = raw.get(_FIELD)
    if stated is None:
        return False
    if not isinstance(stated, Mapping):
        raise refusal(_FIELD, stated, "must be an object, or null")
    _only(stated, _FIELD, "quant_method", ("compressed-tensors",), required=True)
    _only(stated, _FIELD, "format", (FORMAT,), required=True)
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        _only(stated, _FIELD, name, (None, {}))
    groups = stated.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise refusal(f"{_FIELD}.config_groups", groups, "must name at least one group with its weights")
    for name, group in groups.items():
        where = f"{_FIELD}.config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise refusal(where, group, "must be an object with weights")
        _only(group, where, "format", (None, FORMAT))
        for activations in ("input_activations", "output_activations"):
            _only(group, where, activations, (None,))
        for field, allowed in _WEIGHTS.items():
            _only(group["weights"], f"{where}.weights", field, allowed)
    return True


def _only(raw: Mapping, where: str, name: str, allowed: tuple[Any, ...], required: bool = False) -> None:
    """Refuses any other value; an absent field passes unless it is required."""
    value = raw.get(name)
    if name not in raw and not required:
        return
    # Python takes 1 for True and 4.0 for 4.
    if not any(value == entry and type(value) is type(entry) for entry in allowed):
        raise refusal(f"{where}.{name}", value, f"only {' or '.join(map(repr, allowed))} is read")
