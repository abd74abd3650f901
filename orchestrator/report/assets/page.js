"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("report").textContent);
  const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]; // Okabe and Ito
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross"];
  const SCALE = DATA.isFraction ? 100 : 1;
  const UNIT = DATA.unit ? ` [${DATA.unit}]` : "";
  const PERCENT = DATA.isFraction ? " [%]" : UNIT;
  const ANY = "all", SELECTED = "selected";
  const MAX_RUNS = 500, MAX_PAIRS = 60, MAX_LEARNING = 300, MAX_TRANSFERS = 24;
  const PLOT = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
  const initial = () => ({ protocol: ANY, target: ANY, transfer: null, pretrain: null, checkpoint: null, fraction: null,
    cell: SELECTED, hidden: new Set(), hiddenValues: new Set(), sort: null, descending: false, learning: null, stage: null, find: "",
    search: 0, trialSort: null, trialsDescending: false, parameter: null });
  const state = initial();

  const SIGN = DATA.isHigherBetter ? -1 : 1, BEST = DATA.isHigherBetter ? "highest" : "lowest";
  const byId = (id) => document.getElementById(id);
  const distinct = (values) => [...new Set(values)];
  const seriesNames = distinct(DATA.tables.flatMap((table) => table.rows.map((row) => row.series)));

  function element(tag, text, attributes = {}) {
    const made = document.createElement(tag);
    if (text !== undefined && text !== null) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  // ------------------------------------------------------------------------------------------------- numbers as text
  const isThere = (value) => value !== null && value !== undefined;
  function fixed(value, digits, signed = false) {
    if (!isThere(value)) return "-";
    const text = value.toFixed(digits);
    if (Number(text) === 0) return text.replace("-", ""); // never -0.00
    return signed && value > 0 ? `+${text}` : text;
  }
  function number(value, signed = false) {
    if (!isThere(value)) return "-";
    if (DATA.isFraction) return fixed(100 * value, 2, signed);
    const size = Math.abs(value), digits = Math.max(4, String(Math.trunc(size)).length + 1); // as number of report/render/numbers.py
    return (signed && value > 0 ? "+" : "") + (size < 1e7 ? String(Number(value.toPrecision(digits))) : value.toPrecision(4));
  }
  const plusMinus = (mean, std) => (isThere(mean) ? number(mean) + (isThere(std) ? ` ± ${number(std)}` : "") : "missing");

  // --------------------------------------------------------------------------------------------------------- filters
  const FACETS = ["transfer", "pretrain", "checkpoint", "fraction"];
  const NAMES = { transfer: "Transfer", pretrain: "Pretraining", checkpoint: "Checkpoint", fraction: "Labels", cell: "Grid cell" };
  const UNNAMED = { pretrain: "default", checkpoint: "final", fraction: "all" };
  const matches = (item, facets) => facets.every((facet) => item[facet] === state[facet]);

  function candidates(upTo) {
    return DATA.tables.filter((table) =>
      (state.protocol === ANY || table.protocol === state.protocol) &&
      (state.target === ANY || table.target === state.target) && matches(table, FACETS.slice(0, upTo)));
  }
  function settle() { // every facet gets a value that exists under those before it; headlines first
    FACETS.forEach((facet, index) => {
      const tables = candidates(index);
      if (!tables.some((table) => table[facet] === state[facet])) {
        const first = tables.find((table) => table.isHeadline) || tables[0];
        state[facet] = first ? first[facet] : null;
      }
    });
    const grid = currentGrid();
    if (state.cell !== SELECTED && !(grid && grid.values.includes(state.cell))) state.cell = SELECTED;
  }
  const currentTable = () => candidates(FACETS.length)[0];
  const currentGrid = () => DATA.ablations.find((item) => item.facet === "cell" && matches(item, FACETS));

  function chooser(name, label, values, chosen, onChange) {
    const select = element("select", null, { id: `filter-${name}` });
    for (const value of values) {
      const option = element("option", value === "" ? UNNAMED[name] || value : value, { value });
      option.selected = value === chosen;
      select.append(option);
    }
    select.addEventListener("change", () => onChange(select.value));
    const wrapped = element("label", label);
    wrapped.append(select);
    return wrapped;
  }
  function renderFilters() {
    const nav = byId("filters");
    nav.replaceChildren();
    const change = (name) => (value) => { state[name] = value; render(); };
    for (const name of ["protocol", "target"]) {
      const values = distinct(DATA.tables.map((table) => table[name]));
      nav.append(chooser(name, name === "protocol" ? "Protocol" : "Target", [ANY, ...values], state[name], change(name)));
    }
    FACETS.forEach((facet, index) => {
      const values = distinct(candidates(index).map((table) => table[facet]));
      const ever = distinct(DATA.tables.map((table) => table[facet]));
      if (facet === "transfer" || ever.length > 1) nav.append(chooser(facet, NAMES[facet], values, state[facet], change(facet)));
    });
    const grid = currentGrid();
    if (grid) nav.append(chooser("cell", NAMES.cell, [SELECTED, ...grid.values], state.cell, change("cell")));
    const table = currentTable();
    const boxes = (title, id, names, hidden) => {
      const group = element("fieldset", null, { id, "aria-label": title });
      if (table && table.factors) group.append(element("legend", title));
      for (const [name, text] of names) {
        const box = element("input", null, { type: "checkbox", value: name });
        box.checked = !hidden.has(name);
        box.addEventListener("change", () => { hidden[box.checked ? "delete" : "add"](name); render(); });
        const label = element("label");
        label.append(box, document.createTextNode(text));
        group.append(label);
      }
      return group;
    };
    const kinds = table && table.factors
      ? table.factors.map((factor, place) => boxes(factor, `filter-factor-${place}`,
        distinct(table.values.map((values) => values[place])).map((value) => [`${factor}=${value}`, value]), state.hiddenValues))
      : [boxes("Kinds of label spaces", "filter-series", seriesNames.map((name) => [name, name]), state.hidden)];
    const reset = element("button", "Reset", { id: "filter-reset", type: "button" });
    reset.addEventListener("click", () => { Object.assign(state, initial()); byId("runs-find").value = ""; render(); });
    nav.append(...kinds, reset);
  }

  // ------------------------------------------------------------------------------------------------------------ rows
  function visibleRows(table) { // under another cell than the selected one only its own mean, spread and count are known
    const grid = state.cell === SELECTED ? null : currentGrid();
    const rows = table.rows.map((row, index) => {
      if (!grid) return { ...row, index };
      const place = grid.rows.findIndex((other) => other.labelSpace === row.labelSpace);
      const cell = grid.rows[place].cells[grid.values.indexOf(state.cell)];
      const summary = isThere(cell.mean) ? { mean: cell.mean, std: cell.std, low: null, high: null } : null;
      const n = cell.n === cell.expected ? String(cell.n) : `${cell.n}/${cell.expected} runs`;
      return { ...row, index, summary, n, improvement: null, cell: state.cell };
    });
    const baseline = rows.find((row) => row.labelSpace === table.baseline && row.summary);
    if (grid && baseline && baseline.summary.mean > 0) {
      for (const row of rows) if (row !== baseline && row.summary) row.improvement = SIGN * (1 - row.summary.mean / baseline.summary.mean);
    }
    if (!table.factors) return rows.filter((row) => !state.hidden.has(row.series));
    return rows.filter((row, index) => !table.values[index].some((value, place) => state.hiddenValues.has(`${table.factors[place]}=${value}`)));
  }
  function bestMean(rows, best) { // as among_complete of report/render/numbers.py
    const isPassed = rows.some((row) => row.summary && SIGN * row.summary.mean < SIGN * best.summary.mean);
    return `${BEST} mean${isPassed ? " among complete rows" : ""}`;
  }
  const isLacking = (row) => row.n.includes("/");
  function bestOf(rows) {
    const there = rows.filter((row) => row.summary);
    const complete = there.filter((row) => !isLacking(row));
    return (complete.length ? complete : there).reduce((best, row) => (!best || SIGN * row.summary.mean < SIGN * best.summary.mean ? row : best), null);
  }

  // ----------------------------------------------------------------------------------------------------------- curve
  const pale = (color) => `#${[1, 3, 5].map((at) => Math.round(255 - 0.35 * (255 - parseInt(color.slice(at, at + 2), 16))).toString(16).padStart(2, "0")).join("")}`;
  function lackingOf(rows, placeOf, numberOf) { // over the markers of their lines; hollow ones are published
    const some = rows.filter(isLacking), of = (values) => some.map((row) => values[numberOf(row) % values.length]);
    return some.length ? [{ name: "pale: lacks runs", mode: "markers", x: some.map(placeOf), y: some.map((row) => SCALE * row.summary.mean), hoverinfo: "skip",
      marker: { color: of(COLORS.map(pale)), symbol: of(SYMBOLS), size: 8 } }] : [];
  }
  // Numbers stand at their place, on a log axis where they span a factor of 30; other values side by side.
  function renderFactorCurve(table, rows) {
    const values = new Map(table.rows.map((row, index) => [row.labelSpace, table.values[index]]));
    const drawn = rows.filter((row) => row.summary), all = distinct(table.values.map((some) => some[0])).map(Number);
    const isOrdered = all.every((value) => Number.isFinite(value)), low = Math.min(...all), high = Math.max(...all);
    const lineOf = (row) => values.get(row.labelSpace).slice(1).join(", ") || DATA.metric;
    const placeOf = (row) => (isOrdered ? Number(values.get(row.labelSpace)[0]) : values.get(row.labelSpace)[0]);
    const traces = distinct(drawn.map(lineOf)).map((name, index) => {
      const line = drawn.filter((row) => lineOf(row) === name);
      if (isOrdered) line.sort((a, b) => placeOf(a) - placeOf(b));
      const color = COLORS[index % COLORS.length], symbol = SYMBOLS[index % SYMBOLS.length];
      return { name, mode: "lines+markers", x: line.map(placeOf), y: line.map((row) => SCALE * row.summary.mean),
        error_y: { type: "data", array: line.map((row) => SCALE * (row.summary.std || 0)), thickness: 1.2, width: 4 },
        text: line.map((row) => `${row.labelSpace}<br>${plusMinus(row.summary.mean, row.summary.std)}, n = ${row.n}`),
        hovertemplate: "%{text}<extra></extra>", line: { color, width: 2 }, marker: { color, symbol, size: 8 } };
    });
    const lines = distinct(drawn.map(lineOf));
    traces.push(...lackingOf(drawn, placeOf, (row) => lines.indexOf(lineOf(row))));
    const xaxis = isOrdered ? { type: low > 0 && high / low >= 30 ? "log" : "linear", tickvals: all, ticktext: all.map(String) } : { type: "category" };
    const title = DATA.metric.replace("val_", "validation ").replaceAll("_", " ") + PERCENT;
    Plotly.react("curve", traces, { height: 440, margin: { l: 60, r: 20, t: 10, b: 55 }, hovermode: "closest", legend: { orientation: "h", y: -0.2 },
      xaxis: { ...xaxis, title: { text: table.factors[0] } }, yaxis: { title: { text: title }, zeroline: false } }, PLOT);
  }
  function renderCurve(table, rows) {
    if (table.factors) return renderFactorCurve(table, rows);
    const [traces, layout] = curveOf(table, rows, 440);
    Plotly.react("curve", traces, layout, PLOT);
  }
  // Every transfer at once, small: whether they agree is seen before one of them is read.
  function renderTransfers() {
    const tables = DATA.tables.filter((table) => table.isHeadline && !table.factors);
    const isShown = tables.length > 1 && tables.length <= MAX_TRANSFERS;
    byId("transfers-section").hidden = !isShown;
    if (!isShown) return;
    const figures = tables.map((table, index) => {
      const figure = element("figure"), caption = element("figcaption"), button = element("button", table.title, { type: "button" });
      button.addEventListener("click", () => { Object.assign(state, { protocol: ANY, target: ANY }, Object.fromEntries(FACETS.map((facet) => [facet, table[facet]]))); render(); });
      caption.append(button);
      figure.append(caption, element("div", null, { id: `transfer-${index}`, class: "plot" }));
      return figure;
    });
    byId("transfers").replaceChildren(...figures);
    tables.forEach((table, index) => {
      const [traces, layout] = curveOf(table, table.rows.filter((row) => !state.hidden.has(row.series)), 244);
      Plotly.newPlot(`transfer-${index}`, traces, { ...layout, showlegend: false, margin: { l: 52, r: 8, t: 6, b: 62 }, font: { size: 10 } }, { ...PLOT, displayModeBar: false });
    });
  }
  function curveOf(table, rows, height) {
    const traces = [];
    const drawn = rows.filter((row) => row.summary && isThere(row.granularity));
    seriesNames.forEach((name, index) => {
      const line = drawn.filter((row) => row.series === name).sort((a, b) => a.granularity - b.granularity);
      if (!line.length) return;
      const color = COLORS[index % COLORS.length], symbol = SYMBOLS[index % SYMBOLS.length];
      traces.push({ name, mode: "lines+markers", x: line.map((row) => row.granularity), y: line.map((row) => SCALE * row.summary.mean),
        error_y: { type: "data", array: line.map((row) => SCALE * (row.summary.std || 0)), thickness: 1.2, width: 4 },
        text: line.map((row) => `${row.labelSpace}<br>G = ${row.granularity}<br>${plusMinus(row.summary.mean, row.summary.std)}, n = ${row.n}`),
        hovertemplate: "%{text}<extra></extra>", line: { color, width: 2 }, marker: { color, symbol, size: 8 } });
      const printed = line.filter((row) => row.published);
      if (printed.length) traces.push({ name: `${name}, published`, mode: "markers", x: printed.map((row) => row.granularity),
        y: printed.map((row) => SCALE * row.published.value), text: printed.map((row) => `${row.labelSpace}, ${row.published.source}`),
        hovertemplate: "%{text}: %{y:.2f}<extra></extra>", marker: { color, symbol: `${symbol}-open`, size: 10 } });
    });
    traces.push(...lackingOf(drawn, (row) => row.granularity, (row) => seriesNames.indexOf(row.series)));
    const extent = drawn.map((row) => row.granularity);
    const across = [Math.min(...extent) / 1.3, Math.max(...extent) * 1.3];
    const level = (name, value, dash, color) => traces.push({ name, mode: "lines", x: across, y: [SCALE * value, SCALE * value],
      line: { dash, color, width: 1.5 }, hovertemplate: `${name}: %{y:.2f}<extra></extra>` });
    const baseline = table.rows.find((row) => row.labelSpace === table.baseline);
    const shown = rows.find((row) => row.labelSpace === table.baseline) || baseline;
    if (drawn.length && shown && shown.summary) level(`baseline ${table.baseline}`, shown.summary.mean, "dash", "#555555");
    if (drawn.length && table.onePass) level(`direct training on ${table.onePass.label_space}`, table.onePass.summary.mean, "dot", "#999999");
    const best = table.isTied ? null : bestOf(rows), bestName = best && `${bestMean(rows, best)}: ${best.labelSpace}`;
    const placeless = rows.filter((row) => row.summary && !isThere(row.granularity) && row.labelSpace !== table.baseline); // such as the best of a search
    if (drawn.length) placeless.forEach((row, index) => level(row === best ? bestName : row.labelSpace, row.summary.mean, "dashdot", COLORS[(seriesNames.indexOf(row.series) + index) % COLORS.length]));
    if (best && isThere(best.granularity)) traces.push({ name: bestName, mode: "markers", x: [best.granularity], y: [SCALE * best.summary.mean],
      hoverinfo: "skip", marker: { symbol: "circle-open", size: 17, color: "black", line: { width: 2 } } });
    // A cut axis makes small differences look large: it starts at 0 where the values come near it.
    const heights = drawn.flatMap((row) => [row.summary.mean - (row.summary.std || 0), row.summary.mean + (row.summary.std || 0)]);
    const rangemode = Math.min(...heights) < Math.max(...heights) / 2 ? "tozero" : "normal";
    const title = DATA.metric.replace("val_", "validation ").replaceAll("_", " ") + PERCENT;
    return [traces, { height, margin: { l: 60, r: 20, t: 10, b: 55 }, hovermode: "closest", legend: { orientation: "h", y: -0.2 },
      xaxis: { type: "log", title: { text: "pretraining granularity G [classes]" }, tickvals: distinct(extent).sort((a, b) => a - b), tickformat: "d" },
      yaxis: { title: { text: title }, zeroline: false, rangemode } }];
  }

  // --------------------------------------------------------------------------------------------------- results table
  // [header, text of a row, value to sort by]. The columns are those of report/render/columns.py; of a grid's cell that
  // was not selected, only its own runs are known.
  function columnsOf(table) {
    if (state.cell === SELECTED) return table.columns.map((column) => [column.header, (row) => column.texts[row.index], (row) => column.values[row.index]]);
    return [
      [table.columns[0].header, (row) => row.labelSpace, (row) => row.labelSpace],
      ["G", (row) => row.granularity ?? "-", (row) => row.granularity],
      [DATA.metric + PERCENT, (row) => (row.summary ? plusMinus(row.summary.mean, row.summary.std) : "missing"), (row) => row.summary && row.summary.mean],
      ["n", (row) => row.n, (row) => parseInt(row.n, 10)],
      ["improvement [%]", (row) => (row.labelSpace === table.baseline ? "baseline" : isThere(row.improvement) ? fixed(100 * row.improvement, 1, true) : "-"), (row) => row.improvement],
    ];
  }
  function sorted(rows, columns, by = state.sort, descending = state.descending) {
    const column = columns.find(([name]) => name === by);
    if (!column) return rows;
    const turn = descending ? -1 : 1;
    return [...rows].sort((a, b) => {
      const [x, y] = [column[2](a), column[2](b)];
      if (!isThere(x) || !isThere(y)) return isThere(y) - isThere(x); // what is unknown comes last either way
      return turn * (typeof x === "string" ? x.localeCompare(y) : x - y);
    });
  }
  function renderResults(table, rows) {
    const columns = columnsOf(table), best = bestOf(rows);
    const head = element("thead"), names = element("tr"), body = element("tbody");
    for (const [name] of columns) {
      const cell = element("th", null, state.sort === name ? { "aria-sort": state.descending ? "descending" : "ascending" } : {});
      const button = element("button", name);
      button.addEventListener("click", () => { state.descending = state.sort === name && !state.descending; state.sort = name; render(); });
      cell.append(button);
      names.append(cell);
    }
    head.append(names);
    for (const row of sorted(rows, columns)) {
      const line = element("tr", null, { class: [row === best && !table.isTied ? "best" : "", row.labelSpace === table.baseline ? "baseline" : ""].join(" ").trim() });
      for (const [name, text] of columns) line.append(element("td", text(row), name === "n" && isLacking(row) ? { class: "lacking" } : {}));
      body.append(line);
    }
    byId("results").replaceChildren(head, body);
    const captions = [state.cell === SELECTED ? table.caption : "", table.criteria.length ? `${table.rows.some((row) => row.cell) ? "grid cell" : "search"} of each row: ${table.criteria.join("; ")}` : "", table.images];
    byId("results-caption").textContent = captions.filter(Boolean).join(". ");
  }

  // ----------------------------------------------------------------------------------------------------------- pairs
  function renderPairs(table, rows) {
    const kept = rows.filter((row) => row.summary), names = kept.map((row) => row.labelSpace);
    const isShown = state.cell === SELECTED && names.length > 1 && names.length <= MAX_PAIRS && table.pairs.length > 0;
    byId("pairs-section").hidden = !isShown;
    if (!isShown) return Plotly.purge("pairs");
    const place = new Map(table.rows.map((row, index) => [index, names.indexOf(row.labelSpace)]));
    const z = names.map(() => names.map(() => null)), text = names.map(() => names.map(() => ""));
    for (const [first, second, mean, isEstablished] of table.pairs) {
      const [i, j] = [place.get(first), place.get(second)];
      if (i < 0 || j < 0) continue;
      const star = isEstablished ? "*" : "";
      z[i][j] = SCALE * mean; z[j][i] = -SCALE * mean;
      text[i][j] = number(mean, true) + star; text[j][i] = number(-mean, true) + star;
    }
    const limit = Math.max(...z.flat().map((value) => Math.abs(value ?? 0))) || 1;
    Plotly.react("pairs", [{ type: "heatmap", x: names, y: names, z, text, texttemplate: names.length <= 15 ? "%{text}" : "", showscale: names.length > 15,
      hovertemplate: "%{y} minus %{x}: %{text}<extra></extra>", zmin: -limit, zmax: limit, colorscale: [[0, "#2c7fb8"], [0.5, "#ffffff"], [1, "#d95f0e"]] }],
      { height: 150 + 28 * names.length, margin: { l: 10, r: 10, t: 10, b: 10 }, xaxis: { automargin: true, type: "category" }, yaxis: { automargin: true, autorange: "reversed", type: "category" } }, { ...PLOT, displayModeBar: false });
  }

  // ------------------------------------------------------------------------------------------------------- ablations
  const TITLES = { cell: "Whole grid", checkpoint: "Checkpoints", fraction: "Label fractions" };
  function renderAblations() {
    const place = byId("ablations");
    place.replaceChildren();
    for (const item of DATA.ablations) {
      if (!matches(item, FACETS.filter((facet) => facet !== item.facet))) continue;
      const table = element("table", null, { "data-facet": item.facet }), head = element("tr"), body = element("tbody");
      for (const name of ["pretrained on", "G", ...item.values]) head.append(element("th", name));
      for (const row of item.rows.filter((other) => !state.hidden.has(other.series))) {
        const line = element("tr");
        line.append(element("td", row.labelSpace), element("td", row.granularity ?? "-"));
        for (const cell of row.cells) {
          const lacks = cell.n < cell.expected ? ` (${cell.n}/${cell.expected})` : "";
          const heldOut = isThere(cell.selectError) ? ` [${fixed(100 * cell.selectError, 2)}]` : "";
          const text = cell.expected === 0 ? "" : (isThere(cell.mean) ? plusMinus(cell.mean, cell.std) : "-") + heldOut + lacks + (cell.isSelected ? " *" : "");
          line.append(element("td", text, cell.isSelected ? { class: "selected" } : {}));
        }
        body.append(line);
      }
      const top = element("thead");
      top.append(head);
      table.append(top, body);
      const wide = element("div", null, { class: "wide" });
      wide.append(table);
      place.append(element("h2", `${TITLES[item.facet]}: ${DATA.metric}${PERCENT}`), wide);
      const told = item.selectedBy.join("; ");
      if (told) place.append(element("p", item.facet === "cell" ? `* = selected: ${told}; in brackets: select_error [%].` : `selection: ${told}.`, { class: "caption" }));
    }
  }

  // --------------------------------------------------------------------------------------------------------- effects
  function renderEffects() {
    const place = byId("effects");
    place.replaceChildren();
    for (const item of (DATA.effects ?? []).filter((found) => found.transfer === state.transfer)) {
      const table = element("table"), head = element("tr"), top = element("thead"), body = element("tbody");
      for (const name of item.header) head.append(element("th", name));
      item.rows.forEach((cells, index) => {
        const line = element("tr", null, item.established[index] ? { class: "best" } : {});
        for (const cell of cells) line.append(element("td", cell));
        body.append(line);
      });
      top.append(head);
      table.append(top, body);
      const wide = element("div", null, { class: "wide" });
      wide.append(table);
      place.append(element("h2", `Effects of ${item.title}`), wide, element("p", `Bold = established. ${item.caption}`, { class: "caption" }));
    }
  }

  // @@SEARCHES@@

  // --------------------------------------------------------------------------------------------- runs, learning curves
  function runsOf(stage, spaces) {
    return DATA.runs.filter((run) => {
      if (!spaces.has(run.label_space)) return false;
      if ((run.pretrain || "") !== (state.pretrain || "")) return false;
      if (stage === "pretrain") return run.kind === "pretrain";
      const isHere = run.transfer === state.transfer && (run.checkpoint || "") === state.checkpoint && (run.fraction || "") === state.fraction;
      return isHere && run.kind !== "pretrain";
    });
  }
  const ofCell = (run, cells) => !run.cell || cells.get(run.label_space) === run.cell;
  function renderLearning(rows) {
    const spaces = new Set(rows.map((row) => row.labelSpace)), cells = new Map(rows.map((row) => [row.labelSpace, row.cell]));
    const curvesOf = (stage) => runsOf(stage, spaces).filter((run) => DATA.learning[run.job] && ofCell(run, cells));
    const stages = ["transfer", "pretrain"].filter((stage) => curvesOf(stage).length);
    // Of a probe that is judged at its end alone, the metric is one point.
    const isCurve = (run) => new Set(DATA.learning[run.job][DATA.metric]?.[0]).size > 1;
    const first = stages.find((one) => curvesOf(one).some(isCurve)) || stages[0];
    const stage = stages.includes(state.stage) ? state.stage : first, runs = stage ? curvesOf(stage) : [];
    const metrics = distinct(runs.flatMap((run) => Object.keys(DATA.learning[run.job])));
    if (!metrics.includes(state.learning)) state.learning = metrics.includes(DATA.metric) ? DATA.metric : metrics[0] || null;
    const controls = byId("learning-filters");
    controls.replaceChildren(
      chooser("stage", "Stage", stages, stage, (value) => { state.stage = value; render(); }),
      chooser("learning", "Metric", metrics, state.learning, (value) => { state.learning = value; render(); }));
    byId("learning-section").hidden = !stages.length;
    const names = [...spaces], isRate = state.learning && /error|accuracy/.test(state.learning), scale = isRate ? 100 : 1, named = new Set();
    const traces = runs.slice(0, MAX_LEARNING).filter((run) => DATA.learning[run.job][state.learning]).map((run) => {
      const [x, y] = DATA.learning[run.job][state.learning], isFirst = !named.has(run.label_space);
      named.add(run.label_space);
      return { name: run.label_space, legendgroup: run.label_space, showlegend: isFirst, mode: x.length > 30 ? "lines" : "lines+markers", x, y: y.map((value) => (isThere(value) ? scale * value : null)),
        line: { color: COLORS[names.indexOf(run.label_space) % COLORS.length], width: 1.3, dash: names.indexOf(run.label_space) >= COLORS.length ? "dot" : "solid" },
        hovertemplate: `${run.job}<br>epoch %{x}: %{y:.4g}<extra></extra>` };
    });
    Plotly.react("learning", traces, { height: 400, margin: { l: 60, r: 20, t: 10, b: 50 }, hovermode: "closest", xaxis: { title: { text: "epoch" } },
      yaxis: { title: { text: (state.learning || "").replaceAll("_", " ") + (isRate ? " [%]" : "") } }, legend: { orientation: "h", y: -0.2 } }, PLOT);
  }
  function renderRuns(rows) {
    const spaces = new Set(rows.map((row) => row.labelSpace));
    const found = [...runsOf("transfer", spaces), ...runsOf("pretrain", spaces)].filter((run) => run.job.includes(state.find));
    const body = element("tbody"), head = element("thead"), names = element("tr");
    for (const name of ["job", "state", DATA.metric + PERCENT, "tracked run", "artifact"]) names.append(element("th", name));
    head.append(names);
    for (const run of found.slice(0, MAX_RUNS)) {
      const line = element("tr"), tracked = element("td"), artifact = element("td");
      if (/^https?:/.test(run.link)) tracked.append(element("a", "MLflow", { href: run.link, target: "_blank", rel: "noopener" }));
      if (/^(file|https?):/.test(run.artifact)) artifact.append(element("a", run.key, { href: run.artifact }));
      else artifact.append(element("span", run.key, { title: run.artifact }));
      const isCommitted = run.state === "committed";
      line.append(element("td", run.job), element("td", run.state, isCommitted ? {} : { class: "lacking" }), element("td", isThere(run.value) ? number(run.value) : "-"), tracked, artifact);
      body.append(line);
    }
    byId("runs").replaceChildren(head, body);
    byId("runs-count").textContent = found.length > MAX_RUNS ? `first ${MAX_RUNS} of ${found.length}` : `${found.length} runs`;
  }

  // ------------------------------------------------------------------------------------------------------------ page
  function renderHeader() {
    byId("verdict").textContent = DATA.verdict;
    for (const [name, text] of DATA.study) {
      const told = element("dd");
      if (/^(https?|file):/.test(text)) told.append(element("a", text, { href: text }));
      else told.textContent = text;
      byId("study").append(element("dt", name), told);
    }
    for (const answer of DATA.answers) {
      const list = element("ul");
      for (const sentence of answer.sentences) list.append(element("li", sentence));
      byId("answers").append(element("h3", answer.title), list);
    }
    const notes = byId("notes");
    notes.hidden = DATA.notes.length === 0;
    notes.querySelector("summary").textContent = `${DATA.notes.length} note${DATA.notes.length === 1 ? "" : "s"}`;
    for (const note of DATA.notes) notes.querySelector("ul").append(element("li", note));
  }
  function render() {
    settle();
    const focused = document.activeElement && document.activeElement.id;
    renderFilters();
    if (focused && byId(focused)) byId(focused).focus(); // the filters were made anew: keyboards stay where they were
    const table = currentTable();
    byId("table-title").textContent = table ? table.title : "No transfer matches these filters.";
    for (const id of ["results-section", "pairs-section", "learning-section", "runs-section"]) byId(id).hidden = !table;
    byId("curve").hidden = byId("curve-caption").hidden = !table;
    renderSearches();
    renderEffects();
    if (!table) return byId("ablations").replaceChildren();
    const rows = visibleRows(table);
    renderTransfers();
    renderCurve(table, rows);
    renderResults(table, rows);
    renderPairs(table, rows);
    renderAblations();
    renderLearning(rows);
    renderRuns(rows);
  }
  byId("runs-find").addEventListener("input", (event) => { state.find = event.target.value; render(); });
  renderHeader();
  render();
  document.documentElement.dataset.ready = "true"; // for whoever waits: everything is drawn
})();
