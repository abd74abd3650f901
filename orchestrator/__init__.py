"""The control plane: plans sweeps, schedules them on Ray, and reports the answer."""


def __getattr__(name: str) -> str:
    # Read on demand: importlib.metadata costs start-up time that most commands need not pay.
    if name == "__version__":
        from importlib.metadata import version

        return version("pretraining-orchestrator")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
