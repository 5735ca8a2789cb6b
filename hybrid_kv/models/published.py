"""Configurations of models as data: the published sizes, and tiny ones of the same build that tests can run.

The fields of each config.json that say what the model is; those of its vision parts and of training are left out.
"""

import json
from importlib import resources
from typing import Any

from hybrid_kv.errors import UserError

NAMES = ("kimi-linear-48b", "kimi-k3", "tiny-kimi-linear", "tiny-k3")


def named(name: str) -> dict[str, Any]:
    """The config.json of a model in `NAMES`; read it with `KimiLinearConfig.from_dict`.

    Raises:
      UserError: no such model.
    """
    if name not in NAMES:
        raise UserError("model", name, f"use one of: {', '.join(NAMES)}")
    return json.loads((resources.files("hybrid_kv") / "configs" / "models" / f"{name}.json").read_text())
