"""Nearest valid names for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_MAX_LISTED = 12
# Names of other tools for the same thing, and frequent typing errors.
_SYNONYMS = {
    "learning_rate": "lr",
    "lerning_rate": "lr",
    "max_lr": "lr",
    "wd": "weight_decay",
    "bs": "batch_size",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "warmup": "warmup_epochs",
    "arch": "model",
    "backbone": "model",
    "architecture": "model",
    "gpu": "gpus",
    "mem": "memory_gib",
    "memory": "memory_gib",
    "max_failures": "failures",
    "retries": "failures",
    "val_size": "num_val",
    "finetuning": "finetune",
    "fine-tune": "finetune",
    "accuracy": "val_error",
    "val_accuracy": "val_error",
    "top1": "val_error",
    "linear": "probe",
    "linear_probe": "probe",
}


def did_you_mean(wrong: str, known: Iterable[str], *, they_are: str = "", most: int = _MAX_LISTED) -> str:
    """``did you mean 'x'? known: ...`` for a name that is not among the known ones.

    Args:
        wrong: the name.
        known: the names that there are.
        they_are: what they are called in place of "known".
        most: how many of them are listed.
    """
    names = list(dict.fromkeys(known))
    lowered = {name.lower(): name for name in names}
    synonym = _SYNONYMS.get(wrong.lower(), "")
    near = [synonym] if synonym in lowered else get_close_matches(wrong.lower(), lowered, n=1, cutoff=0.5)
    listed = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    guess = f"did you mean '{lowered[near[0]]}'? " if near else ""
    if not names:
        return f"{they_are}: none" if they_are else "there are none"
    return f"{guess}{they_are or 'known'}: {listed}"
