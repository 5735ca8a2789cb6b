# Shared by scripts/test and scripts/run (sourced): one virtual environment, .venv, at the root of the checkout.
#
#   ensure_venv EXTRA[,EXTRA]   installs the package (editable) with these extras at the versions of
#                               constraints.txt, unless these, or more, were installed already from the same
#                               inputs; afterwards $PY is the environment's interpreter.
#
# Needs Python 3.11 or newer with pip. PYTHON=/path/to/python names another interpreter.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
PY="$venv/bin/python"

say() { printf '== %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# The first interpreter on this machine that is new enough.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s' "$candidate"
      return 0
    fi
  done
  fail "no Python 3.11 or newer with the venv module found; install one or set PYTHON=/path/to/python"
}

# Everything the installed environment depends on; a change of any of it installs again. The checkout's
# own path belongs to it because an editable install and the entry points hold absolute paths.
install_key() {
  {
    printf '%s\n' "$1" "$root"
    cat "$root/pyproject.toml" "$root/constraints.txt" "$root/scripts/_venv.sh"
    # A top-level package that appears later has to be linked in again.
    (cd "$root" && ls -d hybrid_kv pallas_kernels 2>/dev/null)
  } | sha256sum | cut -c1-64
}

# Whether an installation of at least these extras (EXTRA[,EXTRA]) is recorded and still true. The name of a stamp
# says what was installed, so that scripts/test --quick finds what scripts/test left.
already_installed() {
  local stamp have extra
  for stamp in "$venv"/.installed-*; do
    [ -e "$stamp" ] || continue
    have=${stamp##*/.installed-}
    for extra in ${1//,/ }; do
      case ",$have," in *",$extra,"*) ;; *) continue 2 ;; esac
    done
    [ "$(cat "$stamp")" = "$(install_key "$have")" ] && return 0
  done
  return 1
}

ensure_venv() {
  local extras=$1 stamp key
  stamp="$venv/.installed-$extras"
  key=$(install_key "$extras")
  # Two scripts started at once must not install into the environment together.
  if command -v flock >/dev/null 2>&1; then
    exec 9>"$root/.venv.lock"
    flock 9
  fi
  if [ -x "$PY" ] && already_installed "$extras"; then
    say "environment: .venv is up to date ($extras)"
  else
    # A half-made environment (interrupted, or its interpreter gone, or moved) is made anew.
    if ! { [ -x "$PY" ] && "$PY" -m pip --version >/dev/null 2>&1 &&
           [ "$(cat "$venv/.root" 2>/dev/null)" = "$root" ]; }; then
      local python
      python=$(find_python) || exit 1
      say "environment: making .venv with $("$python" --version)"
      rm -rf "$venv"
      "$python" -m venv "$venv"
      printf '%s' "$root" >"$venv/.root"
    fi
    say "environment: installing hybrid-kv[$extras] and its pinned dependencies (minutes the first time)"
    rm -f "$stamp"
    "$PY" -m pip install --quiet --disable-pip-version-check \
      --constraint "$root/constraints.txt" --editable "$root[$extras]"
    printf '%s' "$key" >"$stamp"
  fi
  if command -v flock >/dev/null 2>&1; then
    flock -u 9
    exec 9>&-
  fi
}
