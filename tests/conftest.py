"""What every test shares: isolation from the caller's shell, and hypothesis without wall-clock deadlines."""

import os
import signal

from hypothesis import settings

FOREIGN_PREFIXES = ("AWS_", "MLFLOW_", "ORCHESTRATOR_", "RAY_")

# A caller's cluster, tracking server or credentials must neither decide a result nor receive one.
for name in [name for name in os.environ if name.startswith(FOREIGN_PREFIXES)]:
    del os.environ[name]
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

# A shell's background jobs ignore SIGINT, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two busy cores make any per-example deadline a lie; in CI the same examples run every time.
settings.register_profile("project", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("project")
