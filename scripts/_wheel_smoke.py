"""A few seconds of the installed wheel: it imports, it is the wheel, and its plain parts give right numbers.

usage: python _wheel_smoke.py TESTS_DATA_FOLDER
"""

import importlib
import pkgutil
import sys
from pathlib import Path


def import_everything(name: str) -> int:
    """Imports the package and all its modules; returns how many. Each must come from this environment."""
    package = importlib.import_module(name)
    assert package.__file__ is not None
    assert Path(package.__file__).is_relative_to(sys.prefix), f"{name} comes from {package.__file__}"
    # __main__ modules run when imported.
    names = [m.name for m in pkgutil.walk_packages(package.__path__, name + ".") if "__main__" not in m.name]
    for module in names:
        importlib.import_module(module)
    return 1 + len(names)


def main(data: Path) -> None:
    modules = import_everything("hybrid_kv") + import_everything("pallas_kernels")

    from hybrid_kv.models.config import KimiLinearConfig
    from hybrid_kv.models.published import NAMES, named
    from hybrid_kv.simulate.ceilings import ceilings
    from hybrid_kv.simulate.traces import prompts, read_trace

    # The configurations are data files of the package.
    layers = {name: KimiLinearConfig.from_dict(named(name)).layers for name in NAMES}
    assert layers["kimi-k3"] == 93, layers

    requests = read_trace(data / "traces" / "miniswe_60.jsonl.gz")
    answers = [request.out for request in requests]
    served = list(zip(prompts(requests, lambda index: answers[index]), answers, strict=True))
    found = ceilings(served, grid=64)
    assert round(100 * found.attention, 2) == 94.90, found
    print(f"wheel: {modules} modules import; trace of {len(requests)} requests, ceiling {found.attention:.2%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
