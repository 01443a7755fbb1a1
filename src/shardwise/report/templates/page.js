const data = JSON.parse(document.getElementById("data").textContent);

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const drawing = new DOMParser().parseFromString("<svg></svg>", "text/html").body.firstChild.namespaceURI;
function drawn(tag, attributes, ...children) {
  const made = document.createElementNS(drawing, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Figures as in shardwise/units.py.
function figure(value, unit) {
  return `${value.toFixed(value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2)} ${unit}`;
}
function seconds(value) {
  if (value >= 999.5) return `${Math.round(value).toLocaleString("en")} s`;
  for (const [factor, unit] of [[1, "s"], [1e3, "ms"], [1e6, "µs"]]) {
    if (value * factor >= 0.9995 || value === 0) return figure(value * factor, unit);
  }
  return figure(value * 1e9, "ns");
}
function binary(value) {
  for (const [power, unit] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]]) {
    if (value >= 2 ** power) return `${(value / 2 ** power).toFixed(2)} ${unit}`;
  }
  return `${value.toFixed(0)} B`;
}
// Round steps for an axis from 0 or from `from`, at most `count`.
function ticks(from, to, count) {
  const rough = (to - from) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((k) => k * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to * (1 + 1e-9); at += step) found.push(at);
  return found;
}
const axisColor = (number) => `var(--axis-${number % 8})`;
// A background of the colors of some axes, by number, side by side.
function shade(axes) {
  if (axes.length === 1) return axisColor(axes[0]);
  const stops = axes.map((axis, k) => `${axisColor(axis)} ${(100 * k) / axes.length}% ${(100 * (k + 1)) / axes.length}%`);
  return `linear-gradient(100deg, ${stops.join(", ")})`;
}
// Calls draw now, when the tab is opened, and when the width changes.
const drawings = [];
function whenShown(id, draw) {
  const panel = document.getElementById(id).closest("[role=tabpanel]");
  let width = -1;
  drawings.push(() => {
    if (panel.hidden || panel.clientWidth === width) return;
    width = panel.clientWidth;
    draw();
  });
}
function redraw() {
  for (const draw of drawings) draw();
}
window.addEventListener("resize", redraw);

const tabs = [...document.querySelectorAll("[role=tab]")];
function openTab(tab) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  // Not scrollIntoView: after it the Tab key would go on from there, past the tabs.
  const list = tab.parentElement, box = list.getBoundingClientRect(), own = tab.getBoundingClientRect();
  list.scrollLeft += Math.min(0, own.left - box.left) + Math.max(0, own.right - box.right);
  redraw();
}
{
  const named = () => tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0];
  const go = (tab) => {
    history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
    openTab(tab);
  };
  const steps = { ArrowRight: (k) => k + 1, ArrowLeft: (k) => k - 1, Home: () => 0, End: () => -1 };
  for (const [k, tab] of tabs.entries()) {
    tab.addEventListener("click", () => go(tab));
    tab.addEventListener("keydown", (event) => {
      const step = steps[event.key];
      if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const next = tabs.at(step(k) % tabs.length);
      next.focus();
      go(next);
    });
  }
  window.addEventListener("hashchange", () => openTab(named()));
  // At the end of the script, when all pictures can be drawn.
  queueMicrotask(() => openTab(named()));
}
