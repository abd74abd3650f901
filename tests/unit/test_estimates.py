"""Estimates: the model of speed, its correction by results, sizes, money."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.contract import Resources, Spot
from orchestrator.core.errors import UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.estimate.estimates import estimate, known_accelerator
from orchestrator.planning.estimate.eta import Fleet
from orchestrator.planning.estimate.flops import PEAKS, Fit, Machine, find_accelerator, network_of, start_s, steady_s
from orchestrator.planning.estimate.history import EstimateSource, Measurement, SpeedHistory, measure
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.planning.estimate.volumes import DatasetSize, Volumes
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.identity import subject_of
from orchestrator.planning.graph.plan import LABELLED, Job, Plan
from orchestrator.planning.graph.reuse import repeated_jobs
from orchestrator.services.preview import make_preview, preview_lines
from orchestrator.sweepfile.labels import LabelSources
from orchestrator.sweepfile.load import parse_sweep, shipped_recipes
from orchestrator.sweepfile.parse.tree import parse_tree
from orchestrator.sweepfile.problems import validate
from orchestrator.sweepfile.sweep import SweepSpec, resolve_sweep
from tests.golden_refusals import count_here
from tests.planning_cases import TEXT, named_blocks, plan_of
from workloads.train import step_metrics

PRETRAIN = "pretrain/levels/depth2/seed0"
RESNET18_MACS = 1_813_561_344  # at 224 pixels, the table's


def on_gpus(plan: Plan, gpus: float = 1.0, accelerator: str = "") -> Plan:
    """All jobs that train on a GPU."""
    resources = Resources(cpus=8, gpus=gpus, accelerator=accelerator)
    trained = {JobKind.PRETRAIN, JobKind.FINETUNE, JobKind.PROBE}
    jobs = [replace(job, resources=resources) if job.kind in trained else job for job in plan.jobs]
    return replace(plan, jobs=tuple(jobs))


def measurement(kind: JobKind, subject: str, ratio: float, accelerator: str = "", setup_s: float = 0.0) -> Measurement:
    return Measurement(
        kind=kind,
        subject=subject,
        machine=Machine(accelerator=accelerator),
        image_size=64,
        precision="fp32",
        seconds=100 * ratio,
        model_s=100,
        setup_s=setup_s,
    )


def test_accelerators_are_those_of_the_training_code() -> None:
    ours = {name: (peak.half, peak.tf32, peak.fp32) for name, peak in PEAKS.items()}
    assert ours == {name: (peak.half, peak.tf32, peak.fp32) for name, peak in step_metrics.PEAKS.items()}


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("x86_64 AMD EPYC", ""),
        ("NVIDIA Z9000", ""),
    ],
)
def test_find_accelerator_knows_devices_by_their_names(device: str, name: str) -> None:
    assert find_accelerator(device) == name
    assert known_accelerator(name.lower()) == name


def test_volume_of_a_pretraining_counts_what_the_recipe_does() -> None:
    plan = plan_of()
    volume = Volumes(plan).of(plan.by_name()[PRETRAIN])
    assert volume.work.num_steps == 16  # 2 epochs of 512 in batches of 64
    assert volume.work.images == 1024
    assert volume.work.eval_images == 2 * 256
    forward = 2 * (RESNET18_MACS * (64 / 224) ** 2 + 512 * 8)
    assert volume.work.operations == pytest.approx(3 * forward * 1024)
    assert volume.kept_bytes == pytest.approx(4 * (11_176_512 + 513 * 8), rel=0.001)
    assert volume.caveat == ""


def test_volume_of_a_subset_is_smaller() -> None:
    whole, part = plan_of(), plan_of(TEXT.replace("  seeds: [0, 1]\n", "  seeds: [0, 1]\n  subset: {fraction: 0.25}\n"))
    steps = [Volumes(plan).of(plan.by_name()[PRETRAIN]).work.num_steps for plan in (whole, part)]
    assert steps == [16, 4]


def test_volume_of_a_cap_counts_leaf_classes_whatever_is_trained_on() -> None:
    plan = plan_of(TEXT.replace("  seeds: [0, 1]\n", "  seeds: [0, 1]\n  subset: {max_per_class: 16}\n"))
    jobs = [plan.by_name()[f"pretrain/levels/{level}/seed0"] for level in ("depth1", "depth2")]
    assert [Volumes(plan).of(job).work.num_steps for job in jobs] == [4, 4]  # 2 epochs of 8 * 16 in batches of 64


def test_volume_of_some_classes_is_that_of_their_samples() -> None:
    few = "  few: {dataset: tree, hierarchy: [depth2], classes: {num: 2}}\npretrain:"
    text = TEXT.replace("pretrain:", few, 1).replace('labels: ["levels/*"]', 'labels: ["levels/*", few/depth2]')
    tree = parse_tree(text, "sweep.yaml")
    spec = validate(SweepSpec, tree.value, tree)
    sweep = resolve_sweep(spec, tree, shipped_recipes(), labels=LabelSources(count=count_here))
    plan = build_plan(sweep, store_uri="file:///nowhere")
    work = Volumes(plan).of(plan.by_name()["pretrain/few/depth2/seed0"]).work
    assert (work.num_steps, work.eval_images) == (4, 2 * 64)  # 2 epochs of a quarter of 512, and of 256
    keys = {job.name: job.key for job in plan_of().jobs}
    assert keys.items() <= {job.name: job.key for job in plan.jobs}.items()


def test_volume_of_classes_that_nobody_has_counted_says_so() -> None:
    plan = plan_of()
    jobs = [
        replace(job, facets={**job.facets, LABELLED: 0}) if job.kind is JobKind.LABELS else job for job in plan.jobs
    ]
    unknown = replace(plan, jobs=tuple(jobs))
    volume = Volumes(unknown).of(unknown.by_name()[PRETRAIN])
    assert volume.work.num_steps == 16
    assert "how many samples its label space leaves out is not known" in volume.caveat


def test_volume_of_a_data_set_of_unknown_size_says_so_until_it_is_told() -> None:
    plan = plan_of()
    index = plan.by_name()["index/tree"]
    job = plan.by_name()[PRETRAIN]
    alone = replace(plan, jobs=tuple(j for j in plan.jobs if j.kind is not JobKind.DATASET))
    assert "declare num_train" in Volumes(alone).of(job).caveat
    told = Volumes(alone, {index.name: DatasetSize(num_train=51_200, num_val=1)}).of(job)
    assert told.caveat == ""
    assert told.work.num_steps == 1600


def test_estimate_all_kinds_without_history_come_from_the_model() -> None:
    estimates = estimate(plan_of())
    assert set(estimates.sources) == {EstimateSource.MODEL}
    assert all(job.seconds > 0 and job.kept_bytes > 0 for job in estimates.jobs.values())
    assert estimates.gpu_hours == 0
    assert estimates.cpu_hours > 0
    assert estimates.cost is None
    assert estimates.assumed_accelerator == ""


def test_estimate_skipped_jobs_take_nothing() -> None:
    plan = plan_of()
    skip = {job.name for job in plan.jobs if job.kind is not JobKind.PROBE}
    estimates = estimate(plan, skip=skip)
    assert set(estimates.jobs) == {job.name for job in plan.jobs if job.kind is JobKind.PROBE}
    assert set(estimates.durations_s()) == set(estimates.jobs)


def test_estimate_unknown_gpus_are_assumed_and_said() -> None:
    plan = on_gpus(plan_of())
    assert estimate(plan).assumed_accelerator == "A100"
    assert estimate(plan, accelerator="H100").assumed_accelerator == ""
    named = estimate(on_gpus(plan_of(), accelerator="H100"))
    assert named.assumed_accelerator == ""
    assert {job.accelerator for job in named.jobs.values() if job.gpus} == {"H100"}


def test_estimate_history_of_the_same_model_sets_its_seconds() -> None:
    plan = plan_of()
    job = plan.by_name()[PRETRAIN]
    subject = subject_of(job.identity)
    history = SpeedHistory([measurement(JobKind.PRETRAIN, subject, 3.0, setup_s=0.5)])
    found = estimate(plan, history=history).jobs[PRETRAIN]
    work = Volumes(plan).of(job).work.without_evaluation()
    assert found.source is EstimateSource.HISTORY
    assert found.num_results == 1
    assert found.seconds == pytest.approx(0.5 + 3.0 * steady_s(work, Machine()))


def test_estimate_history_of_another_model_corrects_the_models_seconds() -> None:
    plan, other = plan_of(), '{"image_size": 64, "kwargs": {}, "name": "resnet50"}'
    plain = estimate(plan).jobs[PRETRAIN]
    history = SpeedHistory([measurement(JobKind.FINETUNE, other, ratio) for ratio in (1.0, 2.0, 9.0)])
    found = estimate(plan, history=history).jobs[PRETRAIN]
    work = Volumes(plan).of(plan.by_name()[PRETRAIN]).work
    assert found.source is EstimateSource.CALIBRATED
    assert found.seconds == pytest.approx(start_s(Machine()) + 2.0 * steady_s(work.without_evaluation(), Machine()))
    assert plain.source is EstimateSource.MODEL


def test_estimate_of_far_larger_work_leaves_out_results_of_a_few_seconds() -> None:
    plan = plan_of()
    job = plan.by_name()[PRETRAIN]
    model_s = steady_s(Volumes(plan).of(job).work, Machine())
    toy = replace(measurement(JobKind.PRETRAIN, subject_of(job.identity), 1.0), seconds=9.0, model_s=model_s / 101)
    cases = {
        EstimateSource.MODEL: toy,
        EstimateSource.HISTORY: replace(toy, seconds=11.0),  # long enough to tell of steps
        EstimateSource.CALIBRATED: replace(toy, subject='{"name": "resnet50"}', model_s=model_s / 99),  # near enough
    }
    for source, result in cases.items():
        assert estimate(plan, history=SpeedHistory([result])).jobs[PRETRAIN].source is source
    # A smaller job of the same network in the same plan goes by it.
    small = replace(job, name="pretrain/small", identity=_with_epochs(job, 0.5))
    both = estimate(replace(plan, jobs=(*plan.jobs, small)), history=SpeedHistory([toy])).jobs
    assert (both[PRETRAIN].source, both["pretrain/small"].source) == (EstimateSource.MODEL, EstimateSource.HISTORY)


def _with_epochs(job: Job, factor: float) -> dict[str, object]:
    parameters = job.identity["parameters"]
    recipe = {**parameters["recipe"], "epochs": factor * parameters["recipe"]["epochs"]}
    return {**job.identity, "parameters": {**parameters, "recipe": recipe}}


def test_estimate_history_of_another_accelerator_says_nothing() -> None:
    subject = subject_of(plan_of().by_name()[PRETRAIN].identity)
    history = SpeedHistory([measurement(JobKind.PRETRAIN, subject, 3.0, "H100")])
    assert estimate(plan_of(), history=history).jobs[PRETRAIN].source is EstimateSource.MODEL
    on_h100 = estimate(on_gpus(plan_of()), history=history).jobs[PRETRAIN]
    assert (on_h100.source, on_h100.accelerator) == (EstimateSource.HISTORY, "H100")  # what the GPUs here usually are


def test_estimate_networks_that_kwargs_change_correct_no_others() -> None:
    unknown = measurement(JobKind.PRETRAIN, '{"name": "x"}', 50.0)
    history = SpeedHistory([replace(unknown, is_known=False)])
    assert estimate(plan_of(), history=history).jobs[PRETRAIN].source is EstimateSource.MODEL
    assert history.model_error() is None


def test_model_error_tells_the_factor_that_nine_of_ten_stay_within() -> None:
    ratios = [1.0] * 5 + [2.0, 0.5, 2.0, 0.5, 8.0]
    error = SpeedHistory([measurement(JobKind.PRETRAIN, "", ratio) for ratio in ratios]).model_error()
    assert error is not None
    assert (error.num_results, error.median_ratio, error.within) == (10, 1.0, 2.0)


def test_measure_a_record_gives_its_own_speed_back() -> None:
    plan = plan_of()
    job = plan.by_name()[PRETRAIN]
    work = Volumes(plan).of(job).work.without_evaluation()
    seconds = 7 * steady_s(work, Machine(num_cores=2))
    summary = {
        "measured": {"images_per_s": work.images / seconds, "setup_s": 1.5},
        "fingerprint": {"device": "x86_64 something", "num_threads": 2, "world_size": 1},
    }
    found = measure(job.identity, {"num_steps": 16.0, "num_classes": 8.0}, summary)
    assert found is not None
    assert found.ratio == pytest.approx(7)
    assert found.setup_s == 1.5
    assert found.machine == Machine(num_cores=2)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA RTX A6000", "NVIDIA RTX A6000"),  # of unknown speed, but no CPU
        ("x86_64 AMD EPYC", ""),
        ("aarch64 Neoverse-V2", ""),
        ("", ""),
    ],
)
def test_measure_a_record_names_the_gpu_also_if_its_peak_is_unknown(device: str, name: str) -> None:
    summary = {"measured": {"images_per_s": 100.0}, "fingerprint": {"device": device}}
    found = measure(plan_of().by_name()[PRETRAIN].identity, {"num_steps": 16.0, "num_classes": 8.0}, summary)
    assert found is not None
    assert (found.machine.accelerator, found.machine.is_gpu) == (name, bool(name))


@pytest.mark.parametrize(
    "summary",
    [
        {},
        {"measured": {}},
        {"measured": {"images_per_s": 0.0}},
        {"measured": "fast"},
        {"measured": {"images_per_s": -1}},
    ],
)
def test_measure_a_record_without_a_speed_is_left_out(summary: dict[str, object]) -> None:
    job = plan_of().by_name()[PRETRAIN]
    assert measure(job.identity, {"num_steps": 16.0}, summary) is None


def test_network_of_shipped_variants_is_known_and_of_others_a_guess() -> None:
    quickstart = {"patch_size": 8, "embed_dim": 64, "depths": [1], "feature_dim": 256}
    assert network_of({"name": "fasternet_t0", "image_size": 32, "kwargs": quickstart}).fit is Fit.KNOWN
    assert network_of({"name": "fasternet_t0", "image_size": 32, "kwargs": {"depths": [7]}}).fit is Fit.CHANGED
    assert network_of({"name": "no_such_model", "image_size": 32, "kwargs": {}}).fit is Fit.UNKNOWN
    assert network_of({"name": "resnet18", "image_size": 112, "kwargs": {}}).macs == pytest.approx(RESNET18_MACS / 4)


def test_estimate_more_workers_are_faster_but_not_cheaper() -> None:
    one, eight = estimate(on_gpus(plan_of(), 1)), estimate(on_gpus(plan_of(), 8))
    assert eight.gpu_hours > one.gpu_hours


def test_estimate_trials_that_run_at_the_same_time_make_their_steps_side_by_side() -> None:
    search = "search: {random: {}, space: {lr: [0.1, 0.2, 0.3, 0.4]}, trials: 4, concurrent: 1}"
    text = TEXT.replace(
        "protocol: finetune, recipe: {epochs: 2, batch_size: 64, lr: 1e-3}",
        f"protocol: finetune, recipe: {{epochs: 2, batch_size: 64}}, {search}",
    )
    one, four = (plan_of(text.replace("concurrent: 1", f"concurrent: {number}")) for number in (1, 4))
    (name, *_) = (job.name for job in one.jobs if job.kind is JobKind.SEARCH)
    alone, together = (Volumes(plan).of(plan.by_name()[name]) for plan in (one, four))
    assert (alone.work.num_steps, together.work.num_steps) == (4 * 16, 16)
    assert alone.work.operations == together.work.operations
    assert together.gradient_bytes == 0, "trials do not train together"


def test_prices_give_the_cost_of_gpu_hours_and_core_hours() -> None:
    prices = PriceTable.parse("{currency: USD, A100: {hour: 2.0, spot: 0.5}, cpu: 0.1}", "prices.yaml")
    estimates = estimate(on_gpus(plan_of(), accelerator="A100"), prices=prices)
    assert estimates.cost == pytest.approx(2.0 * estimates.gpu_hours + 0.1 * estimates.cpu_hours)
    assert prices.show(1234.5) == "1,234.50 USD"
    hour = Resources(gpus=2, spot=Spot.REQUIRE)
    assert prices.cost(3600, hour, "A100", is_spot=True) == pytest.approx(1.0)
    assert prices.cost(3600, hour, "T4", is_spot=False) is None


def test_prices_are_those_of_the_gpus_that_the_sweep_names_also_if_their_peak_is_unknown() -> None:
    plan = on_gpus(plan_of(), accelerator="P100")
    estimates = estimate(plan, prices=PriceTable.parse("{A100: 2.0, P100: 0.5, cpu: 0}", "prices.yaml"))
    assert estimates.gpu_hours > 0
    assert estimates.cost == pytest.approx(0.5 * estimates.gpu_hours)
    without = estimate(plan, prices=PriceTable.parse("{A100: 2.0, cpu: 0}", "prices.yaml"))
    assert (without.cost, without.unpriced()) == (None, ["P100"])


def test_prices_of_a_missing_accelerator_leave_the_cost_unknown_and_name_it() -> None:
    estimates = estimate(on_gpus(plan_of()), prices=PriceTable.parse("{H100: 3}", "p.yaml"))
    assert estimates.cost is None
    assert estimates.unpriced() == ["A100", "cpu"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no table"),
        ("- 1", "no table"),
        ("{A100: {hourly: 2}}", "hourly"),
        ("{A100: {spot: 2}}", "lacks 'hour'"),
        ("{A100: -1}", "A100.hour is -1"),
        ("{A100: {hour: .inf}}", "inf"),
        ("{A100: {hour: true}}", "True"),
        ("{A100: [", "not YAML"),
    ],
)
def test_prices_wrong_table_is_refused_with_its_place(text: str, what: str) -> None:
    with pytest.raises(UserError, match=r"prices\.yaml") as refused:
        PriceTable.parse(text, "prices.yaml")
    assert what in str(refused.value)


CACHED = TEXT.replace(
    "  - {name: linear, target: levels/depth1, protocol: probe, recipe: {epochs: 2, batch_size: 64, lr: 1e-3}}\n",
    "  - {name: fast, target: levels/depth1, protocol: probe, recipe: {features: cached}}\n"
    "  - {name: near, target: levels/depth1, protocol: knn}\n",
)


def test_estimate_probes_on_cached_features_decode_no_image_and_trust_no_history_of_others() -> None:
    plan = plan_of(CACHED)
    volumes = Volumes(plan)
    jobs = [job for job in plan.jobs if job.kind in {JobKind.PROBE, JobKind.KNN}]
    assert {job.kind for job in jobs} == {JobKind.PROBE, JobKind.KNN}
    assert {volumes.of(job).work.images for job in jobs} == {0}
    online = measurement(JobKind.PROBE, subject_of(jobs[0].identity), 1000.0)
    found = estimate(plan, history=SpeedHistory([online]))
    assert {found.jobs[job.name].source for job in jobs} == {EstimateSource.MODEL}
    assert {source for name, job in found.jobs.items() if name.startswith("embed") for source in [job.source]} == {
        EstimateSource.MODEL
    }


def test_outlook_counts_a_result_of_two_names_once(tmp_path: Path) -> None:
    again = (
        "  - {name: again, target: levels/depth1, protocol: finetune, recipe: {epochs: 2, batch_size: 64, lr: 1e-3}}\n"
    )
    hours, repeated = [], []
    for text in (TEXT, TEXT.replace("report:", f"{again}report:")):
        sweep = parse_sweep(text, "sweep.yaml", shipped_recipes())
        plan = build_plan(sweep, store_uri=tmp_path.as_uri())
        hours.append(make_preview(sweep, plan, fleet=None).estimates.cpu_hours)
        repeated.append(set(repeated_jobs(plan)))
    assert repeated == [set(), {job for job in plan.by_name() if job.startswith("finetune/again/")}]
    assert len(repeated[1]) == 4
    assert hours[1] == pytest.approx(hours[0])


def test_outlook_says_that_nothing_was_measured_only_where_no_result_corrects_it(tmp_path: Path) -> None:
    sweep = parse_sweep(TEXT, "sweep.yaml", shipped_recipes())
    outlook = make_preview(sweep, build_plan(sweep, store_uri=tmp_path.as_uri()), fleet=None)
    name, job = next(iter(outlook.estimates.jobs.items()))
    jobs = {**outlook.estimates.jobs, name: replace(job, source=EstimateSource.CALIBRATED)}
    corrected = replace(outlook, estimates=replace(outlook.estimates, jobs=jobs))
    told = [any("nothing was measured here yet" in line for line in preview_lines(one)) for one in (outlook, corrected)]
    assert told == [True, False]


def test_outlook_lets_the_followers_of_a_repeated_job_wait_for_the_one_that_runs(tmp_path: Path) -> None:
    fleet, times = Fleet(nodes=(Resources(cpus=64.0),)), []
    for names in (("a",), ("a", "b")):
        sweep = parse_sweep(named_blocks(*names), "sweep.yaml", shipped_recipes())
        found = make_preview(sweep, build_plan(sweep, store_uri=tmp_path.as_uri()), fleet=fleet)
        assert found.makespan is not None
        times.append((found.makespan.seconds, found.makespan.bound_s, found.path.seconds, len(found.path.jobs)))
    assert times[1] == pytest.approx(times[0])


def test_estimate_of_a_search_for_backbones_counts_the_images_by_which_they_are_judged() -> None:
    """512 training and 256 validation images of the target at each judgement; one trial of four passes the rung."""
    search = "search: {over: pretrain, ALGORITHM, space: {lr: [0.1, 0.2, 0.3, 0.4]}, trials: 4}"
    finetuned = "protocol: finetune, recipe: {epochs: 2, batch_size: 64, lr: 1e-3}"

    def eval_images(more: str) -> float:
        plan = plan_of(TEXT.replace(finetuned, f"{finetuned}, {more}"))
        return Volumes(plan).of(next(job for job in plan.jobs if job.kind is JobKind.SEARCH)).work.eval_images

    validated = 4 * 2 * 256  # each trial after each of its epochs, as any training
    assert eval_images(search.replace("ALGORITHM", "random: {}")) == validated + 4 * (512 + 256)
    thin = f"{search.replace('ALGORITHM', 'random: {}')}, subset: {{fraction: 0.5}}"
    assert eval_images(thin) == validated + 4 * (256 + 256)
    halved = eval_images(search.replace("ALGORITHM", "asha: {reduction: 4}"))
    assert halved == pytest.approx((4 + 1) / 2 * 2 * 256 + (4 + 1) * (512 + 256))
