"""How a backbone starts, and how jobs that train compute, as a sweep.yaml states them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.errors import StorageError
from orchestrator.spec.fields import Strict
from orchestrator.storage.open import check_store_uri


def _readable_uri(uri: str) -> str:
    """A URI of a file in a store that can be opened."""
    folder, _, name = uri.rpartition("/")
    try:
        check_store_uri(folder)
    except StorageError as error:
        raise PydanticCustomError("refused", "{why}", {"why": str(error).replace("store ", "URI ", 1)}) from None
    if not name:
        raise PydanticCustomError("refused", "this names a folder; give the URI of a weights file")
    return uri


class InitialSpec(Strict):
    """Initial weights of a backbone; exactly one of ``artifact``, ``uri`` and ``timm``."""

    artifact: Annotated[str, Field(pattern=r"(pretrain|finetune)-\S+")] | None = Field(
        None, description="Key of a finished pretrain or finetune job in the sweep's store."
    )
    uri: Annotated[str, AfterValidator(_readable_uri)] | None = Field(
        None, description="file:// or s3:// URI of a weights file (safetensors, or a .pth of tensors); needs sha256."
    )
    sha256: Annotated[str, Field(pattern=r"[0-9a-f]{64}")] | None = Field(
        None, description="Sha256 of the file at uri: results must not depend on who changes it (sha256sum FILE)."
    )
    timm: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Tag of timm's pretrained weights of this architecture (augreg_in21k)."
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in ("artifact", "uri", "timm") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise PydanticCustomError("one_rule", f"give exactly one of artifact, uri and timm; here: {found}")
        if (self.uri is None) != (self.sha256 is None):
            message = "uri and sha256 belong together: a file may change, and results must not; run sha256sum FILE"
            raise PydanticCustomError("one_rule", message)
        return self


class ComputeSpec(Strict):
    """How training jobs compute. Changes results by rounding only, and so no key."""

    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = Field(
        "off", description="torch.compile; reduce-overhead uses CUDA graphs. Falls back with a note."
    )
    deterministic: bool = Field(
        default=False, description="Bit-exact results on GPUs, at a price; CPUs always give them."
    )
    micro_batch: Annotated[int, Field(ge=0)] = Field(
        0, description="Samples per forward pass, whole norm groups; 0 = found automatically on GPUs."
    )
