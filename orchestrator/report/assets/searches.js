// -------------------------------------------------------------------------------------------------------- searches
  // A part of page.js. One search is shown at a time; the filters above are about transfers and change nothing here.
  const MAX_TRIALS = 500, LOG_FROM = 20; // an axis is logarithmic if its ends are further apart than that
  const LOOKS = { completed: ["#0072b2", "circle"], stopped: ["#d55e00", "circle-open"], running: ["#999999", "circle-open"], failed: ["#a33a3a", "x"] };
  const asText = (value) => (!isThere(value) ? "-" : typeof value === "number" ? String(Number(value.toPrecision(6))) : typeof value === "string" ? value : JSON.stringify(value));
  const positionOf = (value) => (!isThere(value) || typeof value === "number" ? value : asText(value)); // on an axis, and in an order
  const bestTrial = (search) => search.trials.find((trial) => trial.number === search.best);
  const paramsText = (search, trial) => search.fields.map((name) => `${name} = ${asText(trial.params[name])}`).join(", ");
  const stateCount = (search, name) => search.trials.filter((trial) => trial.state === name).length;

  function renderSearches() {
    const search = DATA.searches[state.search] || DATA.searches[0];
    byId("searches-section").hidden = !search;
    if (!search) return;
    renderSearchList(search);
    if (!search.fields.includes(state.parameter)) state.parameter = search.fields[0] || null;
    const jobs = DATA.searches.map((one) => one.job), controls = byId("search-filters");
    controls.replaceChildren();
    if (jobs.length > 1) controls.append(chooser("search", "Search", jobs, search.job, (job) => { Object.assign(state, { search: jobs.indexOf(job), trialSort: null, parameter: null }); render(); }));
    if (search.fields.length > 1) controls.append(chooser("parameter", "Parameter", search.fields, state.parameter, (name) => { state.parameter = name; render(); }));
    renderTrials(search);
    renderLandscape(search);
  }
  function renderSearchList(shown) { // of a single search the table below says it all
    const head = element("thead"), names = element("tr"), body = element("tbody");
    byId("searches").hidden = DATA.searches.length < 2;
    for (const name of ["search", "by", "trials", "stopped", "failed", "best", "value [%]", "hours", "saved [%]"]) names.append(element("th", name));
    head.append(names);
    for (const search of DATA.searches) {
      const best = bestTrial(search), line = element("tr", null, search === shown ? { class: "best" } : {});
      const cells = [search.job, `${search.algorithm} over ${search.over}`, search.trials.length, stateCount(search, "stopped"), stateCount(search, "failed"), best ? paramsText(search, best) : "-",
        best && isThere(best.value) ? fixed(100 * best.value, 2) : "-", `${search.spent.toPrecision(3)} ${search.unit}`, fixed(100 * search.saved, 0)];
      for (const cell of cells) line.append(element("td", cell));
      body.append(line);
    }
    byId("searches").replaceChildren(head, body);
  }
  function renderTrials(search) {
    const columns = [
      ["trial", (trial) => trial.number, (trial) => trial.number],
      ...search.fields.map((name) => [name, (trial) => asText(trial.params[name]), (trial) => positionOf(trial.params[name])]),
      ["state", (trial) => trial.state, (trial) => trial.state],
      ["epochs", (trial) => asText(trial.epoch), (trial) => trial.epoch],
      [`${search.metric} [%]`, (trial) => (isThere(trial.value) ? fixed(100 * trial.value, 2) : "-"), (trial) => trial.value],
      [search.unit, (trial) => trial.hours.toPrecision(3), (trial) => trial.hours],
    ];
    const head = element("thead"), names = element("tr"), body = element("tbody");
    for (const [name] of columns) {
      const cell = element("th", null, state.trialSort === name ? { "aria-sort": state.trialsDescending ? "descending" : "ascending" } : {});
      const button = element("button", name);
      button.addEventListener("click", () => { state.trialsDescending = state.trialSort === name && !state.trialsDescending; state.trialSort = name; render(); });
      cell.append(button);
      names.append(cell);
    }
    head.append(names);
    for (const trial of sorted(search.trials, columns, state.trialSort, state.trialsDescending).slice(0, MAX_TRIALS)) {
      const line = element("tr", null, { class: trial.number === search.best ? "best" : "", title: trial.reason });
      for (const [name, text] of columns) line.append(element("td", text(trial), name === "state" && trial.state === "failed" ? { class: "lacking" } : {}));
      body.append(line);
    }
    byId("trials").replaceChildren(head, body);
    const more = search.trials.length > MAX_TRIALS ? [`${search.trials.length - MAX_TRIALS} more trials are in its record.`] : [];
    byId("search-caption").textContent = [...search.sentences, ...more].join(" ");
  }
  function renderLandscape(search) { // what each value of a parameter came to; a stopped trial stands where it was stopped
    const told = search.trials.filter((trial) => isThere(trial.value) && isThere(trial.params[state.parameter]));
    byId("landscape").hidden = !told.length;
    if (!told.length) return Plotly.purge("landscape");
    const position = (trial) => positionOf(trial.params[state.parameter]);
    const trace = (name, trials, marker) => ({ name, mode: "markers", x: trials.map(position), y: trials.map((trial) => 100 * trial.value), marker,
      text: trials.map((trial) => `trial ${trial.number}, ${trial.state} after epoch ${asText(trial.epoch)}<br>${paramsText(search, trial)}`), hovertemplate: "%{text}<br>%{y:.2f} %<extra></extra>" });
    const traces = Object.entries(LOOKS).map(([name, [color, symbol]]) => trace(name, told.filter((trial) => trial.state === name), { color, symbol, size: 9 })).filter((one) => one.x.length);
    const best = told.filter((trial) => trial.number === search.best);
    if (best.length) traces.push({ ...trace(`best: trial ${search.best}`, best, { symbol: "circle-open", size: 17, color: "black", line: { width: 2 } }), hoverinfo: "skip", hovertemplate: "" });
    const places = told.map(position), areNumbers = places.every((place) => typeof place === "number");
    const isLog = areNumbers && Math.min(...places) > 0 && Math.max(...places) / Math.min(...places) >= LOG_FROM;
    Plotly.react("landscape", traces, { height: 360, margin: { l: 60, r: 20, t: 10, b: 50 }, hovermode: "closest", xaxis: { type: isLog ? "log" : areNumbers ? "linear" : "category", title: { text: state.parameter } },
      yaxis: { title: { text: `${search.metric} [%]` } }, legend: { orientation: "h", y: -0.2 } }, PLOT);
  }
