"""The jobs that search: for the best recipe of a transfer, or for the backbone that suits its target best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.core.contract import JobKind
from orchestrator.planning.graph.draft import Draft, model_parameters, pretrain_facets, subset_parameters
from orchestrator.planning.graph.features import Features
from orchestrator.planning.graph.identity import CODE_VERSIONS
from orchestrator.planning.graph.readable import readable_rule
from orchestrator.planning.graph.sources import backbone_job
from orchestrator.sweepfile.values import LabelSpace, Pretrain, ResolvedSweep, Search, Transfer

LABEL_SPACE = "label_space"
METRICS = {"train": "select_error", "val": "val_error"}
"""What trials are chosen by, by where."""
BEST = "search:best"
"""Label space, in facets, of a backbone whose label space a search chose."""


def recipe_search(transfer: Transfer, search: Search, measured: Draft, name: str) -> Draft:
    """The search for the recipe of a transfer; ``measured`` is the job of one of its transfers without it."""
    parameters = {**measured.parameters, "recipe": {**transfer.recipe, **search.holds_out}}
    copies = _num_at_a_time(search, search.trials)
    return Draft(
        kind=JobKind.SEARCH,
        name=name,
        readable=measured.readable.rpartition("-seed")[0],
        parameters={
            **_asked(search, METRICS[transfer.select_on]),
            "space": search.space,
            "trials": search.trials,
            "trial": {
                "kind": measured.kind.value,
                "code_version": CODE_VERSIONS[measured.kind],
                "protocol": measured.kind.value,
                "readable": measured.readable,
                "parameters": parameters,
                "adds": search.holds_out,
            },
        },
        inputs=measured.inputs,
        facets={key: value for key, value in measured.facets.items() if key != "transfer_seed"},
        execution={"num_workers": copies},
        like=measured.kind,
        copies=copies,
    )


def backbone_search(
    sweep: ResolvedSweep,
    transfer: Transfer,
    search: Search,
    *,
    pretrain: Pretrain,
    spaces: Sequence[LabelSpace],
    seed: int,
) -> Draft:
    """The search for a backbone: among label spaces, or among recipes for a single one."""
    target = sweep.labels[transfer.target]
    drafts = [backbone_job(pretrain, space, seed, "") for space in spaces]
    is_open = search.over == "labels"
    inputs = {"target_index": f"index/{target.dataset}", "target_labels": f"labels/{target.name}"}
    inputs |= {role: job for role, job in drafts[0].inputs.items() if role != "labels" or not is_open}
    space: Mapping[str, Any] = search.space
    if is_open:
        inputs |= {f"labels:{one.name}": f"labels/{one.name}" for one in spaces}
        space = {LABEL_SPACE: {"values": [one.name for one in spaces]}}
    trials = len(spaces) if is_open else search.trials
    copies = _num_at_a_time(search, trials)
    readable = {one.name: draft.readable for one, draft in zip(spaces, drafts, strict=True)}
    parts = (JobKind.SEARCH.value, transfer.name, pretrain.name, "" if is_open else spaces[0].name, f"seed{seed}")
    return Draft(
        kind=JobKind.SEARCH,
        name="/".join(part for part in parts if part),
        readable=f"{pretrain.model.name}-{readable_rule(target.space)}-seed{seed}",
        parameters={
            **_asked(search, f"target_{METRICS[transfer.select_on]}"),
            "space": space,
            "trials": trials,
            "trial": {
                "kind": JobKind.PRETRAIN.value,
                "code_version": CODE_VERSIONS[JobKind.PRETRAIN],
                "protocol": "",
                "readable": readable if is_open else drafts[0].readable,
                "parameters": drafts[0].parameters,
            },
            "probe": _probe(sweep, transfer, search, pretrain),
        },
        inputs=inputs,
        facets={**best_facets(pretrain, spaces, seed), "transfer": transfer.name, "target": transfer.target},
        execution={**drafts[0].execution, "num_workers": copies},
        like=JobKind.PRETRAIN,
        copies=copies,
    )


def best_facets(pretrain: Pretrain, spaces: Sequence[LabelSpace], seed: int) -> dict[str, str | int]:
    """Facets of what a search found among label spaces; of a single one those of any backbone."""
    facets = pretrain_facets(pretrain, spaces[0], seed)
    if len(spaces) == 1:
        return facets
    chosen = {"label_space": BEST, "level": "best"}
    return {**{name: value for name, value in facets.items() if name != "granularity"}, **chosen}


def searched_spaces(sweep: ResolvedSweep, transfer: Transfer, pretrain: Pretrain) -> Iterator[list[LabelSpace]]:
    """The label spaces of each search for backbones of a block."""
    spaces = [sweep.labels[name] for name in pretrain.labels if transfer.measures(name)]
    if transfer.search is not None and transfer.search.over == "labels":
        yield spaces
    else:
        yield from ([space] for space in spaces)


def _num_at_a_time(search: Search, trials: int | None) -> int:
    """More than there are trials would hold resources that nothing uses."""
    return min(search.concurrent, trials or search.concurrent)


def _asked(search: Search, metric: str) -> dict[str, Any]:
    return {"over": search.over, "algorithm": search.algorithm, "seed": search.seed, "metric": metric}


def _probe(sweep: ResolvedSweep, transfer: Transfer, search: Search, pretrain: Pretrain) -> dict[str, Any]:
    """Parameters of the cached probe that judges; images look to it as they do to the pretraining."""
    dataset = sweep.labels[transfer.target].dataset
    features = Features(pretrain=pretrain, backbone="", checkpoint={}, dataset=dataset, recipe=search.probe)
    model = model_parameters(pretrain.model)
    return {
        "code_version": CODE_VERSIONS[JobKind.PROBE],
        "model": model,
        "recipe": search.probe,
        "look": {"model": model, "view": "center", **features.look()},
        "seed": transfer.seeds[0],
        **subset_parameters(transfer.subset),
    }
