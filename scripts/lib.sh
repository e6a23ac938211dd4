# Shared by the scripts beside it; sourced, not run. Sets ROOT (the repository) and VENV, and moves to ROOT.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
cd "$ROOT"

say() { printf '%s\n' "$*" >&2; }
die() { say "$@"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# The first of the given commands that exists.
first_of() {
  local name
  for name in "$@"; do
    if have "$name"; then echo "$name"; return; fi
  done
  return 1
}

# Debian's packages of one clang version bring the versioned names alone.
clangxx() { first_of clang++ clang++-{22,21,20,19,18,17,16,15,14}; }
clang_tidy() { first_of clang-tidy-14 clang-tidy clang-tidy-{22,21,20,19,18,17,16,15}; }

# hash_of FILE...: one hash for the contents (and names) of files and folders; changes when any of them does.
hash_of() { find "$@" -type f -not -name '*.so' -not -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16; }

# Where ccache is installed, builds use it, unless the caller has chosen a launcher.
if have ccache && [[ -z ${CMAKE_CXX_COMPILER_LAUNCHER+set} ]]; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache
fi
