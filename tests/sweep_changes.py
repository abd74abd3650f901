"""The declared role of every field of the language; see ``tests/sweep_fields.py``."""

from __future__ import annotations

from collections.abc import Mapping

from tests.sweep_fields import Change
from tests.sweep_fields import identity as _is
from tests.sweep_fields import picks as _picks
from tests.sweep_fields import runs as _runs
from tests.sweep_fields import shares as _shares


def _recipe(field: str, value: str, *given: str, of: str = "pretrain") -> Change:
    return _is(
        f"pretrain.first.recipe.{field}={value}", of=of, given=tuple(f"pretrain.first.recipe.{one}" for one in given)
    )


_SEEN = "pretrain embed"  # clusters see images as the pretraining of their backbone does
_LABELS = "labels"
_K = "labels.k.clusters"
_FILE = "pretrain.third.init"
_FIFTH = "pretrain.fifth.checkpoints"

TOP: Mapping[str, Change] = {
    "SweepSpec.version": _runs("version=1"),  # there is one version
    "SweepSpec.name": _runs("name=other"),
    "SweepSpec.datasets": _picks("datasets.more={builtin: digits}"),
    "SweepSpec.labels": _picks("labels.more={dataset: tree, modulo: 3}"),
    "SweepSpec.recipes": _is("recipes.short.lr=0.2", of="pretrain"),
    "SweepSpec.pretrain": _picks(
        "pretrain.sixth={model: {name: test_vit, image_size: 32}, labels: [mod], recipe: short}"
    ),
    "SweepSpec.transfer": _picks("transfer.near.name=nearest"),
    "SweepSpec.simulate": _picks("simulate.more={run: x, metric: m}"),
    "SweepSpec.analyze": _picks("analyze.1.name=similarity"),
    "SweepSpec.report": _runs("report.baseline=levels/depth2"),
    "SweepSpec.resources": _runs("resources.data.cpus=2"),
    "SweepSpec.compute": _runs("compute.micro_batch=8"),
    "SweepSpec.store": _runs("store=s3://bucket/other"),
    "SweepSpec.tracking": _runs("tracking.experiment=other"),
    "SweepSpec.policy": _runs("policy.failures=5"),
    "SweepSpec.notify": _runs("notify=[]"),
    "NotifySpec.on": _runs("notify.0.on=[failed]"),
    "NotifySpec.webhook": _runs("notify.0.webhook=https://other.example.org/x"),
    "NotifySpec.secret": _runs("notify.0.secret=${env:OTHER_HOOK_KEY}"),
    "NotifySpec.slack": _runs("notify.1.slack=${env:OTHER_SLACK_HOOK}"),
    "NotifySpec.email": _runs("notify.2.email.to=[x@y.org]"),
    "NotifySpec.stalled_after": _runs("notify.1.stalled_after=2h"),
    **{
        f"EmailSpec.{field}": _runs(f"notify.2.email.{field}={value}")
        for field, value in {
            "to": "[e@f.org]",
            "sender": "g@h.org",
            "server": "smtp.other.org:465",
            "user": "somebody",
            "password": "${file:/run/secrets/mail}",
            "security": "tls",
        }.items()
    },
    "ReportSpec.baseline": _runs("report.baseline=levels/depth2"),
    "ReportSpec.metric": _runs("report.metric=best_val_error"),
    "ReportSpec.rows": _runs("report.rows=[labels]"),
    "ReportSpec.published": _runs("report.published=[]"),
    **{
        f"PublishedSpec.{field}": _runs(f"report.published.0.{field}={value}")
        for field, value in {
            "transfer": "near",
            "label_space": "levels/depth2",
            "value": "0.2",
            "std": "0.01",
            "source": "a paper",
            "pretrain": "first",
            "checkpoint": "epoch1",
            "fraction": "'0.5'",
            "cell": "lr=0.1",
            "num_runs": "3",
        }.items()
    },
    "TrackingSpec.uri": _runs("tracking.uri=http://host"),
    "TrackingSpec.experiment": _runs("tracking.experiment=other"),
    "TrackingSpec.register": _runs("tracking.register=best"),
    "ComputeSpec.compile": _runs("compute.compile=default"),
    "ComputeSpec.activation_checkpointing": _runs("compute.activation_checkpointing=true"),
    "ComputeSpec.deterministic": _runs("compute.deterministic=true"),
    "ComputeSpec.micro_batch": _runs("compute.micro_batch=16"),
    **{
        f"PolicySpec.{field}": _runs(f"policy.{field}={value}")
        for field, value in {
            "priority": "high",
            "weight": "2",
            "max_gpus": "4",
            "max_concurrent": "3",
            "failures": "9",
            "preemptions": "1",
            "breaker": "0",
            "budget": "{gpu_hours: 7}",
            "deadline": "36h",
            "users": "[somebody]",
            "expectations": "fail",
        }.items()
    },
    "BudgetSpec.gpu_hours": _runs("policy.budget.gpu_hours=9"),
    "BudgetSpec.cost": _runs("policy.budget.cost=9", "policy.budget.gpu_hour_price=2"),
    "BudgetSpec.gpu_hour_price": _runs("policy.budget.gpu_hour_price=2"),
    **{
        f"ResourceGroups.{group}": _runs(f"resources.{group}.cpus=3")
        for group in ("data", "embed", "cluster", "pretrain", "transfer", "analyze", "simulate")
    },
    **{
        f"ResourcesSpec.{field}": _runs(f"resources.pretrain.{field}={value}")
        for field, value in {
            "cpus": "5",
            "gpus": "4",
            "min_gpus": "1",
            "memory_gib": "7",
            "workers": "2",
            "accelerator": "A100",
            "spot": "never",
            "labels": "{zone: a}",
        }.items()
    },
}

_EXPECT = "simulate.sim.expect"
SIMULATE: Mapping[str, Change] = {
    **{f"SimulationSweepSpec.{field}": TOP[f"SweepSpec.{field}"] for field in ("datasets", "labels", "pretrain")},
    "SimulateSpec.run": _is("simulate.sim.run=other", of="theory"),
    "SimulateSpec.parameters": _is("simulate.sim.parameters.steps=4", of="theory"),
    "SimulateSpec.factors": _picks("simulate.sim.factors.k=[2, 4, 8]"),
    "SimulateSpec.seeds": _picks("simulate.sim.seeds.count=6"),
    "SimulateSpec.metric": _runs("simulate.sim.metric=other"),
    "SimulateSpec.expect": _runs("simulate.sim.expect=[]"),
    "SeedBlocksSpec.count": _picks("simulate.sim.seeds.count=5"),
    "SeedBlocksSpec.first": _picks("simulate.sim.seeds.first=2"),
    "SeedBlocksSpec.per_job": _picks("simulate.sim.seeds.per_job=4"),
    **{
        f"ExpectSpec.{field}": _runs(f"{_EXPECT}.{value}")
        for field, value in {
            "slope": "0.slope={of: k}",
            "ratio": "1.ratio.numerator=coarse",
            "ordering": "2.ordering.ascending=[fine, coarse]",
            "monotone": "3.monotone.direction=falling",
            "threshold": "4.threshold.above=3",
            "closed_form": "5.closed_form.metric=third",
            "between": "0.between=[-2, -1]",
            "where": "0.where={labels: fine}",
            "metric": "0.metric=other",
            "paper": "0.paper=-1",
            "source": "0.source=theorem 5.1",
        }.items()
    },
    "SlopeSpec.of": _runs(f"{_EXPECT}.0.slope.of=k"),
    "SlopeSpec.log": _runs(f"{_EXPECT}.0.slope.log=false"),
    "RatioSpec.of": _runs(f"{_EXPECT}.1.ratio={{of: k, numerator: 2, denominator: 4}}"),
    "RatioSpec.numerator": _runs(f"{_EXPECT}.1.ratio.numerator=coarse"),
    "RatioSpec.denominator": _runs(f"{_EXPECT}.1.ratio.denominator=fine"),
    "OrderingSpec.of": _runs(f"{_EXPECT}.2.ordering={{of: k, ascending: [2, 4]}}"),
    "OrderingSpec.ascending": _runs(f"{_EXPECT}.2.ordering.ascending=[fine, coarse]"),
    "MonotoneSpec.of": _runs(f"{_EXPECT}.3.monotone.of=k"),
    "MonotoneSpec.direction": _runs(f"{_EXPECT}.3.monotone.direction=falling"),
    "ThresholdSpec.above": _runs(f"{_EXPECT}.4.threshold.above=3"),
    "ThresholdSpec.below": _runs(f"{_EXPECT}.6.threshold.below=4"),
    "ClosedFormSpec.metric": _runs(f"{_EXPECT}.5.closed_form.metric=third"),
    "ClosedFormSpec.within": _runs(f"{_EXPECT}.5.closed_form.within=0.2"),
}

LABELS: Mapping[str, Change] = {
    "LabelEntry.dataset": _picks("labels.plain.dataset=scans"),
    "LabelEntry.hierarchy": _picks("labels.levels.hierarchy=[depth1, depth2, leaf]"),
    "LabelEntry.random": _is("labels.rnd.random.seed=1", of=_LABELS),
    "LabelEntry.modulo": _is("labels.mod.modulo=3", of=_LABELS),
    "LabelEntry.split": _is("labels.split.split=3", of=_LABELS),
    "LabelEntry.merge": _is("labels.groups.merge.others=drop", of=_LABELS),
    "LabelEntry.binary": _is("labels.parity.binary=[1]", of=_LABELS),
    "LabelEntry.wordnet": _is("labels.wn.wordnet.paths=all", of=_LABELS),
    "LabelEntry.taxonomy": _is("labels.tax.taxonomy.key=other", of=_LABELS),
    "LabelEntry.plugin": _is("labels.plug.plugin.name=other", of=_LABELS),
    "LabelEntry.clusters": _is(f"{_K}.seed=1", of="cluster labels"),
    "LabelEntry.base": _is("labels.mod.base=levels/depth2", of=_LABELS),
    "LabelEntry.num_classes": _runs("labels.levels.num_classes=[2, 8]"),
    "LabelEntry.classes": _is("labels.named.classes.names=[0, 2]", of=_LABELS),
    "RandomIds.num_classes": _picks("labels.rnd.random.num_classes=[16, 8]"),
    "RandomIds.seed": _is("labels.rnd.random.seed=2", of=_LABELS),
    "RandomIds.independent": _is("labels.rnd.random.independent=true", of=_LABELS),
    "RandomIds.within": _is("labels.rnd.random.within=levels/depth1", of=_LABELS),
    "RandomSplit.num": _is("labels.splits.split.num=3", of=_LABELS),
    "RandomSplit.seed": _is("labels.splits.split.seed=3", of=_LABELS),
    "RandomSplit.balanced": _is("labels.splits.split.balanced=true", of=_LABELS),
    "Merge.groups": _is("labels.groups.merge.groups.one=[0, 2]", of=_LABELS),
    "Merge.others": _is("labels.groups.merge.others=drop", of=_LABELS),
    "Merge.num_classes": _picks("labels.merges.merge.num_classes=[3, 4]"),
    "Merge.seed": _is("labels.merges.merge.seed=1", of=_LABELS),
    "WordNetLevels.levels": _picks("labels.wn.wordnet.levels=[1, 2]"),
    "WordNetLevels.contains": _is("labels.below.wordnet.contains=n00000002", of=_LABELS),
    "WordNetLevels.paths": _is("labels.wn.wordnet.paths=first", of=_LABELS),
    "WordNetLevels.seed": _is("labels.wn.wordnet.seed=1", of=_LABELS),
    "WordNetLevels.key": _is("labels.wn.wordnet.key=wnid", of=_LABELS),
    "WordNetLevels.file": _runs("labels.wn.wordnet.file=/data.noun"),  # its digest is the identity
    "Taxonomy.levels": _picks("labels.folders.taxonomy.levels=[a]", of=_LABELS),
    "Taxonomy.table": _runs("labels.tax.taxonomy.table=/other.csv"),  # its digest is the identity
    "Taxonomy.key": _is("labels.tax.taxonomy.key=id", of=_LABELS),
    "Taxonomy.class_key": _is("labels.tax.taxonomy.class_key=id", of=_LABELS),
    "Taxonomy.folders": _is("labels.folders.taxonomy.folders=[b, a]", of=_LABELS),
    "Taxonomy.separator": _is("labels.folders.taxonomy.separator='-'", of=_LABELS),
    "Taxonomy.nested": _is("labels.tax.taxonomy.nested=false", of=_LABELS),
    "Plugin.name": _is("labels.plug.plugin.name=other", of=_LABELS),
    "Plugin.arguments": _is("labels.plug.plugin.arguments={x: 1}", of=_LABELS),
    "ClassChoice.names": _is("labels.named.classes.names=[0, 2]", of=_LABELS),
    "ClassChoice.under": _is("labels.under.classes.under=n00000002", of=_LABELS),
    "ClassChoice.num": _is("labels.some.classes.num=4", of=_LABELS),
    "ClassChoice.seed": _is("labels.some.classes.seed=4", of=_LABELS),
    "ClassChoice.key": _is("labels.under.classes.key=wnid", of=_LABELS),
    "ClassChoice.file": _runs("labels.under.classes.file=/data.noun"),
    "ClustersSpec.k": _picks(f"{_K}.k=[4, 8]"),
    "ClustersSpec.rebalanced": _is("labels.even.clusters.rebalanced.min_samples=5", of="cluster labels"),
    "ClustersSpec.within": _is(f"{_K}.within=levels/depth1", of="cluster labels"),
    "ClustersSpec.embed": _is(f"{_K}.embed.view=mirrored", of="embed"),
    "ClustersSpec.seed": _is(f"{_K}.seed=3", of="cluster labels"),
    "ClustersSpec.iterations": _is(f"{_K}.iterations=3", of="cluster labels"),
    "ClustersSpec.num_init": _is(f"{_K}.num_init=3", of="cluster labels"),
    "ClustersSpec.library": _is(f"{_K}.library=scikit-learn", of="cluster labels"),
    "Rebalanced.min_samples": _is("labels.even.clusters.rebalanced.min_samples=6", of="cluster labels"),
    "EmbedSpec.backbone": _is(f"{_K}.embed.backbone.seed=1", of=""),
    "EmbedSpec.model": _is("labels.even.clusters.embed.model.image_size=48", of="embed"),
    "EmbedSpec.init": _is("labels.kept.clusters.embed.init.artifact=pretrain-x-1", of="embed"),
    **{
        f"EmbedSpec.{field}": _is(f"{_K}.embed.{field}={value}", of="embed")
        for field, value in {
            "view": "mirrored",
            "resize": "40",
            "interpolation": "bicubic",
            "decoder": "turbo",
            "mean": "[0.1, 0.1, 0.1]",
            "std": "[0.1, 0.1, 0.1]",
            "precision": "bf16",
        }.items()
    },
    "EmbedSpec.output": _is("labels.even.clusters.embed.output=projection", of="embed"),
    "SweptBackbone.pretrain": _is(
        f"{_K}.embed.backbone.pretrain=fifth", f"{_K}.embed.backbone.labels=levels/depth1", of=""
    ),
    "SweptBackbone.labels": _is(f"{_K}.embed.backbone.labels=levels/depth1", of=""),
    "SweptBackbone.seed": _is(f"{_K}.embed.backbone.seed=1", of=""),
}

PRETRAIN: Mapping[str, Change] = {
    "PretrainSpec.model": _is("pretrain.third.model.image_size=48", of="pretrain embed analyze"),
    "PretrainSpec.init": _is("pretrain.third.init=null", of="pretrain"),
    "PretrainSpec.labels": _picks("pretrain.third.labels=[levels/depth1, mod]"),
    "PretrainSpec.recipe": _is("pretrain.third.recipe.lr=0.7", of="pretrain"),
    "PretrainSpec.seeds": _picks("pretrain.third.seeds=[0, 1]"),
    "PretrainSpec.subset": _is("pretrain.third.subset={max_per_class: 9}", of="pretrain"),
    "PretrainSpec.factors": _runs("pretrain.third.factors.rate=high"),
    "PretrainSpec.design": _picks(
        "pretrain.third.design=[{rate: high}]",
        given=("pretrain.third.factors.rate={low: {}, high: {recipe: {lr: 0.7}}}",),
    ),
    "PretrainSpec.checkpoints": _is("pretrain.third.checkpoints.keep.epochs=[1]", of="pretrain"),
    "ModelSpec.name": _is(
        "pretrain.third.model.name=test_resnet", of="pretrain embed analyze", given=("resources.pretrain.gpus=1",)
    ),
    "ModelSpec.image_size": _is("pretrain.third.model.image_size=48", of="pretrain embed analyze"),
    "ModelSpec.kwargs": _is("pretrain.third.model.kwargs={qk_norm: true}", of="pretrain embed analyze"),
    "InitialSpec.artifact": _is("pretrain.fifth.init.artifact=pretrain-x-1", of="pretrain"),
    "InitialSpec.uri": _runs(f"{_FILE}.uri=s3://bucket/w.safetensors"),  # its sha256 is the identity
    "InitialSpec.sha256": _is(f"{_FILE}.sha256={'f' * 64}", of="pretrain"),
    "InitialSpec.timm": _is("pretrain.fourth.init=null", of="pretrain"),  # this model has a single tag
    "BackboneInitSpec.pretrain": _is("pretrain.second.init.pretrain=third", of=""),
    "BackboneInitSpec.labels": _is("pretrain.second.init.labels=levels/depth2", of=""),
    "BackboneInitSpec.seed": _is("pretrain.second.init.seed=1", of=""),
    "SubsetSpec.fraction": _is("pretrain.fourth.subset.fraction=0.7", of="pretrain"),
    "SubsetSpec.max_per_class": _is("pretrain.fourth.subset.max_per_class=20", of="pretrain"),
    "SubsetSpec.num_samples": _is("pretrain.fourth.subset.num_samples=100", of="pretrain"),
    "SubsetSpec.seed": _is("pretrain.fourth.subset.seed=1", of="pretrain"),
    "CheckpointsSpec.every": _runs(f"{_FIFTH}.every={{steps: 5}}"),
    "CheckpointsSpec.mtbf_s": _runs(f"{_FIFTH}.mtbf_s=60.0"),
    "CheckpointsSpec.keep": _is(f"{_FIFTH}.keep.epochs=[1]", of="pretrain"),
    "IntervalSpec.steps": _runs(f"{_FIFTH}.every.steps=6", given=(f"{_FIFTH}.every={{steps: 5}}",)),
    "IntervalSpec.epochs": _runs(f"{_FIFTH}.every.epochs=2", given=(f"{_FIFTH}.every={{epochs: 1}}",)),
    "KeepSpec.last": _runs(f"{_FIFTH}.keep.last=3"),
    "KeepSpec.best": _is(f"{_FIFTH}.keep.best.k=3", of="pretrain"),
    "KeepSpec.epochs": _is(f"{_FIFTH}.keep.epochs=[2, 3]", of="pretrain"),
    "BestSpec.metric": _is(f"{_FIFTH}.keep.best.metric=val_loss", of="pretrain"),
    "BestSpec.k": _is(f"{_FIFTH}.keep.best.k=4", of="pretrain"),
}

RECIPES: Mapping[str, Change] = {
    "RecipeSpec.epochs": _recipe("epochs", "3"),
    "RecipeSpec.batch_size": _recipe("batch_size", "32"),
    "RecipeSpec.lr": _recipe("lr", "0.5"),
    "RecipeSpec.optimizer": _recipe("optimizer", "adamw"),
    "RecipeSpec.momentum": _recipe("momentum", "0.8"),
    "RecipeSpec.nesterov": _recipe("nesterov", "true"),
    "RecipeSpec.betas": _recipe("betas", "[0.8, 0.99]", "optimizer=adamw"),
    "RecipeSpec.eps": _recipe("eps", "1e-7", "optimizer=adamw"),
    "RecipeSpec.weight_decay": _recipe("weight_decay", "0.1"),
    "RecipeSpec.weight_decay_on": _recipe("weight_decay_on", "no_bias_norm", "weight_decay=0.1"),
    "RecipeSpec.schedule": _recipe("schedule", "linear"),
    "RecipeSpec.warmup_epochs": _recipe("warmup_epochs", "1"),
    "RecipeSpec.warmup_steps": _recipe("warmup_steps", "2"),
    "RecipeSpec.constant_epochs": _recipe("constant_epochs", "1"),
    "RecipeSpec.lr_final": _recipe("lr_final", "1e-4"),
    "RecipeSpec.lr_every": _recipe("lr_every", "epoch"),
    "RecipeSpec.decay_rate": _recipe("decay_rate", "0.5", "schedule=step", "milestones=[1]"),
    "RecipeSpec.decay_every_epochs": _recipe(
        "decay_every_epochs", "0.5", "schedule=exponential", "decay_rate=0.9", "decay_every_epochs=1"
    ),
    "RecipeSpec.milestones": _recipe("milestones", "[1.5]", "schedule=step", "milestones=[1]"),
    "RecipeSpec.loss": _recipe("loss", "sigmoid"),
    "RecipeSpec.loss_arguments": _recipe("loss_arguments", "{gamma: 2}", "loss=mine"),
    "RecipeSpec.augment_plugin": _recipe("augment_plugin", "mine"),
    "RecipeSpec.augment_arguments": _recipe("augment_arguments", "{side: 4}", "augment_plugin=mine"),
    "RecipeSpec.label_smoothing": _recipe("label_smoothing", "0.1"),
    "RecipeSpec.head_bias": _recipe("head_bias", "-4"),
    "RecipeSpec.head_init": _recipe("head_init", "zeros"),
    "RecipeSpec.dropout": _recipe("dropout", "0.1"),
    "RecipeSpec.drop_path": _recipe("drop_path", "0.1"),
    "RecipeSpec.mixup": _recipe("mixup", "0.2"),
    "RecipeSpec.cutmix": _recipe("cutmix", "0.2"),
    "RecipeSpec.mix_prob": _recipe("mix_prob", "0.5", "mixup=0.2"),
    "RecipeSpec.cutmix_share": _recipe("cutmix_share", "0.3", "mixup=0.2", "cutmix=0.2"),
    "RecipeSpec.grad_clip": _recipe("grad_clip", "1"),
    "RecipeSpec.average": _recipe("average", "ema"),
    "RecipeSpec.average_decay": _recipe("average_decay", "0.9", "average=ema"),
    "RecipeSpec.average_start_epoch": _recipe("average_start_epoch", "1", "average=ema"),
    "RecipeSpec.freeze": _recipe("freeze", "backbone"),
    "RecipeSpec.on_numerics": _recipe("on_numerics", "{rewind: 3}"),
    "RecipeSpec.grad_spike": _recipe("grad_spike", "10"),
    "RecipeSpec.augment": _recipe("augment", "flip"),
    "RecipeSpec.resize": _recipe("resize", "40", of=_SEEN),
    "RecipeSpec.interpolation": _recipe("interpolation", "bicubic", of=_SEEN),
    "RecipeSpec.crop_scale": _recipe("crop_scale", "[0.2, 1]", "augment=random_resized_crop"),
    "RecipeSpec.crop_ratio": _recipe("crop_ratio", "[0.8, 1]", "augment=random_resized_crop"),
    "RecipeSpec.color_jitter": _recipe("color_jitter", "0.1"),
    "RecipeSpec.decoder": _recipe("decoder", "turbo", of=_SEEN),
    "RecipeSpec.norm_group": _recipe("norm_group", "32"),
    "RecipeSpec.precision": _recipe("precision", "bf16"),
    "RecipeSpec.tf32": _recipe("tf32", "true"),
    "RecipeSpec.grad_reduction": _recipe("grad_reduction", "bf16"),
    "RecipeSpec.shuffle_block_shards": _recipe("shuffle_block_shards", "8"),
    "RecipeSpec.shuffle_chunk_samples": _recipe("shuffle_chunk_samples", "4"),
    "RecipeSpec.data_groups": _recipe("data_groups", "2"),
    "RecipeSpec.mean": _recipe("mean", "[0.4, 0.4, 0.4]", of=_SEEN),
    "RecipeSpec.std": _recipe("std", "[0.4, 0.4, 0.4]", of=_SEEN),
    "RecipeSpec.eval_every_epochs": _recipe("eval_every_epochs", "2"),
    "RecipeSpec.select_holdout": _recipe("select_holdout", "0.2"),
}

TRANSFERS: Mapping[str, Change] = {
    "TransferSpec.name": _picks("transfer.near.name=nearest"),
    "TransferSpec.target": _is("transfer.tune.target=levels/depth2", of=""),
    "TransferSpec.protocol": _picks("transfer.line.protocol=finetune"),
    "TransferSpec.pretrain": _picks("transfer.tune.pretrain=[fourth, fifth]"),
    "TransferSpec.recipe": _is("transfer.tune.recipe.lr=0.7", of="finetune"),
    "TransferSpec.labels": _picks("transfer.tune.labels=[levels/depth1]", given=("transfer.tune.pretrain=[first]",)),
    "TransferSpec.seeds": _picks("transfer.tune.seeds=[0, 1]"),
    "TransferSpec.subset": _is("transfer.line.subset.num_samples=200", of="probe"),
    "TransferSpec.fractions": _picks("transfer.opti.fractions=[0.5, 1.0]"),
    "TransferSpec.from_checkpoints": _picks("transfer.tune.from_checkpoints=[1, 3]"),
    "TransferSpec.grid": _picks("transfer.grid.grid.momentum=[0.7, 0.8, 0.9]"),
    "TransferSpec.search": _picks("transfer.tune.search={random: {}, space: {momentum: [0.8, 0.9]}}", of="finetune"),
    **{
        f"SearchSpec.{field}": _is(f"transfer.seek.search.{field}={value}", of="search")
        for field, value in {"asha": "{reduction: 4}", "trials": "5", "seed": "1"}.items()
    },
    **{
        f"SearchSpec.{rule}": _is("transfer.seek.search.asha=null", f"transfer.seek.search.{rule}={{}}", of="search")
        for rule in ("random", "optuna")
    },
    "SearchSpec.over": _picks(
        "transfer.seek.search.over=pretrain",
        "transfer.seek.recipe.lr=0.1",
        of="finetune",
        given=("resources.pretrain.gpus=1",),
    ),
    "SearchSpec.space": _is("transfer.seek.search.space.weight_decay=[0.0, 0.2]", of="search"),
    "SearchSpec.concurrent": _runs("transfer.seek.search.concurrent=2"),
    "AshaSpec.reduction": _is("transfer.seek.search.asha.reduction=4", of="search"),
    "AshaSpec.grace_epochs": _is(
        "transfer.seek.search.asha.grace_epochs=2", of="search", given=("transfer.seek.recipe.epochs=4",)
    ),
    "OptunaSpec.startup_trials": _is(
        "transfer.seek.search.optuna.startup_trials=5",
        of="search",
        given=("transfer.seek.search.asha=null", "transfer.seek.search.optuna={}"),
    ),
    **{
        f"RangeSpec.{rule}": _is(
            f"transfer.seek.search.space.warmup_steps.{rule}=[1, 4]",
            of="search",
            given=(f"transfer.seek.search.space.warmup_steps={{{rule}: [1, 2]}}",),
        )
        for rule in ("integer", "log_integer")
    },
    "RangeSpec.uniform": _is(
        "transfer.seek.search.space.lr.log=null", "transfer.seek.search.space.lr.uniform=[1e-3, 0.1]", of="search"
    ),
    "RangeSpec.log": _is("transfer.seek.search.space.lr.log=[1e-4, 0.1]", of="search"),
    "TransferSpec.select_on": _is("transfer.grid.select_on=val", of="finetune"),
    "TransferSpec.baselines": _picks("transfer.line.baselines=[retrain]"),
    "ProbeSpec.features": _picks(
        "transfer.line.recipe={features: cached, epochs: null, batch_size: null, lr: null}", of="probe"
    ),
    "CachedSgdSpec.solver": _is("transfer.sgd.recipe=cached-probe", of="probe"),
    "LogisticSpec.solver": _is("transfer.opti.recipe=cached-probe-sgd", of="probe"),
    "LogisticSpec.features": _is(
        "transfer.opti.recipe={base: null, features: online, epochs: 1, batch_size: 64, lr: 0.1}", of="probe"
    ),
    **{
        f"LogisticSpec.{field}": _is(f"transfer.opti.recipe.{field}={value}", of="probe")
        for field, value in {
            "l2": "[0.1, 0.2]",
            "loss": "sigmoid",
            "scaling": "none",
            "max_iterations": "7",
            "tolerance": "0.01",
        }.items()
    },
    "LogisticSpec.views": _picks("transfer.opti.recipe.views=[center, mirrored]", of="probe"),
    "_Frozen.select_holdout": _is("transfer.near.recipe.select_holdout=0.2", of="knn"),
    **{
        f"_Frozen.{field}": _picks(f"transfer.near.recipe.{field}={value}")  # other features, of jobs of another name
        for field, value in {
            "resize": "40",
            "interpolation": "bicubic",
            "decoder": "turbo",
            "mean": "[0.1, 0.1, 0.1]",
            "std": "[0.1, 0.1, 0.1]",
            "precision": "bf16",
        }.items()
    },
    "KnnSpec.k": _is("transfer.near.recipe.k=[3, 5]", of="knn"),
    "KnnSpec.votes": _is("transfer.near.recipe.votes=equal", of="knn"),
    "KnnSpec.temperature": _is("transfer.near.recipe.temperature=0.2", of="knn"),
}

_MEASURES = "analyze.0.measures"
_COLLAPSE = f"{_MEASURES}=[collapse]"

ANALYZE: Mapping[str, Change] = {
    "AnalysisSpec.name": _picks("analyze.0.name=other"),
    "AnalysisSpec.measures": _is("analyze.0.measures=[collapse, rank]", of="analyze"),
    "AnalysisSpec.dataset": _picks("analyze.1.dataset=scans"),
    "AnalysisSpec.split": _picks("analyze.1.split=train", of="analyze"),
    "AnalysisSpec.of": _is("analyze.0.of=levels/depth1", of=""),
    "AnalysisSpec.pretrain": _picks("analyze.0.pretrain=[second]"),
    "AnalysisSpec.labels": _picks(
        "analyze.0.labels=[levels/depth2]",
        given=("analyze.0.pretrain=[first]", "analyze.0.from_checkpoints=[2]", "analyze.0.dataset=tree", _COLLAPSE),
    ),
    "AnalysisSpec.from_checkpoints": _picks("analyze.0.from_checkpoints=[1]"),
    "AnalysisSpec.between": _picks("analyze.1.between=[pretrain, seeds]"),
    "MeasureSpec.distances": _is(f"{_MEASURES}.1.distances.levels=null", of="analyze"),
    "MeasureSpec.clp": _is(f"{_MEASURES}.2.clp={{reduce: none}}", of="analyze"),
    "MeasureSpec.purity": _is(f"{_MEASURES}.3.purity={{top: 5}}", of="analyze"),
    "MeasureSpec.sparsity": _is("analyze.2.measures.0.sparsity={samples: 50}", of="analyze"),
    "MeasureSpec.embedding": _is(f"{_MEASURES}.4.embedding={{seed: 5}}", of="analyze"),
    "MeasureSpec.plugin": _is(f"{_MEASURES}.5.plugin={{name: other}}", of="analyze"),
    "DistancesSpec.levels": _is(f"{_MEASURES}.1.distances.levels=[depth1, depth2]", of="analyze"),
    "ClpSpec.reduce": _is(f"{_MEASURES}.2.clp.reduce=pca", of="analyze"),
    "ClpSpec.seeds": _is(f"{_MEASURES}.2.clp.seeds=[0, 1]", of="analyze"),
    "ClpSpec.samples": _is(f"{_MEASURES}.2.clp.samples=500", of="analyze"),
    "ClpSpec.raw_pixels": _is(f"{_MEASURES}.2.clp.raw_pixels=false", of="analyze"),
    "PuritySpec.top": _is(f"{_MEASURES}.3.purity.top=10", of="analyze"),
    "SparsitySpec.samples": _is("analyze.2.measures.0.sparsity.samples=200", of="analyze"),
    "EmbeddingSpec.method": _is(f"{_MEASURES}.4.embedding.method=pca", of="analyze"),
    "EmbeddingSpec.samples": _is(f"{_MEASURES}.4.embedding.samples=50", of="analyze"),
    "EmbeddingSpec.seed": _is(f"{_MEASURES}.4.embedding.seed=1", of="analyze"),
    "PluginMeasure.name": _is(f"{_MEASURES}.5.plugin.name=other", of="analyze"),
    "PluginMeasure.arguments": _is(f"{_MEASURES}.5.plugin.arguments={{a: 1}}", of="analyze"),
}

_PHOTOS = "datasets.photos"


def _tree(field: str, value: str) -> Change:
    return _is(f"datasets.tree.{field}={value}", of="dataset")


DATASETS: Mapping[str, Change] = {
    "SyntheticHierarchy.builtin": _is("datasets.tree.builtin=synthetic-hierarchy", of=""),  # there is no other one
    "SyntheticHierarchy.branching": _tree("branching", "[2, 8]"),
    "SyntheticHierarchy.num_train": _tree("num_train", "600"),
    "SyntheticHierarchy.num_val": _tree("num_val", "300"),
    "SyntheticHierarchy.image_size": _tree("image_size", "64"),
    "SyntheticHierarchy.patch_size": _tree("patch_size", "4"),
    "SyntheticHierarchy.hard_fraction": _tree("hard_fraction", "0.4"),
    "SyntheticHierarchy.noise": _tree("noise", "0.9"),
    "SyntheticHierarchy.feature_amplitude": _tree("feature_amplitude", "1.1"),
    "SyntheticHierarchy.amplitude_jitter": _tree("amplitude_jitter", "0.1"),
    "SyntheticHierarchy.weak_amplitude": _tree("weak_amplitude", "0.1"),
    "SyntheticHierarchy.num_weak_features": _tree("num_weak_features", "1"),
    "SyntheticHierarchy.num_common_patches": _tree("num_common_patches", "5"),
    "SyntheticHierarchy.num_subclass_patches": _tree("num_subclass_patches", "2"),
    "SyntheticHierarchy.seed": _tree("seed", "1"),
    "SyntheticHierarchy.jobs": _shares("datasets.tree.jobs=3"),
    "Digits.jobs": _shares("datasets.scans.jobs=2"),
    # Which images a source holds is in its listing, which the survey has; how it was found changes nothing.
    "ConversionSpec.format": _is("datasets.told.convert.format=parquet", of="dataset"),
    "ConversionSpec.source": _runs("datasets.told.convert.source=/elsewhere"),
    "ConversionSpec.splits": _runs("datasets.told.convert.splits={train: a.csv}"),
    "ConversionSpec.val_fraction": _runs("datasets.told.convert.val_fraction=0.1"),
    "ConversionSpec.listing": _runs(
        f"datasets.told.convert.listing={'e' * 64}",
        given=tuple(
            f"datasets.told.{one}" for one in ("num_train=512", "num_val=256", "num_classes=4", "levels={a: 2}")
        ),
    ),
    "ConversionSpec.labels": _runs("datasets.synsets.convert.labels=/labels.csv"),
    "ConversionSpec.path_column": _runs("datasets.told.convert.path_column=file"),
    "ConversionSpec.label_column": _runs("datasets.told.convert.label_column=tags"),
    "ConversionSpec.separator": _runs("datasets.told.convert.separator=;"),
    "ConversionSpec.level_columns": _runs("datasets.told.convert.level_columns=[a]"),
    "ConversionSpec.follow_links": _runs("datasets.told.convert.follow_links=true"),
    "ConversionSpec.root": _runs("datasets.told.convert.root=/photos"),
    "ConversionSpec.seed": _is("datasets.told.convert.seed=1", of="dataset"),
    "ConversionSpec.shard_mib": _is("datasets.told.convert.shard_mib=64", of="dataset"),
    "ConversionSpec.shuffle": _is("datasets.told.convert.shuffle=false", of="dataset"),
    "ConvertedShards.convert": _is("datasets.told.convert.seed=2", of="dataset"),
    "ConvertedShards.jobs": _shares("datasets.told.jobs=3"),
    "ConvertedShards.num_train": _runs("datasets.told.num_train=512"),
    "ConvertedShards.num_val": _runs("datasets.told.num_val=256"),
    "ConvertedShards.num_classes": _runs("datasets.told.num_classes=4"),
    "ConvertedShards.levels": _runs("datasets.told.levels={a: 2}"),
    "ConvertedShards.multi_label": _runs("datasets.told.multi_label=false"),
    "ConvertedShards.bad_samples": _is("datasets.told.bad_samples.policy=replace", of="index"),
    "Digits.builtin": _is("datasets.scans.builtin=digits", of=""),  # there is no other one
    "Digits.val_fraction": _is("datasets.scans.val_fraction=0.3", of="dataset"),
    "Digits.seed": _is("datasets.scans.seed=1", of="dataset"),
    "BadSamplesSpec.policy": _is(f"{_PHOTOS}.bad_samples.policy=replace", of="index"),
    "BadSamplesSpec.budget": _is(
        f"{_PHOTOS}.bad_samples.budget=0.2", of="index", given=(f"{_PHOTOS}.bad_samples.policy=replace",)
    ),
    "ExternalShards.from": _runs("datasets.described.from=file:///elsewhere"),
    "ExternalShards.shards": _runs(f"{_PHOTOS}.shards.train=file:///elsewhere/"),
    "ExternalShards.classes": _runs(f"{_PHOTOS}.classes=file:///elsewhere.json"),
    "ExternalShards.num_train": _runs(f"{_PHOTOS}.num_train=513"),
    "ExternalShards.num_val": _runs(f"{_PHOTOS}.num_val=100"),
    "ExternalShards.num_classes": _is("datasets.counted.num_classes=5", of="index"),
    "ExternalShards.levels": _runs(f"{_PHOTOS}.levels={{a: 2}}"),
    "ExternalShards.multi_label": _is(
        f"{_PHOTOS}.multi_label=true", of="index", given=("pretrain.first.recipe.loss=sigmoid",)
    ),
    "ExternalShards.digest": _is(f"{_PHOTOS}.digest={'e' * 64}", of="index"),
    "ExternalShards.bad_samples": _is(f"{_PHOTOS}.bad_samples.policy=replace", of="index"),
    "MixtureSpec.mixture": _is("datasets.both.mixture=[described, photos]", of=""),
    "MixtureSpec.weights": _is("datasets.both.weights=[1, 3]", of="index"),
}

CHANGES: Mapping[str, Change] = {
    **TOP,
    **SIMULATE,
    **DATASETS,
    **LABELS,
    **PRETRAIN,
    **RECIPES,
    **TRANSFERS,
    **ANALYZE,
}
