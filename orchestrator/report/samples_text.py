"""A comparison image by image for people: sentences, tables, records, a figure and one HTML page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from orchestrator.report.numbers import interval, number, p_text
from orchestrator.report.records import Records
from orchestrator.report.samples import Group, Interval, NetworkTest, SampleComparison
from orchestrator.report.text import TextTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ERROR = "val_error"
_SIGNIFICANT = 0.05
_MOST_GROUPS = 10
"""Of a kind, in a table or a panel; the CSV has all."""
_FEW_SEEDS = 5
_FIXED_COLOR, _BROKEN_COLOR = "#0072b2", "#d55e00"  # which colour-blind readers can tell apart
_GROUP_COLUMNS = ("images", "fixed", "broken", "difference [points]", "p", "p (Holm)")


def sample_sentences(comparison: SampleComparison) -> tuple[str, ...]:
    """What differs, how sure that is, and of what."""
    tests = comparison.tests
    fixed, broken = sum(test.num_fixed for test in tests), sum(test.num_broken for test in tests)
    per = "" if len(tests) == 1 else f" over {len(tests)} pairs of networks"
    difference = number(comparison.mean, _ERROR, sign="+")
    images = f"{comparison.num_samples:,} validation images; {fixed:,} fixed and {broken:,} broken{per}"
    lines = [f"{comparison.second} - {comparison.first}: {difference} points of error on {images}"]
    if comparison.num_left_out:
        lines.append(f"{comparison.num_left_out:,} images of the split are left out: some network has no outcome there")
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


def groups_by_kind(comparison: SampleComparison) -> dict[str, list[Group]]:
    """Groups by what they are of, in the order in which they came."""
    kinds: dict[str, list[Group]] = {}
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
        return f"the two networks cannot be told apart: p = {p_text(test.p_value)}"
    return (
        f"the two networks differ: p {p_text(test.p_value) if test.p_value < 0.0005 else '= ' + p_text(test.p_value)}"
    )


def _about_seeds(comparison: SampleComparison) -> str:
    if comparison.over_both is None and comparison.num_pretrain_seeds > 1:
        return "two pretraining seeds are too few for an interval over seeds"
    if comparison.over_both is None:
        return (
            "one pretraining seed: this is an interval of these networks, not of the ways in which they were trained; "
            "networks of other seeds may differ otherwise"
        )
    is_doubtful = comparison.num_pretrain_seeds < _FEW_SEEDS
    doubt = "; covers less than 95 % with so few seeds: see docs/report.md" if is_doubtful else ""
    seeds = f"{comparison.num_pretrain_seeds} pretraining seeds{doubt}"
    return f"bootstrap over seeds and images, of the label spaces: {_interval(comparison.over_both)} ({seeds})"


def _interval(found: Interval) -> str:
    return f"{100 * found.confidence:.0f} % interval {interval(found.low, found.high, _ERROR, sign='+')} points"


def _pair_name(test: NetworkTest) -> str:
    return f"pretrain seed {test.seeds.pretrain}, transfer seed {test.seeds.transfer}"


def _test_row(test: NetworkTest) -> tuple[str, ...]:
    counts = (f"{test.num_fixed:,}", f"{test.num_broken:,}")
    return (_pair_name(test), *counts, *_tested(test.difference, test.p_value, test.p_holm))


def _group_row(group: Group) -> tuple[str, ...]:
    counts = (f"{group.num_samples:,}", f"{group.num_fixed:,}", f"{group.num_broken:,}")
    return (group.name, *counts, *_tested(group.difference, group.p_value, group.p_holm))


def _tested(difference: float, p_value: float, p_holm: float) -> tuple[str, str, str]:
    return number(difference, _ERROR, sign="+"), p_text(p_value), p_text(p_holm)


def _most_changed(groups: Sequence[Group]) -> list[Group]:
    """Those whose number of errors changed most, in the order of the difference."""
    changed = sorted(groups, key=lambda group: (-abs(group.num_broken - group.num_fixed), group.name))
    return sorted(changed[:_MOST_GROUPS], key=lambda group: (group.difference, group.name))


def _draw_panel(panel: Axes, kind: str, groups: Sequence[Group], num_pairs: int, num_groups: int) -> None:
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
