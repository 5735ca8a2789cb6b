"""Settings in files: a model on a slice of a pod, as `configs/slices` has them and `hybrid-kv compile` takes them.

Slices have the names under which they are rented: v5p-8 is 8 cores, 4 chips and as many devices of JAX; tpu7x-8 is 8
chips and 16 devices. All of them are compiled by `scripts/pod_table.py`, for the table of docs/18-pods.md.
"""

import dataclasses
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from hybrid_kv.chipless.pods import pod
from hybrid_kv.chipless.steps import Setting
from hybrid_kv.errors import UserError
from hybrid_kv.models.checkpoint_io import load_config
from hybrid_kv.models.config import KimiLinearConfig, experts_over, kda_over
from hybrid_kv.models.execution import EXCHANGES, RESIDUALS
from hybrid_kv.models.published import NAMES, named
from hybrid_kv.sharding import MeshSpec

CHOICES: dict[str, tuple[str | None, ...]] = {
    "exchange": EXCHANGES,
    "residual": RESIDUALS,
    "expert_form": (None, "plain", "packed", "native"),
    "dtype": ("bfloat16", "float32"),
}
_MOST = 1 << 30  # positions and sizes are 32-bit integers


@dataclass(frozen=True)
class Slice:
    """A model on a slice, field for field as in a file and as the flags of `hybrid-kv compile`.

    Attributes:
      model: one of `models.published.NAMES`, or a folder with a config.json.
      topology: as `pods.pod` takes it.
      mesh: as `MeshSpec.parse` takes it; sizes below are of one of its replicas.
      batch, context, tokens, drafts, rows_per_rank, state_slots, dtype, exchange, residual: see `steps.Setting`.
      experts: spread over the "tensor" group or the whole "mesh".
      kda: heads split over the "tensor" group or "model" alone, or "replicated".
      expert_form: None for as they are stored, where the chip has a kernel for it.
    """

    model: str
    topology: str
    mesh: str = ""
    batch: int = 64
    context: int = 131_072
    tokens: int = 8192
    drafts: int = 3
    rows_per_rank: int = 64
    state_slots: int = 256
    experts: str = "tensor"
    kda: str = "tensor"
    exchange: str = "reduce_scatter"
    residual: str = "replicated"
    expert_form: str | None = None
    dtype: str = "bfloat16"

    def setting(self) -> Setting:
        """What is compiled for it.

        Raises:
          UserError: a value that cannot be, naming the field.
        """
        for field in ("batch", "context", "tokens", "rows_per_rank", "state_slots"):
            if not 1 <= getattr(self, field) < _MOST:
                raise UserError(field, getattr(self, field), "use at least 1 and fewer than 2**30")
        if self.drafts < 0 or self.batch * (1 + self.drafts) >= _MOST:
            fix = f"use 0 or more, for fewer than 2**30 tokens of a verify step of {self.batch} rows"
            raise UserError("drafts", self.drafts, fix)
        for field, choices in CHOICES.items():
            if getattr(self, field) not in choices:
                raise UserError(field, getattr(self, field), f"use one of {', '.join(filter(None, choices))}")
        model = model_of(self.model)
        model = dataclasses.replace(
            model,
            expert_axes=experts_over(self.experts),
            kda_axes=kda_over(self.kda),
            expert_form=self._expert_form(model),
        )
        return Setting(
            model=model,
            mesh=MeshSpec.parse(self.mesh),
            rows=self.batch,
            context=self.context,
            tokens=self.tokens,
            drafts=self.drafts,
            rows_per_rank=self.rows_per_rank,
            slots=self.state_slots,
            dtype=self.dtype,
            exchange=self.exchange,
            residual=self.residual,
        )

    def _expert_form(self, model: KimiLinearConfig) -> str:
        chip = pod(self.topology).chip
        if self.expert_form is None:
            return expert_form(model, chip)
        if self.expert_form != "plain" and chip == "h100":
            raise UserError("expert_form", self.expert_form, "h100 has no kernel for it: use plain")
        if self.expert_form == "native" and chip != "tpu7x":
            raise UserError("expert_form", self.expert_form, f"only tpu7x converts it, not {chip}: use packed or plain")
        return self.expert_form


def slice_names() -> list[str]:
    """Those that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir())


def read_slice(name: str) -> dict[str, Any]:
    """Fields of `Slice` that a file gives.

    Args:
      name: one of `slice_names`, or the path of a file.

    Raises:
      UserError: no such file, or no TOML, or a field that `Slice` does not have or whose type is another.
    """
    packaged = name in slice_names()
    path = _folder() / f"{name}.toml" if packaged else Path(name)
    if not path.is_file():
        raise UserError("slice", name, f"give a TOML file or use one of {', '.join(slice_names())}")
    try:
        found = tomllib.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits and deep lists are no TOML errors
        raise UserError("slice", name, f"the file must be TOML ({error})") from None
    fields = {field.name: int if field.type is int else str for field in dataclasses.fields(Slice)}
    for field, value in found.items():
        if field not in fields:
            raise UserError(f"slice {field}", value, f"use fields among {', '.join(fields)}")
        if type(value) is not fields[field]:
            raise UserError(f"slice {field}", value, f"use {'text' if fields[field] is str else 'a whole number'}")
        if type(value) is int and abs(value) >= 1 << 63:
            raise UserError(f"slice {field}", hex(value)[:20], "use a whole number of 64 bits")
    return found


def _folder() -> Any:
    return resources.files("hybrid_kv") / "configs" / "slices"


def model_of(name: str) -> KimiLinearConfig:
    """A model by its name, or by the folder of a checkpoint.

    Raises:
      UserError: neither.
    """
    if name in NAMES:
        return KimiLinearConfig.from_dict(named(name))
    if (Path(name) / "config.json").is_file():
        return load_config(name)
    raise UserError("model", name, f"use one of {', '.join(NAMES)}, or a folder with a config.json")


def expert_form(model: KimiLinearConfig, chip: str) -> str:
    """As experts are stored, where the chip has a kernel for it that takes their widths."""
    odd = model.expert_input_width % 128 or model.expert_width % 128
    if not model.packed_experts or odd or chip == "h100":
        return "plain"
    return "native" if chip == "tpu7x" else "packed"
