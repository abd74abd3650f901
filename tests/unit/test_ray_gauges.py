from orchestrator.backends.ray.gauges import AttemptGauges
from orchestrator.contract import Progress
from orchestrator.storage.local import LocalStore
from tests.integration.ray_jobs import job, request


class Shown(dict[str, float]):
    """Gauges by name, each with its last value."""

    def make(self, name: str, description: str):
        shown = self

        class Gauge:
            def set(self, value: float, tags: dict[str, str] | None = None) -> None:
                assert tags == {"sweep": "scripted", "job": "one", "kind": "labels"}
                shown[name] = value

        return Gauge()


def test_gauges_show_the_loaders_fields_until_the_attempt_ends(tmp_path) -> None:
    shown = Shown()
    gauges = AttemptGauges(request(LocalStore(tmp_path), job("one")), shown.make)
    gauges.show(Progress(phase="train", metrics={"images_per_s": 100.0, "val_error": 0.5}))
    gauges.show(Progress(phase="train", metrics={"images_per_s": 120.0, "cache_hit_rate": 1.0}))
    assert shown == {"orchestrator_images_per_s": 120.0, "orchestrator_cache_hit_rate": 1.0}
    gauges.end()
    assert set(shown.values()) == {0.0}
