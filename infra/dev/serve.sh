#!/usr/bin/env bash
# One server of `orchestrator up --full` alone, for one machine, in the foreground: Ctrl-C stops it, its data stay.
#
#   infra/dev/serve.sh postgresql|s3|mlflow|prometheus [DIRECTORY]
#
# DIRECTORY (default .orchestrator) keeps data, passwords and logs. Everything listens on loopback or on a private socket.
# PYTHON names the interpreter (default: .venv/bin/python of this checkout, else python3).
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ $# -lt 1 || $# -gt 2 || $1 == -h || $1 == --help ]]; then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  [[ ${1:-} == -h || ${1:-} == --help ]] && exit 0 || exit 2
fi
python=${PYTHON:-$checkout/.venv/bin/python}
[[ -x $python ]] || python=$(command -v "${PYTHON:-python3}")
export PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m orchestrator.stack.serve "$1" "${2:-.orchestrator}"
