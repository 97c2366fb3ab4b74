"use strict";
// Draws the pictures of #data: plotly.js does the work, this chooses axes, smoothing and colours.
const page = JSON.parse(document.getElementById("data").textContent);
const controls = document.getElementById("controls");
const titles = { step: "step", tokens: "tokens", flops: "FLOPs", hours: "hours of training" };

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Exponential moving average without the bias of its start; a gap stays one.
function smoothed(values, weight) {
  let sum = 0, count = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + value;
    count = weight * count + 1;
    return sum / count;
  });
}

function traces(picture, x, weight) {
  return picture.traces.map((trace) => {
    if (trace.axis === undefined) return trace;
    const { axis, sparse, ...rest } = trace;
    const y = weight > 0 && !sparse ? smoothed(trace.y, weight) : trace.y;
    return { ...rest, x: page.axes[axis][x], y };
  });
}

// Lines of a legend below the picture, which is as much higher.
function legendRows(picture, width) {
  const longest = Math.max(...picture.traces.map((trace) => (trace.name || "").length));
  const columns = Math.max(1, Math.floor((width - 60) / (55 + 6.5 * longest)));
  return Math.ceil(picture.traces.length / columns);
}

function layout(picture, element) {
  const grid = style("--grid"), curve = picture.traces[0].axis !== undefined;
  const narrow = element.clientWidth < 500;
  const height = picture.height || (picture.id === "loss" ? 400 : 270);
  const axis = { gridcolor: grid, linecolor: grid, zerolinecolor: grid, automargin: true };
  const found = {
    font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 12, color: style("--text") },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 44, r: 12, t: 26, b: 40 },
    height: height + 19 * (legendRows(picture, element.clientWidth) - 1),
    hoverlabel: { namelength: -1 },
    xaxis: { ...axis },
    yaxis: { ...axis },
    showlegend: curve ? picture.traces.length > 1 : Boolean(picture.labels),
    legend: { orientation: "h", yanchor: "top", x: 0 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--soft"), activecolor: style("--accent") },
    barmode: picture.id === "shares" ? "stack" : "overlay",
  };
  if (curve) {
    const x = controls.elements.x.value;
    const log = (box) => (controls.elements[box].checked ? "log" : "linear");
    Object.assign(found.xaxis, { type: log("logx"), title: { text: titles[x], standoff: 6 }, nticks: narrow ? 5 : 9 });
    Object.assign(found.yaxis, { type: log("logy"), title: { text: picture.unit, standoff: 4 }, exponentformat: "power" });
    if (picture.from_zero) found.yaxis.rangemode = "tozero"; // also a constant, of which plotly.js would draw c - 1 to c + 1
    if (picture.from_zero && picture.unit) found.yaxis.exponentformat = "SI";
    found.hovermode = "x unified";
    found.hoverlabel.bgcolor = style("--card");
  } else if (picture.labels) {
    const every = picture.labels.map((_, i) => i);
    const share = picture.id === "shares";
    found.xaxis.title = { text: picture.unit, standoff: 6 };
    if (share) found.xaxis.tickformat = ".0%";
    Object.assign(found.yaxis, { tickvals: every, ticktext: picture.labels, range: [every.length - 0.5, -0.5], showgrid: false, zeroline: false });
    found.legend.traceorder = "normal";
  } else {
    found.xaxis.title = { text: "step", standoff: 6 };
    found.yaxis.autorange = "reversed";
    found.shapes = (picture.edges || []).map((y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y - 0.5, y1: y - 0.5, line: { color: style("--card"), width: 3 } }));
  }
  found.legend.y = -46 / (height - 66); // below the title of x
  return found;
}

function draw(picture) {
  const element = document.getElementById(picture.id);
  if (element === null || element.closest("details:not([open])")) return;
  const weight = Number(controls.elements.smooth.value);
  const config = { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"] };
  Plotly.react(element, traces(picture, controls.elements.x.value, weight), layout(picture, element), config);
}

function drawAll() {
  const weight = Number(controls.elements.smooth.value);
  controls.elements.smoothed.value = weight > 0 ? weight.toFixed(2) : "off";
  page.pictures.forEach(draw);
}

controls.addEventListener("input", drawAll);
controls.addEventListener("submit", (event) => event.preventDefault());
document.getElementById("others")?.addEventListener("toggle", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("beforeprint", drawAll);
addEventListener("afterprint", drawAll);
drawAll();
document.documentElement.dataset.drawn = String(document.querySelectorAll(".js-plotly-plot").length);
