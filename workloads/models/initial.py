"""Initial weights of a backbone: from one of our artifacts, a file, or a tag of timm's; with a report of what matched.

Weights of another network are refused, if they leave too much of the backbone at its random values, or if the backbone
has no place for too many of them: a smaller network of the same family finds all its names in a larger one.

A CLIP image tower may keep its projection: timm has it as the tower's classifier. Without it a tower gives its own
features (1,024 numbers for ViT-L/14), with it CLIP's embedding of the image (768), which is what images and texts are
compared by.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import timm
import torch
from torch import Tensor, nn

from orchestrator.core.contract import JobRequest
from orchestrator.core.errors import NotFoundError, StorageError, UserError
from orchestrator.core.plugins import is_reference
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import read_part, read_record
from orchestrator.storage.open import open_store
from workloads.models.refusals import REFUSALS
from workloads.models.spec import ModelSpec
from workloads.models.table import timm_kwargs
from workloads.models.weights import decode_tensors, decode_weights

SMALLEST_SHARE = 0.9
"""Of a backbone's numbers, that must come from the source: less is another network, not an initialisation of this."""
SMALLEST_USE = 0.95
"""Of the source's own backbone, that must find a place: more left over is a deeper or otherwise larger network.

Its backbone is what lies in the modules that ours has too: the first part of a name, without its number (``layer4``
counts as ``layer``). So heads, projectors, decoders, text towers and second copies of the network may be left over.
What fits may still miss buffers that timm computes itself, or a position embedding of another size: a few percent.
"""
_LISTED = 50
_WRAPPERS = ("_orig_mod.", "module.")
_PREFIXES = ("", "backbone.", "model.", "encoder.", "trunk.", "visual.trunk.", "visual.", "image_encoder.", "student.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of the names of a backbone (``missing``, ``mismatched``) and of a source (all others).

    Long lists are cut to their first 50 names; ``num_*`` count all. ``share`` is the matched part of the backbone's
    numbers, ``use`` the matched part of those of the source's backbone (see ``SMALLEST_USE``); both in [0, 1].
    """

    source: str
    share: float
    use: float
    num_matched: int
    num_missing: int
    num_unexpected: int
    missing: tuple[str, ...]
    """Of the backbone, not in the source: they keep their random initial values."""
    unexpected: tuple[str, ...]
    """In the source, not in the backbone: ignored."""
    mismatched: tuple[str, ...]
    """``name: theirs -> ours`` where shapes differ: the random initial values stay."""
    head: tuple[str, ...]
    """Of the source's classifier, which the job's own head replaces."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form, for the record of a job."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def initial_of(request: JobRequest) -> Mapping[str, Any] | None:
    """What a job says of its backbone's initial weights; None = they are random."""
    if "initial" in request.inputs:  # a backbone of the same sweep
        return {"artifact": request.inputs["initial"]}
    initial: Mapping[str, Any] | None = request.parameters.get("initial")
    uri = request.execution.initial_uri
    return {**initial, "uri": uri} if initial and uri else initial


def load_initial(backbone: nn.Module, spec: ModelSpec, initial: Mapping[str, Any], store: ObjectStore) -> LoadReport:
    """Load weights into a freshly built backbone, in place.

    ``initial`` is what ``initial_of`` a request gives: one of ``{"artifact": key}`` (of this store), ``{"sha256": hex,
    "uri": file:// or s3:// URI}`` and ``{"timm": tag}``. Position embeddings and the like are resized where timm can.

    Raises:
        UserError: the source is no such thing, holds another network, or cannot be read without executing it.
        StorageError: it cannot be read now.
    """
    source, tensors = _read(spec, initial, store)
    own = backbone.state_dict()
    found = converted(_best_names(tensors, own), backbone, spec, source)
    matched = {name: found[name] for name in own.keys() & found.keys() if own[name].shape == found[name].shape}
    report = _report(source, spec, own, found, matched.keys())
    if report.share < SMALLEST_SHARE:
        raise UserError(_too_little(report, spec))
    if report.use < SMALLEST_USE:
        raise UserError(_too_much(report, spec))
    backbone.load_state_dict(matched, strict=False)
    return report


def _read(spec: ModelSpec, initial: Mapping[str, Any], store: ObjectStore) -> tuple[str, Mapping[str, Tensor]]:
    if "artifact" in initial:
        return str(initial["artifact"]), _from_artifact(str(initial["artifact"]), store)
    if "timm" in initial:
        name = f"{spec.name.partition('.')[0]}.{initial['timm']}"
        return f"timm {name}", _from_timm(name, spec)
    if "uri" in initial:
        return str(initial["uri"]), tensors_at(str(initial["uri"]), initial.get("sha256"))
    raise UserError(f"initial weights are {dict(initial)}; give one of artifact: key, uri: URI with sha256, timm: tag")


def _from_artifact(key: str, store: ObjectStore) -> Mapping[str, Tensor]:
    try:
        record = read_record(store, key)
    except NotFoundError as error:
        message = f"initial weights are to come from the artifact {key}, which {store.uri} does not hold; "
        raise UserError(message + "name the key of a finished pretrain or finetune job of this store") from error
    if "backbone.safetensors" not in record.parts:
        raise UserError(f"the artifact {key} holds {sorted(record.parts)} and no backbone: it cannot initialise one")
    return decode_tensors(read_part(store, record, "backbone.safetensors"))


def _from_timm(name: str, spec: ModelSpec) -> Mapping[str, Tensor]:
    return timm_model(name, spec, num_classes=0).state_dict()


def timm_model(name: str, spec: ModelSpec, *, num_classes: int | None = None) -> nn.Module:
    """The model of a full name of timm's, ``<architecture>.<tag>``, with its weights; by default with its last layer.

    Raises:
        UserError: there is no such tag, or it does not fit the spec.
        StorageError: it cannot be downloaded now.
    """
    arguments = timm_kwargs(spec) | ({} if num_classes is None else {"num_classes": num_classes})
    try:
        model: nn.Module = timm.create_model(name, pretrained=True, **arguments)
    except OSError as error:  # of the network and of the hub's client
        raise StorageError(f"the weights {name} cannot be downloaded now: {error}") from error
    except REFUSALS as error:
        tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{name.partition('.')[0]}.*")]
        message = f"timm {timm.__version__} does not give the weights {name}: {error}; it knows the tags {tags}"
        raise UserError(message) from error
    return model


def tensors_at(uri: str, digest: str | None) -> Mapping[str, Tensor]:
    """The tensors of a weights file, under their names there.

    Raises:
        UserError: there is no such file, it has another sha256, or is not a weights file.
    """
    folder, _, name = uri.rpartition("/")
    try:
        content = open_store(folder).get(name)
    except NotFoundError as error:
        raise UserError(f"there is no file of initial weights at {uri}; check pretrain.init.uri") from error
    found = sha256(content).hexdigest()
    if digest is not None and found != digest:
        message = f"{uri} has sha256 {found}, but the sweep says {digest}: the file is another one; "
        raise UserError(message + "correct pretrain.init.sha256")
    return decode_weights(content, uri)


def _best_names(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of the backbone: without the wrappers and the prefix under which most of them match.

    If none match, all of them as they are: timm's converters know foreign names.
    """
    plain = {unwrapped(name): tensor for name, tensor in tensors.items()}

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): plain[name] for name in plain if name.startswith(prefix)}

    best = max(_PREFIXES, key=lambda prefix: len(under(prefix).keys() & own.keys()))
    return under(best) if under(best).keys() & own.keys() else plain


def unwrapped(name: str) -> str:
    """A tensor's name without what compiling and distributing put before it."""
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def converted(tensors: dict[str, Tensor], backbone: nn.Module, spec: ModelSpec, source: str) -> Mapping[str, Tensor]:
    """What timm's own converter of this architecture makes of the tensors: old names, resized position embeddings.

    Raises:
        UserError: the converter cannot take them.
    """
    if is_reference(spec.name):
        return tensors
    module = sys.modules[timm.model_entrypoint(spec.name.partition(".")[0]).__module__]
    convert: Callable[..., Mapping[str, Tensor]] | None = getattr(module, "checkpoint_filter_fn", None)
    if convert is None or not tensors:
        return tensors
    try:
        return convert(dict(tensors), backbone)
    except REFUSALS as error:
        message = f"{source} does not fit timm model {spec.name} at image_size {spec.image_size}: {error!r}; "
        raise UserError(message + "give weights of the same architecture") from error


def _report(
    source: str,
    spec: ModelSpec,
    own: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    matched: AbstractSet[str],
) -> LoadReport:
    heads = _head_prefixes(spec)
    missing = sorted(own.keys() - found.keys())
    foreign = sorted(found.keys() - own.keys())
    unexpected = [name for name in foreign if not name.startswith(heads)]
    shapes = {name: (list(found[name].shape), list(own[name].shape)) for name in own.keys() & found.keys() - matched}
    total = sum(tensor.numel() for tensor in own.values())
    # Some backbones have layers of their own below such a name: the last norm of a ConvNeXt is ``head.norm``.
    of_backbone = {name: found[name] for name in found if name in own or not name.startswith(heads)}
    return LoadReport(
        source=source,
        share=sum(own[name].numel() for name in matched) / max(1, total),
        use=_use(own, of_backbone, matched),
        num_matched=len(matched),
        num_missing=len(missing),
        num_unexpected=len(unexpected),
        missing=tuple(missing[:_LISTED]),
        unexpected=tuple(unexpected[:_LISTED]),
        mismatched=tuple(f"{name}: {theirs} -> {ours}" for name, (theirs, ours) in sorted(shapes.items())[:_LISTED]),
        head=tuple(name for name in foreign if name.startswith(heads))[:_LISTED],
    )


def _use(own: Mapping[str, Tensor], found: Mapping[str, Tensor], matched: AbstractSet[str]) -> float:
    """The matched part of the numbers of a source's backbone."""
    modules = {_module(name) for name in own}
    total = sum(tensor.numel() for name, tensor in found.items() if _module(name) in modules)
    return sum(found[name].numel() for name in matched) / max(1, total)


def _module(name: str) -> str:
    """Where a tensor belongs, without the number: ``layer`` of ``layer4.1.conv1.weight``."""
    return name.partition(".")[0].rstrip("0123456789")


def _head_prefixes(spec: ModelSpec) -> tuple[str, ...]:
    """How names of a classifier begin: timm's, and those of other libraries. Some names of a backbone do so, too."""
    cfg = None if is_reference(spec.name) else timm.get_pretrained_cfg(spec.name, allow_unregistered=True)
    classifier = cfg.classifier if cfg is not None and cfg.classifier else ()
    names = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    return tuple(f"{name}." for name in (*names, "head", "fc", "classifier"))


def _too_little(report: LoadReport, spec: ModelSpec) -> str:
    return (
        f"only {report.share:.1%} of the backbone of timm model {spec.name} is in {report.source} (at least "
        f"{SMALLEST_SHARE:.0%} must be): {report.num_missing} names are missing, such as {list(report.missing[:3])}; "
        f"{report.num_unexpected} are unknown, such as {list(report.unexpected[:3])}; shapes differ in "
        f"{list(report.mismatched[:3])}; give weights of the same architecture"
    )


def _too_much(report: LoadReport, spec: ModelSpec) -> str:
    return (
        f"timm model {spec.name} has no place for {1 - report.use:.1%} of the backbone in {report.source} (at most "
        f"{1 - SMALLEST_USE:.0%} may be left over): {report.num_unexpected} names are unknown, such as "
        f"{list(report.unexpected[:3])}; shapes differ in {list(report.mismatched[:3])}; these are weights of another, "
        "probably a larger network; name that one in model, or give weights of this architecture"
    )


def open_projected(spec: ModelSpec, initial: Mapping[str, Any]) -> nn.Module:
    """The network and its last layer, with weights from timm's tag or a file (see ``load_initial``).

    A file may have the names of timm, OpenAI or open_clip, as far as timm knows them.

    Raises:
        UserError: the weights have no such layer, or are of another network.
        StorageError: they cannot be read now.
    """
    if "timm" in initial:
        name = f"{spec.name.partition('.')[0]}.{initial['timm']}"
        cfg = timm.get_pretrained_cfg(name)
        if cfg is not None and not cfg.num_classes:
            raise _no_projection(f"timm {name}")
        return timm_model(name, spec)
    if "uri" in initial:
        return _from_file(spec, str(initial["uri"]), initial.get("sha256"))
    raise UserError(f"embed.output: projection needs weights that have one, of init.timm or init.uri, not {initial}")


def _from_file(spec: ModelSpec, uri: str, digest: str | None) -> nn.Module:
    tensors = {unwrapped(name): tensor for name, tensor in tensors_at(uri, digest).items()}
    layer = f"{_classifier(spec)}.weight"
    weight = _named(tensors, _built(spec, 1), spec, uri).get(layer)
    if weight is None:
        raise _no_projection(uri)
    network = _built(spec, len(weight))
    own, found = network.state_dict(), _named(tensors, network, spec, uri)
    # OpenAI's projection has no bias; timm's converters of some architectures leave out the zeros.
    found = {f"{_classifier(spec)}.bias": torch.zeros(len(weight)), **found}
    wrong = [name for name in own if name not in found or found[name].shape != own[name].shape]
    if wrong:
        message = f"{uri} does not fit timm model {spec.name}: {len(wrong)} tensors are missing or of another shape, "
        raise UserError(f"{message}such as {wrong[:3]}; give weights of the same architecture and image size")
    network.load_state_dict({name: found[name] for name in own})
    return network


def _named(tensors: Mapping[str, Tensor], network: nn.Module, spec: ModelSpec, uri: str) -> dict[str, Tensor]:
    return dict(converted(dict(tensors), network, spec, uri))


def _built(spec: ModelSpec, num_outputs: int) -> nn.Module:
    network: nn.Module = timm.create_model(spec.name, num_classes=num_outputs, **timm_kwargs(spec))
    return network


def _classifier(spec: ModelSpec) -> str:
    cfg = timm.get_pretrained_cfg(spec.name, allow_unregistered=True)
    name = cfg.classifier if cfg is not None else None
    if not isinstance(name, str):
        raise UserError(f"timm model {spec.name} has no single last layer, so no projection; use output: features")
    return name


def _no_projection(source: str) -> UserError:
    message = f"the weights {source} have no last layer to project features with; use output: features, or weights "
    return UserError(message + "that have one, such as vit_large_patch14_clip_quickgelu_224 with init.timm: openai")
