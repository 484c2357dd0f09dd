# Sourced by the scripts beside it: makes .venv when absent and installs Hone into it once per change of its requirements.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # what was installed is compiled when it is first imported; without this, every time
VENV="${HONE_VENV:-.venv}"

find_python() {
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "Hone needs Python 3.11 or newer, and none was found on PATH. Fix: install it, or set PYTHON=/path/to/python3.11" >&2
  exit 2
}

# ensure_env EXTRAS: installs the package with these extras ("core" means none), unless the same request was already carried out.
ensure_env() {
  local extras="$1" stamp wanted
  stamp="$VENV/.hone-installed-$extras"
  wanted="$(cat pyproject.toml constraints.txt | cksum)"
  [ -x "$VENV/bin/python" ] || "$(find_python)" -m venv "$VENV"
  if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    echo "Installing Hone into $VENV (once; a minute or a few) ..."
    local package="."
    [ "$extras" = core ] || package=".[$extras]"
    "$VENV/bin/python" -P hone/installer.py -c constraints.txt -e "$package"
    echo "$wanted" >"$stamp"
  fi
}
