"""``torch.compile`` that never stops a job: what it cannot compile runs as it is, with a note.

Compiled code is kept by torch in one folder per node (``keep_compiled_code``), so that the jobs of one architecture
compile once: in the process by the guards of the compiled code, between processes by the folder.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn

_LOG = logging.getLogger(__name__)
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_MAX_NOTE = 300


class CompileMode(StrEnum):
    """Modes of ``torch.compile``."""

    OFF = "off"
    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    """CUDA graphs."""
    MAX_AUTOTUNE = "max-autotune"


class CompiledForward:
    """Calls a module, compiled if it can be; the parameters are the module's own.

    ``note`` says why a module runs uncompiled, ``compile_s`` how long the first call took.
    """

    def __init__(self, module: nn.Module, mode: CompileMode, *, backend: str | Callable[..., Any] = "inductor") -> None:
        self.module, self.note, self.compile_s = module, "", 0.0
        self._call: Callable[..., Any] = module
        if mode is not CompileMode.OFF:
            options = {} if backend != "inductor" else {"mode": None if mode is CompileMode.DEFAULT else mode.value}
            self._call = torch.compile(module, backend=backend, **options)  # type: ignore[call-overload]

    @property
    def is_compiled(self) -> bool:
        """Whether calls go through compiled code."""
        return self._call is not self.module

    def __call__(self, *inputs: Any) -> Any:  # noqa: ANN401 - as the module's own forward
        """The module's result."""
        if not self.is_compiled:
            return self._call(*inputs)
        started_s = time.perf_counter()
        try:
            result = self._call(*inputs)
        except _failures() as error:
            self.give_up(error)
            return self.module(*inputs)
        self.compile_s = self.compile_s or time.perf_counter() - started_s
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the body without compiled code."""
        call, self._call = self._call, self.module
        try:
            yield
        finally:
            self._call = call

    def give_up(self, error: BaseException) -> None:
        """Run uncompiled from now on."""
        # The cause stands in the second line; after an empty one come hints for the compiler's developers.
        reason = " ".join(str(error).strip().partition("\n\n")[0].split()) or type(error).__name__
        self.note = f"torch.compile failed, running uncompiled: {reason}"[:_MAX_NOTE]
        self._call = self.module
        _LOG.warning(self.note)


def keep_compiled_code(folder: Path) -> None:
    """Keep compiled code in a folder of the node, unless the environment names one."""
    if _CACHE_VARIABLE not in os.environ:
        os.environ[_CACHE_VARIABLE] = str(folder)


def is_compile_failure(error: BaseException) -> bool:
    """Whether compilation, not the computation, failed: true also of backward passes, which compile when first run."""
    return isinstance(error, _failures())


def _failures() -> tuple[type[Exception], ...]:
    """What compilation raises. Imported late: the compiler takes a second to load."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError

    return (TorchDynamoException, CppCompileError)
