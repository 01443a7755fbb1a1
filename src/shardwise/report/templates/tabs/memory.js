if (data.memory) {
  const { bytes, kinds, largest, points } = data.memory;
  const box = document.getElementById("curve");
  const there = document.getElementById("there");
  const limit = data.predicted.usable_bytes;
  const HIGH = 320, LEFT = 64, BOTTOM = 26, TOP = 12;
  const order = Object.keys(kinds);
  const tone = (kind) => `var(--kind-${order.indexOf(kind) % 6})`;
  document.getElementById("kinds").append(...order.map((kind) => element("span", {}, element("i", { style: `background:${tone(kind)}` }), kind)));
  let width = 0, at = bytes.indexOf(Math.max(...bytes)), line = null;
  const top = 1.06 * Math.max(...bytes, Math.max(...bytes) >= 0.3 * limit ? limit : 0, 1);
  const y = (value) => TOP + (HIGH - TOP - BOTTOM) * (1 - value / top);
  const x = (k) => LEFT + ((width - LEFT) * k) / bytes.length;

  const draw = () => {
    width = box.clientWidth;
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${HIGH}`, width, height: HIGH, "aria-hidden": "true" });
    const unit = top >= 2 ** 30 ? 2 ** 30 : top >= 2 ** 20 ? 2 ** 20 : 2 ** 10, unitName = unit === 2 ** 30 ? "GiB" : unit === 2 ** 20 ? "MiB" : "KiB";
    for (const tick of ticks(0, top / unit, 6)) {
      const h = y(tick * unit);
      svg.append(drawn("line", { class: "grid", x1: LEFT, x2: width, y1: h, y2: h }),
        drawn("text", { x: LEFT - 6, y: h + 4, "text-anchor": "end" }, `${Number(tick.toPrecision(3))} ${unitName}`));
    }
    const under = bytes.map(() => 0);
    for (const kind of order) {
      const upper = under.map((u, k) => u + kinds[kind][k]);
      const forth = upper.map((u, k) => `L${x(k).toFixed(1)} ${y(u).toFixed(1)}H${x(k + 1).toFixed(1)}`).join("");
      const back = under.map((u, k) => [u, k]).reverse().map(([u, k]) => `L${x(k + 1).toFixed(1)} ${y(u).toFixed(1)}H${x(k).toFixed(1)}`).join("");
      svg.append(drawn("path", { d: `M${LEFT} ${y(under[0])}${forth}${back}Z`, style: `fill:${tone(kind)}` }));
      upper.forEach((u, k) => { under[k] = u; });
    }
    if (limit <= top) {
      svg.append(drawn("line", { class: "limit", x1: LEFT, x2: width, y1: y(limit), y2: y(limit) }),
        drawn("text", { class: "limit", x: width - 6, y: y(limit) - 6, "text-anchor": "end" }, `limit ${binary(limit)}`));
    }
    svg.append(drawn("text", { x: LEFT, y: HIGH - 8 }, "first kernel"), drawn("text", { x: width - 4, y: HIGH - 8, "text-anchor": "end" }, "last kernel"));
    line = drawn("line", { class: "mark", y1: TOP, y2: HIGH - BOTTOM });
    svg.append(line);
    box.replaceChildren(svg);
    show(at);
  };
  const show = (k) => {
    at = Math.min(bytes.length - 1, Math.max(0, k));
    line.setAttribute("x1", x(at + 0.5));
    line.setAttribute("x2", x(at + 0.5));
    const parts = order.filter((kind) => kinds[kind][at]).map((kind) => `${binary(kinds[kind][at])} ${kind}`);
    const alive = largest.filter((a) => a.first <= at && at <= a.last).slice(0, 6);
    const peak = bytes[at] === Math.max(...bytes) ? " (the peak)" : "";
    there.replaceChildren(element("h4", {}, `${binary(bytes[at])}${peak} at ${Math.round((100 * at) / bytes.length)}% of ${points.toLocaleString("en")} kernels`),
      element("p", {}, parts.join(", ")),
      element("ul", {}, ...alive.map((a) => element("li", {}, element("i", { style: `background:${tone(a.kind)}` }), `${binary(a.nbytes)} `, element("code", {}, a.label)))));
  };
  box.addEventListener("pointermove", (event) => show(Math.floor(((event.clientX - box.getBoundingClientRect().left - LEFT) / (width - LEFT)) * bytes.length)));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 }[event.key];
    if (!by) return;
    event.preventDefault();
    show(at + by);
  });
  whenShown("curve", draw);
}
