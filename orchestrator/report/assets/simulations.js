"use strict";
(() => { // simulations: present only where the sweep has any
  const DATA = JSON.parse(document.getElementById("report").textContent);
  const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]; // Okabe and Ito
  const section = document.createElement("section");
  section.id = "simulations-section";
  const make = (tag, text, parent) => { const made = document.createElement(tag); made.textContent = text; parent.append(made); return made; };

  function table(found) {
    make("h3", found.title, section);
    const wide = make("div", "", section), made = make("table", "", wide), head = make("tr", "", make("thead", "", made)), body = make("tbody", "", made);
    wide.className = "wide";
    for (const name of found.header) make("th", name, head);
    for (const row of found.rows) { const line = make("tr", "", body); for (const cell of row) make("td", cell, line); }
  }
  function traces(found) {
    return found.lines.flatMap((line, index) => {
      const there = line.levels.map((level, place) => [level, line.estimates[place]]).filter(([, estimate]) => estimate);
      const x = there.map(([level]) => level), y = there.map(([, estimate]) => found.scale * estimate.mean), color = COLORS[index % COLORS.length];
      const end = (name) => there.map(([, estimate]) => found.scale * (estimate[name] === null ? estimate.mean : estimate[name]));
      const low = end("low"), high = end("high");
      if (!found.factor) return [{ name: line.name, x, y, mode: "markers", marker: { color }, error_y: { type: "data", symmetric: false, array: high.map((value, place) => value - y[place]), arrayminus: low.map((value, place) => y[place] - value) } }];
      const band = { x: [...x, ...[...x].reverse()], y: [...high, ...[...low].reverse()], fill: "toself", fillcolor: color, opacity: 0.2, line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false, legendgroup: line.name };
      return [band, { name: line.name, legendgroup: line.name, x, y, mode: "lines+markers", line: { color } }];
    });
  }
  document.querySelector("main").prepend(section);
  make("h2", "Simulations", section);
  DATA.simulations.forEach((found, index) => {
    const plot = make("div", "", section);
    plot.className = "plot";
    plot.id = `simulation-${index}`;
    Plotly.react(plot, traces(found), { height: 400, margin: { l: 70, r: 20, t: 40, b: 50 }, title: { text: found.name }, xaxis: { title: { text: found.factor }, type: found.factor ? (found.isLogX ? "log" : "linear") : "category" },
      yaxis: { title: { text: found.metric + found.unit }, type: found.isLogY ? "log" : "linear" }, legend: { orientation: "h", y: -0.2 } }, { responsive: true, displaylogo: false });
    if (found.spread) make("p", found.spread, section).className = "caption";
    found.tables.forEach(table);
  });
  if (DATA.tables.length === 0) document.getElementById("curve-section").hidden = true;
})();
