if (data.device && data.diagram.length) {
  const box = document.getElementById("roofline");
  const { flops_per_s: peak, bytes_per_s: speed, dtype, products } = data.device;
  const HIGH = 300, LEFT = 92, RIGHT = 16, TOP = 16, BOTTOM = 40;
  const named = (value, unit) => {
    const power = Math.min(5, Math.max(0, Math.floor(Math.log10(value) / 3)));
    return `${Number((value / 10 ** (3 * power)).toPrecision(3))} ${["", "k", "M", "G", "T", "P"][power]}${unit}`;
  };
  const points = data.diagram.flatMap((part) => part.rows.map((row) => {
    const times = part.what === "repeated block" ? part.times : 1;
    return { row, time_s: row.time_s * times, x: row.flops / row.nbytes, y: row.flops / row.time_s };
  })).filter((one) => one.x > 0 && one.y > 0 && isFinite(one.x) && isFinite(one.y) && one.y > 1e-4 * peak).sort((a, b) => b.time_s - a.time_s);
  const log = Math.log10, ridge = peak / speed;
  const xs = [Math.floor(log(Math.min(0.3, ...points.map((p) => p.x)))), Math.ceil(log(Math.max(10 * ridge, ...points.map((p) => p.x))))];
  const ys = [log(peak) - 4, log(peak) + 0.35];
  const say = (one) => {
    const bound = one.x < ridge ? "memory" : "compute", roof = Math.min(peak, one.x * speed);
    document.getElementById("kernel").textContent = `${one.row.op} at ${one.row.source}: ${seconds(one.time_s)} in a step, ${named(one.x, "FLOP")} a byte, ` +
      `${named(one.y, "FLOP/s")}: ${Math.round((100 * one.y) / roof)}% of what ${bound} allows.`;
  };
  const draw = () => {
    const width = box.clientWidth;
    const x = (value) => LEFT + ((width - LEFT - RIGHT) * (log(value) - xs[0])) / (xs[1] - xs[0]);
    const y = (value) => TOP + (HIGH - TOP - BOTTOM) * (1 - (log(value) - ys[0]) / (ys[1] - ys[0]));
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${HIGH}`, width, height: HIGH });
    for (let k = xs[0]; k <= xs[1]; k++) svg.append(drawn("line", { class: "grid", x1: x(10 ** k), x2: x(10 ** k), y1: TOP, y2: HIGH - BOTTOM }),
      drawn("text", { x: x(10 ** k), y: HIGH - BOTTOM + 16, "text-anchor": k === xs[1] ? "end" : "middle" }, width > 600 || (k - xs[0]) % 2 === 0 ? named(10 ** k, "") : ""));
    for (let k = Math.ceil(ys[0]); k <= ys[1]; k++) svg.append(drawn("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(10 ** k), y2: y(10 ** k) }),
      drawn("text", { x: LEFT - 6, y: y(10 ** k) + 4, "text-anchor": "end" }, named(10 ** k, "FLOP/s")));
    svg.append(drawn("text", { x: width - RIGHT, y: HIGH - 8, "text-anchor": "end" }, "FLOP per byte"));
    const start = Math.max(10 ** xs[0], 10 ** ys[0] / speed);
    svg.append(drawn("path", { class: "roof", d: `M${x(start)} ${y(start * speed)}L${x(ridge)} ${y(peak)}H${width - RIGHT}` }),
      drawn("text", { x: width - RIGHT - 4, y: y(peak) - 7, "text-anchor": "end" }, `${named(peak, "FLOP/s")}, ${dtype}`),
      drawn("text", { x: x(Math.sqrt(start * ridge)) - 8, y: y(Math.sqrt(start * ridge) * speed) - 6, "text-anchor": "end" }, named(speed, "B/s")));
    for (const one of points) {
      const title = `${one.row.op} at ${one.row.source}: ${seconds(one.time_s)}`;
      const point = drawn("circle", { class: products.includes(one.row.op) ? "dot product" : "dot", cx: x(one.x), cy: y(one.y), r: 3.5 + 14 * Math.sqrt(one.time_s / data.predicted.time_s),
        tabindex: 0, role: "button", "aria-label": title }, drawn("title", {}, title));
      point.addEventListener("click", () => say(one));
      point.addEventListener("focus", () => say(one));
      point.addEventListener("pointerenter", () => say(one));
      svg.append(point);
    }
    box.replaceChildren(svg);
  };
  whenShown("roofline", draw);
  if (points.length) say(points[0]);
}
