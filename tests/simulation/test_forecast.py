"""Forecasts: the product on virtual time as its users see it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.backends.simulated import LLAMA3_GPU_MTBF_H, ClusterSpec, Hazards
from orchestrator.cli.app import app
from orchestrator.core.errors import UserError
from orchestrator.planning.graph.plan import Plan
from orchestrator.simulation import Assumptions, Forecast, forecast
from orchestrator.simulation.forecast import Traffic, Workload
from orchestrator.simulation.gantt import make_chart, render_html
from orchestrator.state.transitions import SweepState
from tests.builders import make_job, make_plan, request_of
from tests.simulation.sweeps import training_sweep

SPOT = Hazards(gpu_mtbf_h=LLAMA3_GPU_MTBF_H, spot_loss_per_h=0.05)


def run(seed: int = 0, hazards: Hazards | None = None, **options) -> Forecast:
    plan, durations_s = training_sweep(num_pretrains=6, num_transfers=4)
    return forecast(plan, ClusterSpec.uniform(64, spot=True), durations_s, hazards=hazards, seed=seed, **options)


@pytest.fixture(scope="module")
def rough() -> Forecast:
    return run(hazards=SPOT, assumptions=Assumptions(mtbf_s=4 * 3600.0))


def test_forecast_without_hazards_wastes_nothing_but_starts_and_checkpoints() -> None:
    found = run()
    assert found.state is SweepState.SUCCEEDED
    assert found.num_attempts == found.num_jobs
    assert found.hours["lost"] == found.hours["idle"] == 0.0
    assert found.goodput > 0.98
    assert found.lower_bound_s <= found.makespan_s < 1.3 * found.lower_bound_s


def test_forecast_with_losses_ends_all_the_same_and_names_what_was_lost(rough: Forecast) -> None:
    assert rough.state is SweepState.SUCCEEDED
    assert rough.num_ends["spot"] == rough.num_attempts - rough.num_jobs > 0
    assert set(rough.lost_hours) == {"spot"}
    assert rough.lost_hours["spot"] == pytest.approx(rough.hours["lost"] + rough.hours["idle"])
    assert 0.9 < rough.goodput < 1.0
    assert rough.makespan_s > rough.lower_bound_s


def test_forecast_of_the_same_seed_is_the_same(rough: Forecast) -> None:
    assert run(hazards=SPOT, assumptions=Assumptions(mtbf_s=4 * 3600.0)) == rough
    assert run(seed=1, hazards=SPOT).makespan_s != rough.makespan_s


def test_forecast_work_that_was_kept_is_all_the_work_of_the_jobs(rough: Forecast) -> None:
    plan, durations_s = training_sweep(num_pretrains=6, num_transfers=4)
    started_s = {job.name: min(15.0, durations_s[job.name]) for job in plan.jobs}
    work_h = sum(job.resources.gpus * (durations_s[job.name] - started_s[job.name]) for job in plan.jobs) / 3600.0
    assert rough.hours["work"] == pytest.approx(work_h)


def test_forecast_of_short_jobs_on_warm_runners_stays_above_its_bound() -> None:
    plan, _ = training_sweep(num_pretrains=1, num_transfers=400)
    # On few GPUs nearly every start is a warm one: a bound of cold starts would lie far above.
    found = forecast(plan, ClusterSpec.uniform(16), {job.name: 16.0 for job in plan.jobs})
    assert found.state is SweepState.SUCCEEDED
    assert 0.5 * found.makespan_s < found.lower_bound_s <= found.makespan_s


@pytest.mark.parametrize("min_gpus", [1.0, 2.0])
def test_forecast_of_elastic_jobs_on_few_gpus_takes_as_much_longer(min_gpus: float) -> None:
    jobs = [make_job(f"pretrain/a{i}", cpus=8.0, gpus=8.0, min_gpus=min_gpus, workers=8) for i in range(2)]
    cluster = ClusterSpec.uniform(2, gpus_per_node=2)
    found = forecast(make_plan(*jobs), cluster, {job.name: 1800.0 for job in jobs})
    assert found.state is SweepState.SUCCEEDED
    assert found.lower_bound_s <= found.makespan_s < 1.05 * found.lower_bound_s
    assert found.lower_bound_s > 0.99 * 2 * 1800.0 * 8 / 2


def test_forecast_leaves_out_what_is_committed() -> None:
    plan, _ = training_sweep(num_pretrains=6, num_transfers=4)
    done = [job.key for job in plan.jobs if job.kind.value != "probe"]
    found = run(committed=done)
    assert found.num_reused == len(done)
    assert found.num_attempts == found.num_jobs - len(done)


def test_forecast_of_what_no_node_can_hold_fails_and_says_why() -> None:
    plan, durations_s = training_sweep(num_pretrains=1, num_transfers=1)
    found = forecast(plan, ClusterSpec.uniform(4, gpus_per_node=2), durations_s)
    assert found.state is SweepState.FAILED
    assert "infeasible" in " ".join(found.reasons.values())


@pytest.mark.parametrize("hazards", [None, Hazards(spot_loss_per_h=0.5)])
def test_forecast_of_a_job_that_a_limit_never_lets_start_ends_and_says_why(hazards: Hazards | None) -> None:
    job = make_job("pretrain/a", gpus=2.0)
    plan = make_plan(job, max_gpus=1.0)
    with pytest.raises(UserError, match=r"would never end here.*pretrain/a.*2 more would exceed max_gpus=1"):
        forecast(plan, ClusterSpec.uniform(8, spot=True), {job.name: 36_000.0}, hazards=hazards)


def test_forecast_reads_a_data_set_once_per_node_and_again_after_a_loss() -> None:
    plan, durations_s = training_sweep(num_pretrains=1, num_transfers=4)
    trained = [job.name for job in plan.jobs if not job.name.startswith("index")]
    traffic = {name: Traffic(reads="photos", read_bytes=2_000_000_000_000) for name in trained}
    cluster = ClusterSpec.uniform(8, spot=True)
    plain, cold = (forecast(plan, cluster, durations_s, traffic=given) for given in (None, traffic))
    epoch_s = (durations_s["pretrain/space0"] - 15.0) / 90
    assert plain.hours["cold read"] == 0.0
    assert cold.hours["cold read"] == pytest.approx(8 * (2000.0 - epoch_s) / 3600.0)  # by the gang, and by no other job
    assert cold.makespan_s == pytest.approx(plain.makespan_s + 2000.0 - epoch_s, abs=5.0)
    again = forecast(plan, cluster, durations_s, traffic=traffic, hazards=Hazards(spot_loss_per_h=0.5))
    assert again.num_ends["spot"] > 0
    assert again.hours["cold read"] > cold.hours["cold read"]
    fast = Assumptions(read_bytes_per_s=1e15)
    assert forecast(plan, cluster, durations_s, traffic=traffic, assumptions=fast).hours["cold read"] == 0.0


def test_forecast_gang_over_several_nodes_is_slower_by_what_the_backward_pass_does_not_hide() -> None:
    plan, durations_s = training_sweep(num_pretrains=1, num_transfers=0)
    job = max(plan.jobs, key=lambda job: durations_s[job.name])
    work_s = durations_s[job.name] - 15.0
    num_steps = int(work_s)  # steps of a second
    assumed = Assumptions(network_bytes_per_s=1e9)

    def makespan_s(gradient_bytes: float, gpus_per_node: int) -> float:
        traffic = {job.name: Traffic(gradient_bytes=int(gradient_bytes), num_steps=num_steps)}
        cluster = ClusterSpec.uniform(8, gpus_per_node=gpus_per_node)
        return forecast(plan, cluster, durations_s, traffic=traffic, assumptions=assumed).makespan_s

    alone = makespan_s(0.0, 8)
    assert makespan_s(1e9, 8) == alone
    assert makespan_s(0.3e9, 4) == pytest.approx(alone, rel=1e-3)  # 0.6 s beside 2/3 of a step
    assert makespan_s(1e9, 4) == pytest.approx(alone + work_s * (1 / 3 + 2.0 - 1.0), rel=0.02)


def test_forecast_search_and_simulation_that_are_interrupted_lose_a_trial_and_a_seed() -> None:
    recipe, model = {"epochs": 90, "batch_size": 64}, {"name": "resnet18", "image_size": 64}
    trial = {"kind": "finetune", "parameters": {"model": model, "recipe": recipe}}
    settings = {"trials": 24, "algorithm": {"random": {}}, "space": {}, "trial": trial}
    search = make_job("search/tuned", parameters=settings, workers=32, gpus=32.0, cpus=128.0)
    block = make_job("theory/walk", parameters={"seeds": {"first": 100, "stop": 200}})
    plan, six_h = make_plan(search, block), 6 * 3600.0
    workload = Workload(plan, {search.name: six_h, block.name: six_h}, Assumptions())
    every_s = [workload.work_of(request_of(job, "file:///store")).checkpoint_every_s for job in plan.jobs]
    assert every_s == [six_h / 24, six_h / 100]
    found = forecast(
        make_plan(search),
        ClusterSpec.uniform(32, spot=True),
        {search.name: six_h},
        hazards=Hazards(spot_loss_per_h=0.1),
    )
    assert found.state is SweepState.SUCCEEDED
    assert found.num_ends["spot"] > 0
    assert 0.0 < found.hours["lost"] <= found.num_ends["spot"] * 32 * 6 / 24


@pytest.mark.parametrize("mtbf_s", [0.0, 3600.0])
def test_forecast_job_that_names_its_steps_between_checkpoints_loses_at_most_these(mtbf_s: float) -> None:
    job = make_job("pretrain/a", parameters={"recipe": {"epochs": 90, "batch_size": 64}})
    job = replace(job, execution=replace(job.execution, checkpoint_every_steps=50))
    traffic = {job.name: Traffic(num_steps=900)}
    workload = Workload(make_plan(job), {job.name: 9000.0}, Assumptions(mtbf_s=mtbf_s), traffic)
    assert workload.work_of(request_of(job, "file:///store")).checkpoint_every_s == pytest.approx(500.0)


def test_forecast_tells_how_long_jobs_waited_for_room() -> None:
    plan, durations_s = training_sweep(num_pretrains=6, num_transfers=4)
    crowded, roomy = (forecast(plan, ClusterSpec.uniform(num_gpus), durations_s).waits_s for num_gpus in (32, 1024))
    assert max(roomy.values()) < 60.0
    assert max(crowded.values()) > min(durations_s[job.name] for job in plan.jobs if job.kind == "pretrain")


def test_gantt_shows_every_second_of_every_gpu(rough: Forecast) -> None:
    chart = make_chart(rough.spans, rough.started_at_s)
    drawn = sum(bar.num_rows * (bar.end_s - bar.start_s) for bar in chart.bars if bar.kind != "index")
    assert drawn == pytest.approx(3600.0 * sum(rough.hours.values()))
    taken: dict[int, float] = {}
    for bar in sorted(chart.bars, key=lambda bar: bar.start_s):
        for row in range(bar.row, bar.row + bar.num_rows):
            assert taken.get(row, 0.0) <= bar.start_s + 1e-6, "two attempts on one GPU at once"
            taken[row] = bar.end_s
    assert max(taken) < chart.num_rows
    assert any(bar.is_interrupted for bar in chart.bars)


def test_gantt_is_a_page_that_loads_nothing(rough: Forecast) -> None:
    chart = make_chart(rough.spans, rough.started_at_s)
    page = render_html(chart, "<sweep>", ["a & b"]).decode()
    assert "&lt;sweep&gt;" in page
    assert "a &amp; b" in page
    assert "@document@" not in page
    assert "http" not in page
    document = json.loads(page.split("const chart = ")[1].split(";\nconst canvas")[0])
    assert len(document["bars"]) == len(chart.bars)


def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["forecast", *arguments])
    return result.exit_code, result.stdout, str(result.exception or result.stderr)


def test_forecast_command_prints_json_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--gpus", "0", "--cpus", "8", "--seed", "7", "-o", "json", "--html", "a.html")
    code, stdout, _ = invoke(tmp_path, monkeypatch, "quickstart", *flags)
    assert code == 0
    found = json.loads(stdout)
    assert (found["state"], found["num_jobs"], found["resource"]) == ("succeeded", 82, "CPU")
    assert (tmp_path / "a.html").stat().st_size > 1000
    assert not (tmp_path / ".orchestrator").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--spot", "1.5"], "--spot 1.5"),
        (["--gpus", "-3"], "from 1 up"),
        (["--gpu-mtbf", "-1"], "--gpu-mtbf"),
        (["--png", "a.png"], "--html"),
    ],
)
def test_forecast_command_refuses_impossible_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], told: str
) -> None:
    code, _, error = invoke(tmp_path, monkeypatch, "quickstart", *flags)
    assert code != 0
    assert told in error


SMALL = """version: 1
name: small
datasets: {tree: {builtin: synthetic-hierarchy, branching: [2, 2], num_train: 512, num_val: 64}}
labels: {levels: {dataset: tree, hierarchy: [depth1]}}
pretrain: {model: {name: test_vit, image_size: 32}, labels: ["levels/*"], recipe: {epochs: 1, batch_size: 64, lr: 0.1}}
"""


def write_small(path: Path, asked: str, more: str = "") -> str:
    """A sweep of one backbone, named by the file, whose pretraining asks for these resources."""
    path.write_text(f"{SMALL.replace('small', path.stem)}resources: {{pretrain: {{{asked}}}}}\n{more}")
    return path.name


def test_forecast_command_asks_stated_nodes_for_nothing_that_nobody_knows_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "gpus: 1, cpus: 2, memory_gib: 64, accelerator: H100, labels: {zone: a}"
    name = write_small(tmp_path / "asks.yaml", asked)
    assert invoke(tmp_path, monkeypatch, name, "--gpus", "2")[0] == 0
    never = write_small(tmp_path / "never.yaml", f"{asked}, spot: never")
    code, found, _ = invoke(tmp_path, monkeypatch, never, "--gpus", "2", "--spot", "0.01", "-o", "json")
    assert (code, "not on spot nodes" in str(json.loads(found)["reasons"])) == (100, True)
    huge = write_small(tmp_path / "huge.yaml", "memory_gib: 100000")
    code, found, _ = invoke(tmp_path, monkeypatch, huge, "-o", "json")  # of this machine the memory is known
    assert (code, "100000 GiB" in str(json.loads(found)["reasons"])) == (100, True)


@pytest.mark.parametrize(
    ("asked", "flags", "price"),
    [
        ("gpus: 1, accelerator: H100", ["--accelerator", "A100"], 7.0),
        ("gpus: 1", ["--accelerator", "h100"], 7.0),
        ("gpus: 1", ["--accelerator", "A100"], 2.0),
        ("cpus: 1", ["--accelerator", "H100"], 7.0),
    ],
)
def test_forecast_command_prices_the_gpus_that_its_jobs_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, flags: list[str], price: float
) -> None:
    (tmp_path / "prices.yaml").write_text("{A100: 2, h100: 7}")
    name = write_small(tmp_path / "priced.yaml", asked)
    arguments = (name, "--gpus", "1", "--prices", "prices.yaml", "-o", "json", *flags)
    found = json.loads(invoke(tmp_path, monkeypatch, *arguments)[1])
    assert found["cost_available"] == pytest.approx(price * found["available_hours"])


def test_forecast_command_prices_the_gpus_with_most_of_the_work_and_names_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prices.yaml").write_text("{A100: 2, H100: 7}")
    long = write_small(tmp_path / "long.yaml", "gpus: 1, accelerator: H100")
    (tmp_path / "long.yaml").write_text((tmp_path / "long.yaml").read_text().replace("epochs: 1", "epochs: 5000"))
    many = [write_small(tmp_path / f"many{n}.yaml", "gpus: 1, accelerator: A100") for n in range(3)]
    priced = ("--gpus", "1", "--prices", "prices.yaml")
    found = json.loads(invoke(tmp_path, monkeypatch, *many, long, *priced, "-o", "json")[1])
    assert found["cost_available"] == pytest.approx(7.0 * found["available_hours"])
    assert "as if all GPUs were H100" in invoke(tmp_path, monkeypatch, *many, long, *priced)[1]
    assert "as if all" not in invoke(tmp_path, monkeypatch, long, *priced)[1]


def test_forecast_command_tells_what_gpus_are_assumed_for_any_of_its_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [write_small(tmp_path / "without.yaml", "cpus: 1"), write_small(tmp_path / "with.yaml", "gpus: 1")]
    _, shown, _ = invoke(tmp_path, monkeypatch, *names, "--gpus", "1")
    assert "durations assume A100 GPUs" in shown
    _, shown, _ = invoke(tmp_path, monkeypatch, names[0], "--gpus", "1")
    assert "no job has a GPU: those of the cluster stand idle" in shown
    assert "held for" not in shown


def test_training_sweep_is_a_plan_that_can_be_sent() -> None:
    plan, durations_s = training_sweep(num_pretrains=2, num_transfers=3)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert set(durations_s) == set(plan.by_name())


def test_forecast_command_says_which_of_its_bounds_ends_before_all_jobs_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bounded.yaml"
    write_small(path, "gpus: 1", "policy: {budget: {gpu_hours: HOURS}}\n")
    text = path.read_text().replace("lr: 0.1}", "lr: 0.1}, seeds: [0, 1, 2, 3]")
    path.write_text(text.replace("HOURS", "1000"))
    found = json.loads(invoke(tmp_path, monkeypatch, path.name, "--gpus", "1", "-o", "json")[1])
    assert found["duration_error"]["states"] == ["succeeded", "succeeded"]
    path.write_text(text.replace("HOURS", f"{1.5 * sum(found['hours'].values()):.5f}"))
    _, shown, _ = invoke(tmp_path, monkeypatch, path.name, "--gpus", "1")
    (line,) = [line for line in shown.splitlines() if line.startswith("with all durations")]
    assert line.count("it ends as") == 1
    assert " (it ends as failed: the budget is " in line.partition(" to ")[2]
