"""Two networks, or two label spaces, on the same validation images: what differs image by image; pure.

A pair of networks has McNemar's exact test: of the images that only one of the two predicts correctly, is the number
equal for both? (McNemar, Psychometrika 12 (1947); the binomial test of the discordant images.) It is about these two
networks, on images like these. Only several seeds say something about two ways of pretraining: the interval over
seeds and images does.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from orchestrator.planning.estimate.power import CONFIDENCE
from orchestrator.report.render.columns import Records, TextTable
from orchestrator.report.render.files import fields_of, json_ready
from orchestrator.report.render.numbers import interval, number, p_text
from orchestrator.report.statistics.corrections import holm
from orchestrator.report.statistics.summaries import SeedPair
from orchestrator.storage.sample_outcomes import SampleOutcomes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NUM_RESAMPLES = 10_000
_SEED = 0
LEAST_SEEDS = 3
"""Of pretraining, for an interval over seeds: with two it would cover 89 % instead of 95 %."""
_ERROR = "val_error"
_SIGNIFICANT = 0.05
_MOST_GROUPS = 10
"""Of a kind, in a table or a panel; the CSV has all."""
_FIXED_COLOR, _BROKEN_COLOR = "#0072b2", "#d55e00"  # which colour-blind readers can tell apart
_GROUP_COLUMNS = ("images", "fixed", "broken", "difference [points]", "p", "p (Holm)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkPair:
    """Two networks with the same seeds, and what they made of the same images."""

    seeds: SeedPair
    first: str
    """Name of the job."""
    second: str
    first_outcomes: SampleOutcomes
    second_outcomes: SampleOutcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTest:
    """The second network of a pair against the first; errors are fractions of the samples that both counted."""

    seeds: SeedPair
    first: str
    second: str
    num_samples: int
    num_fixed: int
    """The first is wrong, the second right."""
    num_broken: int
    difference: float
    """Error of the second minus that of the first."""
    p_value: float
    """McNemar's exact test, two-sided."""
    p_holm: float
    """Corrected for all pairs of networks of the comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An interval for the mean difference."""

    low: float
    high: float
    confidence: float = CONFIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageGroup:
    """The images of one class, node of a level or subset; counts are sums over the pairs of networks."""

    kind: str
    name: str
    num_samples: int
    num_fixed: int
    num_broken: int
    num_better: int
    """Images that more pairs fixed than broke."""
    num_worse: int
    difference: float
    """Mean error of the second minus that of the first, on this group."""
    p_value: float
    """Sign test over images: as many better as worse? With one pair of networks this is McNemar's."""
    p_holm: float
    """Corrected for all groups of this kind."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleComparison:
    """The second minus the first, over one or more pairs of networks."""

    first: str
    second: str
    place: str
    """The transfer, in words."""
    tests: tuple[NetworkTest, ...]
    num_samples: int
    """Images that every network counted."""
    num_left_out: int
    """Images of the split without an outcome in some network."""
    num_pretrain_seeds: int
    mean: float
    over_images: Interval
    """Of these networks, on other images like these."""
    over_both: Interval | None
    """Of networks of other seeds on other images; None below ``LEAST_SEEDS`` pretrain seeds."""
    fixed_N: NDArray[np.int64]
    """In how many pairs each image of the split was fixed."""
    broken_N: NDArray[np.int64]
    counted_N: NDArray[np.bool_]
    groups: tuple[ImageGroup, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form, without the images."""
        return json_ready({name: value for name, value in fields_of(self).items() if not name.endswith("_N")})  # type: ignore[no-any-return]


def compare_samples(
    pairs: Sequence[NetworkPair], *, first: str, second: str, place: str = "", seed: int = _SEED
) -> SampleComparison:
    """Compare pairs of networks image by image. Raises ``UserError``: they were not measured on the same images."""
    _check_same_order(pairs)
    outcomes = [outcome for pair in pairs for outcome in (pair.first_outcomes, pair.second_outcomes)]
    counted_N = np.logical_and.reduce([outcome.counted_N for outcome in outcomes])
    if not counted_N.any():
        raise UserError(f"{first} and {second} have no validation image in common that both could be judged on")
    fixed = np.array([pair.second_outcomes.right_N & ~pair.first_outcomes.right_N & counted_N for pair in pairs])
    broken = np.array([pair.first_outcomes.right_N & ~pair.second_outcomes.right_N & counted_N for pair in pairs])
    changes_PN = broken[:, counted_N].astype(np.int64) - fixed[:, counted_N]
    random, num_samples = np.random.default_rng(seed), int(counted_N.sum())
    counts = zip(pairs, fixed.sum(1).tolist(), broken.sum(1).tolist(), strict=True)
    tests = [_test(pair, num_samples, num_fixed, num_broken) for pair, num_fixed, num_broken in counts]
    num_pretrain_seeds = len({pair.seeds.pretrain for pair in pairs})
    return SampleComparison(
        first=first,
        second=second,
        place=place,
        tests=_corrected(tests),
        num_samples=num_samples,
        num_left_out=len(counted_N) - num_samples,
        num_pretrain_seeds=num_pretrain_seeds,
        mean=float(_seed_weights(pairs) @ changes_PN.mean(axis=1)),
        over_images=_over_images(_seed_weights(pairs) @ changes_PN, random),
        over_both=_over_both(changes_PN, pairs) if num_pretrain_seeds >= LEAST_SEEDS else None,
        fixed_N=fixed.sum(0),
        broken_N=broken.sum(0),
        counted_N=counted_N,
    )


def groups_of(counted: Sequence[Mapping[str, Any]], num_pairs: int) -> tuple[ImageGroup, ...]:
    """Tested groups out of their counts, each kind of group one family of tests."""
    found = [
        ImageGroup(
            **line,
            difference=(line["num_broken"] - line["num_fixed"]) / (line["num_samples"] * num_pairs),
            p_value=sign_test(line["num_better"], line["num_worse"]),
            p_holm=1.0,
        )
        for line in counted
    ]
    by_kind: dict[str, list[int]] = {}
    for position, group in enumerate(found):
        by_kind.setdefault(group.kind, []).append(position)
    for positions in by_kind.values():
        for position, p_holm in zip(positions, holm([found[at].p_value for at in positions]), strict=True):
            found[position] = replace(found[position], p_holm=p_holm)
    return tuple(found)


def sign_test(num_better: int, num_worse: int) -> float:
    """Two-sided exact p-value that both have the same chance; 1 where nothing changed."""
    from scipy import stats  # 0.7 s to import: only who compares images pays for it

    num_changed = num_better + num_worse
    return float(stats.binomtest(num_better, num_changed, 0.5).pvalue) if num_changed else 1.0


def _check_same_order(pairs: Sequence[NetworkPair]) -> None:
    outcomes = [
        named for pair in pairs for named in ((pair.first, pair.first_outcomes), (pair.second, pair.second_outcomes))
    ]
    job, wanted = outcomes[0]
    for other, found in outcomes[1:]:
        if found.order_sha256 != wanted.order_sha256 or len(found.right_N) != len(wanted.right_N):
            raise UserError(
                f"{job} and {other} were not validated on the same images in the same order (digests of the order "
                f"{wanted.order_sha256[:12]} and {found.order_sha256[:12]}): compare jobs on one data set"
            )


def _test(pair: NetworkPair, num_samples: int, num_fixed: int, num_broken: int) -> NetworkTest:
    return NetworkTest(
        seeds=pair.seeds,
        first=pair.first,
        second=pair.second,
        num_samples=num_samples,
        num_fixed=num_fixed,
        num_broken=num_broken,
        difference=(num_broken - num_fixed) / num_samples,
        p_value=sign_test(num_fixed, num_broken),
        p_holm=1.0,
    )


def _corrected(tests: Sequence[NetworkTest]) -> tuple[NetworkTest, ...]:
    p_values = holm([test.p_value for test in tests])
    return tuple(replace(test, p_holm=p_holm) for test, p_holm in zip(tests, p_values, strict=True))


def _seed_weights(pairs: Sequence[NetworkPair]) -> NDArray[np.float64]:
    """Of each pair [P], so that every pretrain seed counts once, however many transfers it has; they add up to 1."""
    seeds = np.array([pair.seeds.pretrain for pair in pairs])
    _, numbers, counts = np.unique(seeds, return_inverse=True, return_counts=True)
    weights: NDArray[np.float64] = 1.0 / (len(counts) * counts[numbers])
    return weights


def _over_images(changes_N: NDArray[np.float64], random: np.random.Generator) -> Interval:
    """Images are drawn with replacement: a multinomial draw over the few values that a change can have."""
    values, counts = np.unique(np.round(changes_N, 12), return_counts=True)
    drawn = random.multinomial(len(changes_N), counts / len(changes_N), size=NUM_RESAMPLES)
    low, high = np.quantile(drawn @ values / len(changes_N), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return Interval(low=low, high=high)


def _over_both(changes_PN: NDArray[np.int64], pairs: Sequence[NetworkPair]) -> Interval:
    """Of the mean over random pretraining seeds, crossed with random images.

    The variance of the seeds' means and that of the images' means both hold what belongs to one image under one seed,
    so this part is subtracted once (Searle, Casella, McCulloch: Variance Components, 1992, section 4.3). The degrees of
    freedom are Satterthwaite's. ``benchmarks/bench_statistics.py`` measures how often the interval holds the truth.
    """
    from scipy import special  # 0.1 s to import: only who compares images pays for it

    values_SN = np.stack(list(_by_pretrain_seed(changes_PN, pairs)))
    num_seeds, num_images = values_SN.shape
    means_S, means_N, mean = values_SN.mean(axis=1), values_SN.mean(axis=0), float(values_SN.mean())
    residuals_SN = values_SN - means_S[:, None] - (means_N - mean)
    seeds_freedom, images_freedom = num_seeds - 1, max(num_images - 1, 1)
    of_seeds = np.square(means_S - mean).sum() / seeds_freedom / num_seeds
    of_images = np.square(means_N - mean).sum() / images_freedom / num_images
    of_both = np.square(residuals_SN).sum() / (seeds_freedom * images_freedom) / values_SN.size
    variance = max(of_seeds + of_images - of_both, of_seeds, of_images)
    if variance == 0:
        return Interval(low=mean, high=mean)
    uncertainty = of_seeds**2 / seeds_freedom + of_images**2 / images_freedom
    uncertainty += of_both**2 / (seeds_freedom * images_freedom)
    half = float(special.stdtrit(variance**2 / uncertainty, (1 + CONFIDENCE) / 2) * np.sqrt(variance))
    return Interval(low=mean - half, high=mean + half)


def _by_pretrain_seed(changes_PN: NDArray[np.int64], pairs: Sequence[NetworkPair]) -> Iterator[NDArray[np.float64]]:
    """Change of each image, mean over the transfers of one pretrain seed."""
    seeds = np.array([pair.seeds.pretrain for pair in pairs])
    for seed in np.unique(seeds):
        yield changes_PN[seeds == seed].mean(axis=0)


def sample_sentences(comparison: SampleComparison) -> tuple[str, ...]:
    """What differs, how sure that is, and of what."""
    tests = comparison.tests
    fixed, broken = sum(test.num_fixed for test in tests), sum(test.num_broken for test in tests)
    per = "" if len(tests) == 1 else f" over {len(tests)} pairs of networks"
    difference = number(comparison.mean, _ERROR, sign="+")
    images = f"{comparison.num_samples:,} validation images; {fixed:,} fixed and {broken:,} broken{per}"
    lines = [f"{comparison.second} - {comparison.first}: {difference} points of error on {images}"]
    if comparison.num_left_out:
        lines.append(
            f"{comparison.num_left_out:,} images of the split are left out: some networks have no outcome for them"
        )
    found = [test for test in tests if test.p_holm < _SIGNIFICANT]
    corrected = f", Holm's correction for {len(tests)} pairs" if len(tests) > 1 else ""
    verdict = f"{len(found)} of {len(tests)} pairs of networks differ" if len(tests) > 1 else _verdict(tests[0])
    lines.append(f"{verdict} (McNemar's exact test{corrected}, level {_SIGNIFICANT})")
    lines.append(f"bootstrap over images, of these networks: {_interval(comparison.over_images)}")
    return (*lines, _about_seeds(comparison))


def sample_tables(comparison: SampleComparison) -> list[TextTable]:
    """The pairs of networks; then of each kind of group those that changed most."""
    header = ("pair of networks", "fixed", "broken", "difference [points]", "p (McNemar)", "p (Holm)")
    rows = tuple(_test_row(test) for test in comparison.tests)
    tables = [
        TextTable(title=f"{comparison.second} - {comparison.first}, {comparison.place}", header=header, rows=rows)
    ]
    for kind, groups in groups_by_kind(comparison).items():
        shown = _most_changed(groups)
        more = f"{len(groups) - len(shown)} more in -o csv; " if len(groups) > len(shown) else ""
        caption = f"{more}p: sign test over images, of these networks, corrected for {len(groups)} by Holm's method"
        rows = tuple(_group_row(group) for group in shown)
        tables.append(TextTable(title=f"by {kind}", header=(kind, *_GROUP_COLUMNS), rows=rows, caption=caption))
    return tables


def sample_records(comparisons: Sequence[SampleComparison]) -> Records:
    """One line per pair of networks (kind ``networks``) and per group; rates are fractions."""
    counts = ("num_samples", "num_fixed", "num_broken", "difference", "p_value", "p_holm")
    named = [
        (comparison, kind, name, line)
        for comparison in comparisons
        for kind, name, line in (
            *(("networks", _pair_name(test), test) for test in comparison.tests),
            *((group.kind, group.name, group) for group in comparison.groups),
        )
    ]
    lines = [
        (found.place, found.first, found.second, kind, name, *(getattr(line, column) for column in counts))
        for found, kind, name, line in named
    ]
    return Records(columns=("place", "first", "second", "kind", "name", *counts), rows=tuple(lines))


def groups_by_kind(comparison: SampleComparison) -> dict[str, list[ImageGroup]]:
    """Groups by what they are of, in the order in which they came."""
    kinds: dict[str, list[ImageGroup]] = {}
    for group in comparison.groups:
        kinds.setdefault(group.kind, []).append(group)
    return kinds


def draw_groups(comparison: SampleComparison) -> Figure:
    """Share of the images of each group that was fixed (right) and broken (left); a panel for each kind."""
    from matplotlib.figure import Figure

    kinds = groups_by_kind(comparison)
    shown = {kind: _most_changed(groups) for kind, groups in kinds.items()}
    heights = [0.9 + 0.3 * len(groups) for groups in shown.values()] or [1.0]
    figure = Figure(figsize=(7.2, sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (kind, groups) in zip(panels, shown.items(), strict=False):
        _draw_panel(panel, kind, groups, len(comparison.tests), len(kinds[kind]))
    if shown:
        panels[0].legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)
    return figure


def render_samples_page(comparison: SampleComparison, *, figure_png: bytes, sheet_png: bytes) -> bytes:
    """One HTML page that needs no other file."""
    title = escape(f"{comparison.second} against {comparison.first}, image by image")
    style = resources.files("orchestrator.report").joinpath("assets/page.css").read_text(encoding="utf-8")
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in sample_sentences(comparison))
    tables = "".join(_html_table(table) for table in sample_tables(comparison))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}'
        "main { max-width: 980px; margin: 0 auto; } img { max-width: 100%; height: auto; }</style></head>"
        f"<body><main><h1>{title}</h1><p>{escape(comparison.place)}</p><ul>{sentences}</ul>"
        f"<h2>What was fixed and what was broken</h2>{_html_image(figure_png, 'fixed and broken images by group')}"
        f"<h2>Images</h2>{_html_image(sheet_png, 'contact sheet of fixed and broken images')}{tables}"
        "</main></body></html>"
    ).encode()


def _verdict(test: NetworkTest) -> str:
    if test.p_value >= _SIGNIFICANT:
        return f"no significant difference between the two networks: p = {p_text(test.p_value)}"
    return (
        f"the two networks differ: p {p_text(test.p_value) if test.p_value < 0.0005 else '= ' + p_text(test.p_value)}"
    )


def _about_seeds(comparison: SampleComparison) -> str:
    if comparison.over_both is None and comparison.num_pretrain_seeds > 1:
        return "two pretraining seeds are too few for an interval over seeds"
    if comparison.over_both is None:
        return (
            "one pretraining seed: this interval is about these two networks, not about the ways in which they were "
            "trained; networks of other seeds may differ in another way"
        )
    seeds = f"{comparison.num_pretrain_seeds} pretraining seeds"
    return f"over seeds and images, of the label spaces: {_interval(comparison.over_both)} ({seeds})"


def _interval(found: Interval) -> str:
    return f"{100 * found.confidence:.0f} % interval {interval(found.low, found.high, _ERROR, sign='+')} points"


def _pair_name(test: NetworkTest) -> str:
    return f"pretrain seed {test.seeds.pretrain}, transfer seed {test.seeds.transfer}"


def _test_row(test: NetworkTest) -> tuple[str, ...]:
    counts = (f"{test.num_fixed:,}", f"{test.num_broken:,}")
    return (_pair_name(test), *counts, *_tested(test.difference, test.p_value, test.p_holm))


def _group_row(group: ImageGroup) -> tuple[str, ...]:
    counts = (f"{group.num_samples:,}", f"{group.num_fixed:,}", f"{group.num_broken:,}")
    return (group.name, *counts, *_tested(group.difference, group.p_value, group.p_holm))


def _tested(difference: float, p_value: float, p_holm: float) -> tuple[str, str, str]:
    return number(difference, _ERROR, sign="+"), p_text(p_value), p_text(p_holm)


def _most_changed(groups: Sequence[ImageGroup]) -> list[ImageGroup]:
    """Those whose number of errors changed most, in the order of the difference."""
    changed = sorted(groups, key=lambda group: (-abs(group.num_broken - group.num_fixed), group.name))
    return sorted(changed[:_MOST_GROUPS], key=lambda group: (group.difference, group.name))


def _draw_panel(panel: Axes, kind: str, groups: Sequence[ImageGroup], num_pairs: int, num_groups: int) -> None:
    places = range(len(groups))
    fixed = [100 * group.num_fixed / (group.num_samples * num_pairs) for group in groups]
    broken = [-100 * group.num_broken / (group.num_samples * num_pairs) for group in groups]
    panel.barh(places, fixed, color=_FIXED_COLOR, label="fixed")
    panel.barh(places, broken, color=_BROKEN_COLOR, label="broken")
    panel.plot(
        [f + b for f, b in zip(fixed, broken, strict=True)], places, "kD", markersize=5, mec="white", label="net"
    )
    stars = ["*" if group.p_holm < _SIGNIFICANT else "" for group in groups]
    panel.set_yticks(places, [f"{group.name}{star}" for group, star in zip(groups, stars, strict=True)], fontsize=8)
    panel.invert_yaxis()
    panel.axvline(0, color="#555555", linewidth=0.8)
    some = f", {len(groups)} of {num_groups}" if len(groups) < num_groups else ""
    panel.set_title(f"by {kind}{some} (* = p < {_SIGNIFICANT} after Holm's correction)", fontsize=9, loc="left")
    panel.set_xlabel("% of the group's images", fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _html_table(table: TextTable) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    return (
        f'<h2>{escape(table.title)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{caption}"
    )


def _html_image(png: bytes, text: str) -> str:
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
