"""How a backbone starts, and how jobs that train compute, as a sweep.yaml states them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.errors import StorageError
from orchestrator.storage.open import check_store_uri, split_object_uri
from orchestrator.sweepfile.fields import Count, Strict, canonical

# What the data plane passes to timm itself; a test keeps this equal to its list.
RESERVED_KWARGS = frozenset({"checkpoint_path", "features_only", "in_chans", "num_classes", "pretrained", "scriptable"})


def _not_reserved(name: str) -> str:
    """The name of an argument that a sweep may set."""
    if name in RESERVED_KWARGS:
        raise PydanticCustomError("reserved", "the product sets this argument itself; remove it")
    return name


class ModelSpec(Strict):
    """A network by its timm name."""

    name: Annotated[str, Field(min_length=1)] = Field(description="Any timm model name.")
    image_size: Count = Field(description="Side of the square input, pixels.")
    kwargs: dict[Annotated[str, AfterValidator(_not_reserved)], Annotated[Any, AfterValidator(canonical)]] = Field(
        default_factory=dict, description="Arguments for timm.create_model: plain JSON, none that the product sets."
    )


def _readable_uri(uri: str) -> str:
    """A URI of a file in a store that can be opened."""
    try:
        check_store_uri(uri)  # first the whole one, so that messages name what was written
        if uri.endswith("/"):
            raise PydanticCustomError("refused", "this names a folder; give the URI of a weights file")
        split_object_uri(uri)
    except StorageError as error:
        why = str(error).replace("store ", "URI ", 1) if str(error).startswith("store ") else str(error)
        raise PydanticCustomError("refused", "{why}", {"why": why}) from None
    return uri


class InitialSpec(Strict):
    """Initial weights of a network; exactly one of ``artifact``, ``uri`` and ``timm``."""

    SOURCES: ClassVar[tuple[str, ...]] = ("artifact", "uri", "timm")

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
        given = [name for name in self.SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found, known = " and ".join(given) or "none of them", ", ".join(self.SOURCES[:-1])
            raise PydanticCustomError("one_rule", f"give exactly one of {known} and {self.SOURCES[-1]}; here: {found}")
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
