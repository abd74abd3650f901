// Draws a figure in the place of its still picture, which stays where plotly.js cannot be loaded, as without a network.
(() => {
  const place = document.getElementById("@@ID@@"), figure = @@FIGURE@@;
  const options = { responsive: true, displaylogo: false };
  const draw = (plotly) => { place.replaceChildren(); plotly.newPlot(place, figure.data, figure.layout, options); };
  if (window.Plotly) return draw(window.Plotly);
  const script = document.createElement("script");
  const onload = () => window.Plotly && draw(window.Plotly);
  Object.assign(script, { src: "@@SOURCE@@", integrity: "@@DIGEST@@", crossOrigin: "anonymous", onload });
  document.head.append(script);
})();
