"""The command line: `hybrid-kv generate`, `hybrid-kv replay`, `hybrid-kv describe`, `hybrid-kv plan`,
`hybrid-kv compile`, `hybrid-kv fit`.

Exit codes: 0 done; 1 the engine did wrong (a replay that does not verify); 2 the user can put it right, one
line on stderr says how; 130 interrupted.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.errors import UserError
from hybrid_kv.sharding import MeshSpec

if TYPE_CHECKING:
    from rich.console import Console

    from hybrid_kv.planning import Budget, LayerSpec, Layout, PoolPlan
    from hybrid_kv.runtime.engine import CacheOptions, Engine
    from hybrid_kv.simulate.traces import TraceRequest

# The cache options that every command takes: flag, type, what it says.
CACHE_FLAGS: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("--hash-unit", int, "tokens a prefix is hashed and matched in"),
    ("--rows-per-rank", int, "MLA rows of a block that one dcp rank holds"),
    ("--interleave", int, "neighbouring tokens that stay on one dcp rank"),
    ("--attention-blocks", int, "blocks of the attention pool"),
    ("--state-slots", int, "slots of the recurrent-state pool"),
    ("--max-requests", int, "requests that can be live at once"),
    ("--max-context", int, "longest prompt + answer, in tokens"),
    ("--token-budget", int, "tokens one step computes at most"),
    ("--admission", str, "admit a request when its whole prompt fits (prompt) or when its first chunk does (chunk)"),
    ("--eviction", str, "order in which blocks that nobody holds are given up: joint, tied, coverage or lru"),
)
LIST_FLAGS = (
    ("--ladder", "coarser grids, in tokens, that also get a checkpoint; none for no grid"),
    ("--token-buckets", "step sizes, in tokens, compiled besides the decode step"),
)

# What of a model is spread over which devices, as `Engine.from_checkpoint` takes it: choices, the first of which is the
# default, and what it says.
SPREADS = {
    "experts": (("tensor", "mesh"), "devices that share experts"),
    "kda": (("tensor", "model", "replicated"), "devices that share KDA heads"),
    "residual": (("replicated", "sequence"), "residual stream on a tensor group"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; argparse's own errors raise SystemExit(2)."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has left; stdout must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UserError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or 'file'}: {error.strerror or error}")
    except MemoryError as error:
        return _refuse(f"memory: {error}; choose smaller pools (--attention-blocks, --state-slots)")


def token_list(text: str, field: str = "prompt tokens") -> list[int]:
    """Numbers of "1,2,3"; raises UserError naming `field` if it is anything else."""
    try:
        tokens = [int(token) for token in text.split(",")]
    except ValueError:
        raise UserError(field, text, "give integers with commas between, such as 1,2,3") from None
    return _checked(tokens, field)


def prompt_file(path: Path) -> list[list[int]]:
    """Prompts of a JSON file with a list of tokens or a list of such lists; raises UserError otherwise."""
    fix = "the file must hold a JSON list of token numbers, or a list of such lists"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError("prompt file", str(path), f"must be a readable file ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError("prompt file", str(path), f"{fix} ({error})") from None
    if not isinstance(content, list) or not content:
        raise UserError("prompt file", str(path), fix)
    prompts = content if all(isinstance(prompt, list) for prompt in content) else [content]
    return [_checked(prompt, f"prompt file {path}") for prompt in prompts]


def generate(options: argparse.Namespace) -> int:
    """Prints the tokens of each answer on a line of its own."""
    if options.prompt_file is not None:
        prompts = prompt_file(options.prompt_file)
    else:
        prompts = [token_list(options.prompt_tokens)]
    if options.stream and len(prompts) > 1:
        raise UserError("stream", f"{len(prompts)} prompts", "stream one prompt at a time")
    engine = _engine(options)
    from hybrid_kv.runtime.engine import SamplingParams

    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_tokens=tuple(token_list(options.stop_tokens, "stop tokens")) if options.stop_tokens else (),
        ignore_stop=options.ignore_stop,
    )
    if options.stream:
        for number, token in enumerate(engine.stream(prompts[0], sampling)):
            print(f",{token}" if number else token, end="", flush=True)
        print()
        return 0
    for result in engine.generate(prompts, sampling):
        print(",".join(map(str, result.tokens)))
    return 0


def replay(options: argparse.Namespace) -> int:
    """Replays a trace; see `hybrid_kv.replay`."""
    from hybrid_kv.replay.command import ReplayOptions, run_replay
    from hybrid_kv.replay.contract import ReplayFailure
    from hybrid_kv.simulate.traces import read_trace

    if options.in_flight < 1:
        raise UserError("in-flight", options.in_flight, "use at least 1")
    requests = read_trace(options.trace, options.requests)
    if options.max_context is None:
        options.max_context = max(request.prompt_length + len(request.out) for request in requests)
    if options.max_requests is None:
        options.max_requests = max(options.in_flight, 1)
    _unlimited_pools(options, requests)
    _prepare_devices(options)
    from hybrid_kv.runtime.engine import Engine, SamplingParams

    cache = dataclasses.replace(_cache_options(options), prefix_caching=not options.no_cache)

    def make_engine(prefix_caching: bool) -> "Engine":
        chosen = dataclasses.replace(cache, prefix_caching=prefix_caching and cache.prefix_caching)
        return Engine.from_checkpoint(options.checkpoint, cache=chosen, **_placement(options))

    settings = ReplayOptions(
        trace=str(options.trace),
        checkpoint=str(options.checkpoint),
        mesh=options.mesh,
        grid=cache.hash_unit,
        token_budget=cache.token_budget,
        in_flight=options.in_flight,
        verify=options.verify,
        check_every_step=options.check,
        overlap=options.overlap_sessions,
        out=options.out,
        configuration={
            "dtype": options.dtype,
            **{name: getattr(options, name) for name in SPREADS},
            **dataclasses.asdict(cache),
        },
    )
    try:
        return run_replay(
            settings,
            requests,
            make_engine,
            lambda length: SamplingParams(max_tokens=length, temperature=0.0, ignore_stop=True),
            _console(),
        )
    except ReplayFailure as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1


def _unlimited_pools(options: argparse.Namespace, requests: Sequence["TraceRequest"]) -> None:
    """Pools that hold everything the trace leaves behind, where no size was given: nothing is evicted."""
    cache = _cache_options(options)
    if options.attention_blocks is None:
        longest = -(-options.max_context // cache.hash_unit) + 1
        left = sum((len(request.add) + len(request.out)) // cache.hash_unit + 2 for request in requests)
        options.attention_blocks = left + cache.max_requests * longest
    if options.state_slots is None:
        # Five boundaries and the ladder in a prefill, the end of the answer, the running state.
        options.state_slots = (len(requests) + cache.max_requests) * (7 + len(cache.ladder or (0, 0, 0)))


def describe_command(options: argparse.Namespace) -> int:
    """Prints the geometry of the cache groups, their sharding map and the memory per chip."""
    # From config.json alone: no weights, no devices, so a mesh of a pod can be looked at on a laptop.
    _check_checkpoint(options.checkpoint)
    from hybrid_kv.models.checkpoint_io import load_config
    from hybrid_kv.models.config import experts_over, kda_over
    from hybrid_kv.models.execution import Execution
    from hybrid_kv.models.parameters import check_mesh
    from hybrid_kv.planning import plan_cache
    from hybrid_kv.runtime.describe import cache_shape, describe

    model, mesh = load_config(options.checkpoint), MeshSpec.parse(options.mesh)
    model = dataclasses.replace(model, expert_axes=experts_over(options.experts), kda_axes=kda_over(options.kda))
    check_mesh(model, dataclasses.asdict(mesh))
    multiple = Execution(residual=options.residual).token_multiple(mesh.tensor)
    plan = plan_cache(cache_shape(model, options.dtype), _cache_options(options), mesh, token_multiple=multiple)
    print(describe(model, plan, options.dtype))
    return 0


def plan_command(options: argparse.Namespace) -> int:
    """Prints groups and pools of models whose layers are known, from bytes; see `hybrid_kv.planning`."""
    from hybrid_kv.models.config import kda_over
    from hybrid_kv.planning import Budget, plan_record, plan_table
    from hybrid_kv.planning.published import MODELS
    from hybrid_kv.planning.tables import least_rows_line

    unknown = [name for name in options.model or () if name not in MODELS]
    if unknown:
        raise UserError("model", unknown[0], f"use one of: {', '.join(MODELS)}")
    if not 0 < options.memory < 2**30:
        raise UserError("memory", options.memory, "give GiB of one device, more than 0")
    split = fractions(options.split) if options.split else None
    budget = Budget(int(options.memory * 2**30), options.max_context, retention=options.retention, split=split)
    served, mesh = _served(options), MeshSpec.parse(options.mesh)
    records, text = [], []
    for name in options.model or MODELS:
        layers = _with_states_over(MODELS[name](), kda_over(options.kda))
        text += [name, least_rows_line(layers, mesh)]
        for layout in _layouts(layers, mesh, options):
            plan, horizon = _planned(layout, budget, served, options.live)
            records.append({"model": name, **plan_record(plan), "horizon": horizon})
            text += ["", plan_table(plan)]
            if horizon is not None:
                text.append(f"every pool holds all of any {horizon} successive requests of {len(served)}")
        text.append("")
    print(json.dumps(records, indent=2) if options.json else "\n".join(text).rstrip())
    return 0


def _with_states_over(layers: "Sequence[LayerSpec]", axes: tuple[str, ...]) -> "list[LayerSpec]":
    """The layers, with heads of states split over `axes`."""
    return [dataclasses.replace(layer, state_axes=axes) if layer.recurrent else layer for layer in layers]


def fractions(text: str) -> dict[str, float]:
    """Fractions of "kda=0.1,mla=0.9"; raises UserError if it is anything else."""
    result: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise UserError("split", text, "write fractions as in kda=0.1,mla=0.9") from None
        if name in result:
            raise UserError("split", text, f"it names pool {name!r} twice")
        result[name] = number
    return result


def _planned(
    layout: "Layout", budget: "Budget", served: "Sequence[tuple[Sequence[int], Sequence[int]]]", live: int
) -> "tuple[PoolPlan, int | None]":
    """The sized pools and, with a trace, their horizon; the trace chooses the split unless one is given."""
    from hybrid_kv.cache.config import Placement
    from hybrid_kv.planning import balance, size_pools, trace_demand
    from hybrid_kv.planning.options import default_ladder

    if not served:
        return size_pools(layout, budget), None
    grids = default_ladder(layout.geometry.hash_unit)
    demand = trace_demand(layout, budget, served, placement=Placement(ladder=grids), live=live)
    plan = size_pools(layout, budget if budget.split else balance(demand))
    return plan, demand.horizon(plan.usable)


def _layouts(layers: "Sequence[LayerSpec]", mesh: MeshSpec, options: argparse.Namespace) -> "list[Layout]":
    """The layouts asked for; the unified one with the smallest block there is, and with blocks of whole hash units."""
    from hybrid_kv.planning import BlockOptions, per_shape, unified

    units = BlockOptions(mesh, options.hash_unit, options.rows_per_rank, options.interleave, options.row_multiple)
    wanted = options.layout or ("per-shape" if options.split or options.retention else "all")
    default = [per_shape(layers, units)] if wanted != "unified" else []
    if wanted == "per-shape":
        return default
    return [*default, unified(layers, dataclasses.replace(units, hash_unit=None)), unified(layers, units)]


def _served(options: argparse.Namespace) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Prompts and answers of the trace, none without one."""
    if options.trace is None:
        return []
    from hybrid_kv.simulate.traces import prompts, read_trace

    requests = read_trace(options.trace, options.requests)
    built = prompts(requests, lambda index: requests[index].out)
    return [(prompt.tolist(), request.out) for prompt, request in zip(built, requests, strict=True)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybrid-kv", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("generate", help="answer prompts given as token numbers")
    _add_serving_flags(command)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt-tokens", metavar="1,2,3")
    source.add_argument("--prompt-file", type=Path, help="a JSON list of tokens, or a list of such lists")
    command.add_argument("--max-tokens", type=int, default=16)
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    command.add_argument("--top-k", type=int, default=0, help="0 keeps all")
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--stop-tokens", metavar="1,2,3", help="beside those of the checkpoint")
    command.add_argument("--ignore-stop", action="store_true", help="always generate --max-tokens")
    command.add_argument("--stream", action="store_true", help="print tokens as they come")
    command.set_defaults(command=generate)

    command = commands.add_parser("replay", help="serve a token trace, report hits, verify answers")
    _add_serving_flags(command)
    command.add_argument("--trace", type=Path, required=True, help=".jsonl or .jsonl.gz token trace")
    command.add_argument("--requests", type=int, help="only the first so many (all)")
    command.add_argument("--in-flight", type=int, default=8, help="requests kept live (%(default)s)")
    command.add_argument("--no-cache", action="store_true", help="serve without prefix caching")
    command.add_argument(
        "--overlap-sessions", action="store_true", help="run requests of one session side by side where they can"
    )
    command.add_argument("--check", action="store_true", help="check the cache's invariants after every step")
    command.add_argument("--verify", action="store_true", help="compare with the run without the cache")
    command.add_argument("--out", type=Path, help="folder for report.json and report.png")
    command.set_defaults(command=replay)

    command = commands.add_parser("describe", help="geometry, sharding map and memory per chip")
    _add_model_flags(command)
    command.set_defaults(command=describe_command)

    command = commands.add_parser("plan", help="groups, pools and bytes of models whose layers are known")
    command.add_argument("--model", action="append", metavar="NAME", help="one of the known models (all of them)")
    command.add_argument("--layout", choices=("per-shape", "unified", "all"), help="pools by row shape, one pool, both")
    command.add_argument("--mesh", default="model=1", help='such as "model=2,dcp=4" (%(default)s)')
    command.add_argument("--kda", choices=SPREADS["kda"][0], default="tensor", help=SPREADS["kda"][1] + " (tensor)")
    command.add_argument("--memory", type=float, default=40.0, help="GiB of one device for all pools (%(default)s)")
    command.add_argument("--max-context", type=int, default=131_072, help="tokens of a request (%(default)s)")
    command.add_argument("--hash-unit", type=int, default=64, help="tokens a prefix is matched in (%(default)s)")
    command.add_argument("--rows-per-rank", type=int, help="rows of a block that one dcp rank holds")
    command.add_argument("--interleave", type=int, default=1, help="neighbouring tokens that stay on one dcp rank")
    command.add_argument("--row-multiple", type=int, default=1, help="rows of a unified block are a multiple of it")
    command.add_argument("--split", metavar="kda=0.1,mla=0.9", help="fractions of the memory by pool")
    command.add_argument("--retention", type=int, help="tokens between states that are always kept")
    command.add_argument("--trace", type=Path, help="choose the split from this .jsonl or .jsonl.gz token trace")
    command.add_argument("--requests", type=int, help="only the first so many of the trace (all)")
    command.add_argument("--live", type=int, default=1, help="requests in flight at once (%(default)s)")
    command.add_argument("--json", action="store_true", help="print a JSON list of the plans")
    command.set_defaults(command=plan_command)

    command = commands.add_parser("compile", help="compile steps of a model for a slice of a pod, with no chip")
    _add_pod_flags(command)
    command.add_argument("--slice", metavar="NAME", help="a file of configs/slices, or another; flags go before it")
    command.add_argument("--mesh", help='over all devices, such as "model=4,dcp=4"')
    command.add_argument("--step", choices=("decode", "prefill", "verify", "all"), default="all")
    command.add_argument("--chart", type=Path, help="write a chart of memory and least times to this file")
    command.set_defaults(command=compile_command)

    command = commands.add_parser("fit", help="rank the meshes of a slice for a model")
    _add_pod_flags(command)
    command.set_defaults(command=fit_command, mesh=None, slice=None)
    return parser


def compile_command(options: argparse.Namespace) -> int:
    """See `hybrid_kv.chipless.command`."""
    from hybrid_kv.chipless import command

    return command.compile_command(options)


def fit_command(options: argparse.Namespace) -> int:
    """See `hybrid_kv.chipless.command`."""
    from hybrid_kv.chipless import command

    return command.fit_command(options)


def _add_pod_flags(command: argparse.ArgumentParser) -> None:
    """Flags that are not given are None, and get their value from a file or from the defaults of `slices.Slice`."""
    command.add_argument("--model", help="kimi-linear-48b, kimi-k3, or a folder with config.json")
    command.add_argument("--topology", help="chip and shape: v6e:4x4, tpu7x:4x4x4, h100:8")
    command.add_argument("--batch", type=int, help="rows of a replica; of all for fit (64)")
    command.add_argument("--context", type=int, help="most tokens of a request (131072)")
    command.add_argument("--tokens", type=int, help="of a prefill step (8192)")
    command.add_argument("--drafts", type=int, help="tokens to verify behind each row (3)")
    command.add_argument("--rows-per-rank", type=int, help="MLA rows of a block on a rank (64)")
    command.add_argument("--state-slots", type=int, help="recurrent states of a replica; of all for fit (256)")
    _add_spread_flags(command, given=False)
    ways = ("reduce_scatter", "all_to_all")
    command.add_argument("--exchange", choices=ways, help="of partial attentions and split streams (reduce_scatter)")
    forms = ("plain", "packed", "native")
    command.add_argument("--expert-form", choices=forms, help="of experts on the device (as stored, where it can be)")
    command.add_argument("--dtype", choices=("bfloat16", "float32"), help="(bfloat16)")
    command.add_argument("--json", action="store_true", help="print a JSON object")


def _add_model_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--checkpoint", type=Path, required=True, help="folder with config.json and weights")
    command.add_argument("--mesh", default="model=1", help='such as "model=2,dcp=4", "data=2,dcp=4" (%(default)s)')
    _add_spread_flags(command, given=True)
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and MLA rows")
    for flag, kind, text in CACHE_FLAGS:
        command.add_argument(flag, type=kind, help=text)
    for flag, text in LIST_FLAGS:
        command.add_argument(flag, metavar="512,2048", help=text)


def _add_spread_flags(command: argparse.ArgumentParser, given: bool) -> None:
    """What of a model is spread over which devices. given: a flag that is left out has its default, not None."""
    for name, (choices, text) in SPREADS.items():
        default = choices[0] if given else None
        command.add_argument(f"--{name}", choices=choices, default=default, help=f"{text} ({choices[0]})")


def _add_serving_flags(command: argparse.ArgumentParser) -> None:
    _add_model_flags(command)
    text = "folder that keeps weights as they lie on the devices, so that loading goes on or starts from there"
    command.add_argument("--weights-cache", type=Path, metavar="DIR", help=text)


def _prepare_devices(options: argparse.Namespace) -> None:
    """Checks mesh and checkpoint, then lets a CPU stand in for the devices of the mesh."""
    devices = MeshSpec.parse(options.mesh).devices
    _check_checkpoint(options.checkpoint)
    flags = os.environ.get("XLA_FLAGS", "")
    # JAX reads this when it makes its CPU devices, which importing it does not do; accelerators do not care.
    # A user's own setting stays.
    if devices > 1 and "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()


def _check_checkpoint(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UserError("checkpoint", str(folder), "give a folder with config.json and weights")


def _engine(options: argparse.Namespace) -> "Engine":
    _prepare_devices(options)
    from hybrid_kv.runtime.engine import Engine

    return Engine.from_checkpoint(options.checkpoint, cache=_cache_options(options), **_placement(options))


def _placement(options: argparse.Namespace) -> dict[str, Any]:
    """What `Engine.from_checkpoint` takes of where weights go and how they get there."""
    return {name: getattr(options, name) for name in ("mesh", "dtype", *SPREADS, "weights_cache")}


def _cache_options(options: argparse.Namespace) -> "CacheOptions":
    """The flags that were given; the others keep the library's defaults."""
    from hybrid_kv.runtime.engine import CacheOptions

    names = [_option_name(flag) for flag, _, _ in CACHE_FLAGS]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    for name in map(_option_name, (flag for flag, _ in LIST_FLAGS)):
        if getattr(options, name) is not None:
            text = getattr(options, name)
            given[name] = () if text == "none" else tuple(token_list(text, name))
    return CacheOptions(**given)


def _option_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _console() -> "Console":
    """Plain text: square brackets in messages are no markup, and a log file gets whole table rows."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 120
    return console


def _checked(tokens: Any, field: str) -> list[int]:
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise UserError(field, str(tokens)[:40], "tokens must be integers, 0 or more")
    if not tokens:
        raise UserError(field, tokens, "give at least one token")
    return tokens


def _refuse(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _version() -> str:
    try:
        return version("hybrid-kv")
    except PackageNotFoundError:
        return "(not installed)"
