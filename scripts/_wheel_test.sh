#!/usr/bin/env bash
# Build the wheel and try it where the source tree cannot be seen. Called by scripts/test.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/_venv.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# From a copy: a build in place would leave build/, and an old build/ would leak removed files into the wheel.
mkdir "$work/source"
for item in pyproject.toml LICENSE README.md hybrid_kv pallas_kernels; do
  [ -e "$item" ] && cp -R "$item" "$work/source/"
done
"$PY" -m build --wheel --no-isolation --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 ||
  { cat "$work/build.log" >&2; fail "the wheel did not build"; }

# The dependencies come from .venv by path. A directory named in a .pth file has its own .pth files ignored, so
# the editable link to the source tree that lies there has no effect, and only the wheel can be imported.
"$PY" -m venv --without-pip "$work/venv"
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/dependencies.pth"
"$PY" -m pip --disable-pip-version-check --python "$work/venv/bin/python" install --quiet --no-deps --no-index \
  "$work"/dist/*.whl

cp scripts/_wheel_smoke.py "$work/"
export JAX_PLATFORMS=cpu
data="$PWD/tests/data"
cd "$work"
"$work/venv/bin/python" "$work/_wheel_smoke.py" "$data"
"$work/venv/bin/hybrid-kv" --version
