"""`hybrid-kv compile` and `hybrid-kv fit`."""

import argparse
import dataclasses
import json
from pathlib import Path

from hybrid_kv.chipless import pod_report
from hybrid_kv.chipless.fit import fit, fit_table
from hybrid_kv.chipless.pods import pod
from hybrid_kv.chipless.slices import expert_form
from hybrid_kv.chipless.steps import KINDS, Setting
from hybrid_kv.errors import UserError
from hybrid_kv.models.checkpoint_io import load_config
from hybrid_kv.models.config import KimiLinearConfig, experts_over
from hybrid_kv.models.published import NAMES, named
from hybrid_kv.sharding import MeshSpec


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


def setting_of(options: argparse.Namespace) -> Setting:
    """The setting that the flags describe."""
    for field in ("batch", "context", "tokens", "rows_per_rank", "state_slots"):
        if getattr(options, field) < 1:
            raise UserError(field, getattr(options, field), "use at least 1")
    if options.drafts < 0:
        raise UserError("drafts", options.drafts, "use 0 or more")
    model = model_of(options.model)
    model = dataclasses.replace(
        model,
        expert_axes=experts_over(options.experts),
        expert_form=options.expert_form or expert_form(model, pod(options.topology).chip),
    )
    return Setting(
        model=model,
        mesh=MeshSpec.parse(options.mesh or ""),
        rows=options.batch,
        context=options.context,
        tokens=options.tokens,
        drafts=options.drafts,
        rows_per_rank=options.rows_per_rank,
        slots=options.state_slots,
        dtype=options.dtype,
        exchange=options.exchange,
    )


def compile_command(options: argparse.Namespace) -> int:
    """Compiles steps for a slice and prints what came out; exit code 1 if one does not fit."""
    kinds = KINDS if options.step == "all" else (options.step,)
    result = pod_report.report(setting_of(options), pod(options.topology), kinds)
    print(pod_report.as_json(result) if options.json else pod_report.table(result))
    if options.chart is not None:
        pod_report.draw(result, options.chart)
    return 0 if result.fits else 1


def fit_command(options: argparse.Namespace) -> int:
    """Prints the meshes of a slice, the best first."""
    slice_ = pod(options.topology)
    found = fit(setting_of(options), slice_.device, len(slice_.devices))
    if options.json:
        records = [
            {
                "mesh": str(c.setting.mesh), "expert_axes": c.setting.model.expert_axes, "rows": c.setting.rows,
                "held": c.held, "over": c.over, "decode_seconds": c.seconds, "limit": c.limit,
                "tokens_per_second": c.rate, "cached_tokens": c.tokens,
            }
            for c in found
        ]  # fmt: skip
        print(json.dumps(records, indent=2))
    else:
        print(fit_table(found))
    return 0 if not found[0].over else 1
