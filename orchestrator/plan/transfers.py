"""The jobs that measure backbones on targets."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.plan.draft import Draft, model_parameters, pretrain_facets, pretrain_job, subset_parameters
from orchestrator.plan.readable import readable_rule
from orchestrator.spec.model import LabelSpace, Pretrain, Sweep, Transfer


def transfer_jobs(sweep: Sweep, transfer: Transfer) -> Iterator[Draft]:
    """The jobs of a transfer; the pretrainings and label spaces that they read must be planned already."""
    for block in transfer.pretrains:
        pretrain = sweep.pretrain(block)
        for space in pretrain.labels:
            for seed in pretrain.seeds:
                for transfer_seed in transfer.seeds:
                    yield _job(
                        sweep,
                        transfer,
                        pretrain=pretrain,
                        space=sweep.labels[space],
                        seed=seed,
                        transfer_seed=transfer_seed,
                    )


def _job(
    sweep: Sweep, transfer: Transfer, *, pretrain: Pretrain, space: LabelSpace, seed: int, transfer_seed: int
) -> Draft:
    target = sweep.labels[transfer.target]
    backbone = pretrain_job(pretrain.name, space.name, seed)
    return Draft(
        kind=transfer.protocol,
        name=f"{transfer.protocol.value}/{transfer.name}/{backbone.partition('/')[2]}/seed{transfer_seed}",
        readable=f"{pretrain.model.name}-{readable_rule(target.space)}-seed{transfer_seed}",
        parameters={
            "model": model_parameters(pretrain.model),
            "recipe": transfer.recipe,
            "seed": transfer_seed,
            **subset_parameters(transfer.subset),
        },
        inputs={"index": f"index/{target.dataset}", "labels": f"labels/{target.name}", "backbone": backbone},
        facets={
            **pretrain_facets(pretrain, space, seed),
            "transfer": transfer.name,
            "protocol": transfer.protocol.value,
            "target": transfer.target,
            "transfer_seed": transfer_seed,
        },
    )
