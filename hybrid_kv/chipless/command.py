"""`hybrid-kv compile` and `hybrid-kv fit`."""

import argparse
import dataclasses
import json

from hybrid_kv.chipless import pod_report
from hybrid_kv.chipless.fit import fit, fit_table
from hybrid_kv.chipless.pods import pod
from hybrid_kv.chipless.slices import Slice, read_slice
from hybrid_kv.chipless.steps import KINDS
from hybrid_kv.errors import UserError


def slice_of(options: argparse.Namespace) -> Slice:
    """The fields of the slice file, if one is named, and the flags that are given, which go before them.

    Raises:
      UserError: a field that is in neither and has no default.
    """
    fields = read_slice(options.slice) if options.slice is not None else {}
    for field in dataclasses.fields(Slice):
        value = getattr(options, field.name)
        if value is not None:
            fields[field.name] = value
    for name in ("model", "topology"):
        if name not in fields:
            raise UserError(name, None, f"give --{name}, or a --slice that says it")
    return Slice(**fields)


def compile_command(options: argparse.Namespace) -> int:
    """Compiles steps for a slice and prints what came out; exit code 1 if one does not fit."""
    if options.chart is not None:
        pod_report.check_chart(options.chart)
    kinds = KINDS if options.step == "all" else (options.step,)
    chosen = slice_of(options)
    result = pod_report.report(chosen.setting(), pod(chosen.topology), kinds)
    print(pod_report.as_json(result) if options.json else pod_report.table(result))
    if options.chart is not None:
        pod_report.draw(result, options.chart)
    return 0 if result.fits else 1


def fit_command(options: argparse.Namespace) -> int:
    """Prints the meshes of a slice, the best first."""
    chosen = slice_of(options)
    slice_ = pod(chosen.topology)
    found = fit(chosen.setting(), slice_.device, len(slice_.devices))
    if options.json:
        records = [
            {
                "mesh": str(c.setting.mesh), "expert_axes": c.setting.model.expert_axes,
                "kda_axes": c.setting.model.kda_axes, "residual": c.setting.residual, "rows": c.setting.rows,
                "held": c.held, "over": c.over, "decode_seconds": c.seconds, "limit": c.limit,
                "tokens_per_second": c.rate, "cached_tokens": c.tokens,
            }
            for c in found
        ]  # fmt: skip
        print(json.dumps(records, indent=2))
    else:
        print(fit_table(found))
    return 0 if not found[0].over else 1
