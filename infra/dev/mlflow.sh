#!/usr/bin/env bash
# A standing MLflow tracking server for one person or one machine: loopback only, sqlite, files beside it.
#
#   infra/dev/mlflow.sh [DIRECTORY] [PORT]
#
# DIRECTORY (default .orchestrator/mlflow) keeps mlflow.db, artifacts/ and address (the server's address, while it runs).
# PORT defaults to a free one. MLFLOW names the executable (default: .venv/bin/mlflow of this checkout, else PATH).
# Stays in the foreground; Ctrl-C stops it. Everything survives a restart on the same directory.
set -euo pipefail

usage() {
  sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

fail() {
  echo "mlflow.sh: $1" >&2
  exit 2
}

find_mlflow() {
  local checkout
  checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
  if [[ -n ${MLFLOW:-} ]]; then
    echo "$MLFLOW"
  elif [[ -x $checkout/.venv/bin/mlflow ]]; then
    echo "$checkout/.venv/bin/mlflow"
  else
    command -v mlflow || fail "no mlflow found: run 'make demo' first, or set MLFLOW to the executable"
  fi
}

# The kernel picks; another program could take the port before the server binds it, and then the server says so.
free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  usage
  exit 0
fi
(($# <= 2)) || fail "takes a directory and a port, got $# arguments"

directory=${1:-.orchestrator/mlflow}
port=${2:-$(free_port)}
if ! [[ $port =~ ^[1-9][0-9]{0,4}$ ]] || ((port > 65535)); then fail "port must be 1 to 65535, got '$port'"; fi
mlflow=$(find_mlflow)
mkdir -p "$directory/artifacts"
directory=$(cd "$directory" && pwd) # absolute: a relative sqlite path would follow the working directory

echo "http://127.0.0.1:$port" >"$directory/address"
echo "MLflow on http://127.0.0.1:$port (data in $directory)"
trap 'rm -f "$directory/address"' EXIT
trap 'kill "$server" 2>/dev/null' INT TERM

"$mlflow" server \
  --host 127.0.0.1 --port "$port" --workers 2 \
  --backend-store-uri "sqlite:///$directory/mlflow.db" \
  --artifacts-destination "$directory/artifacts" &
server=$!
status=0
wait "$server" || status=$?
# A trapped signal ends the first wait early; the server still needs a moment to leave.
wait "$server" 2>/dev/null || status=$?
exit "$status"
