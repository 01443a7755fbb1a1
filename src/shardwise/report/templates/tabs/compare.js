{
  const box = document.getElementById("front");
  const chosen = document.getElementById("chosen");
  const p = data.predicted;
  const HIGH = 340, LEFT = 66, BOTTOM = 44, TOP = 12, RIGHT = 14;
  const plan = { kind: "plan", name: "this plan", time_s: p.time_s, peak_bytes: p.peak_bytes, fits: p.fits, specs: data.specs };
  const baselines = data.baselines.map((b) => ({ ...b, kind: "baseline", name: b.variant ? `${b.name}, ${b.variant}` : b.name }));
  const front = (data.search?.front ?? []).map((t) => ({ ...t, kind: "found", name: "found by the search" }));
  const every = [...baselines, ...front, plan];
  // What is far slower than the plan would press all others into a corner.
  const most = 2.5 * p.time_s;
  const least = Math.min(...every.map((e) => e.time_s));
  const shown = every.filter((e) => e.kind !== "baseline" || (e.time_s <= most && e.peak_bytes <= 2.5 * Math.max(p.usable_bytes, p.peak_bytes)));
  const left = every.length - shown.length;
  const legend = [["plan", "this plan"], ["found", "found by the search"], ["baseline", "baseline"]];
  document.getElementById("kinds-of-plans").append(...legend.filter(([kind]) => shown.some((e) => e.kind === kind))
    .map(([kind, text]) => element("span", {}, element("i", { class: kind }), text)),
    ...(left ? [element("span", { class: "quiet" }, `${left} far slower or larger ones are not in the picture`)] : []));

  const tell = (one, point) => {
    for (const other of box.querySelectorAll(".point")) other.classList.toggle("on", other === point);
    const rows = (one.specs ?? []).slice(0, 40).map(([path, text]) => element("tr", {}, element("th", { scope: "row" }, element("code", {}, path)), element("td", {}, element("code", {}, text))));
    const note = one.specs ? [] : [element("p", { class: "quiet" }, one.kind === "found" ? "The log of the search keeps times and memory of its states, not their specs." : "Only the best few baselines have their specs here.")];
    chosen.replaceChildren(element("h4", {}, one.name), ...(one.words ? [element("p", {}, one.words)] : []), element("p", {}, `${seconds(one.time_s)} per step, ${binary(one.peak_bytes)} per device${one.fits ? "" : ": does not fit"}`), ...note);
    if (rows.length) chosen.append(element("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Specs" }, element("table", {}, element("tbody", {}, ...rows))));
  };

  const draw = () => {
    const width = box.clientWidth;
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${HIGH}`, width, height: HIGH });
    const bytes = shown.map((e) => e.peak_bytes), times = shown.map((e) => e.time_s);
    const high = 1.06 * Math.max(...bytes, p.usable_bytes <= 3 * Math.max(...bytes) ? p.usable_bytes : 0), long = 1.05 * Math.max(...times), short = 0.9 * Math.min(least, ...times);
    const x = (value) => LEFT + (width - LEFT - RIGHT) * (value / high);
    const y = (value) => TOP + (HIGH - TOP - BOTTOM) * (1 - (value - short) / (long - short));
    const unit = high >= 2 ** 30 ? 2 ** 30 : high >= 2 ** 20 ? 2 ** 20 : 2 ** 10, unitName = unit === 2 ** 30 ? "GiB" : unit === 2 ** 20 ? "MiB" : "KiB";
    for (const tick of ticks(0, high / unit, Math.max(3, width / 130))) {
      svg.append(drawn("line", { class: "grid", x1: x(tick * unit), x2: x(tick * unit), y1: TOP, y2: HIGH - BOTTOM }),
        drawn("text", { x: x(tick * unit), y: HIGH - BOTTOM + 16, "text-anchor": "middle" }, String(Number(tick.toPrecision(3)))));
    }
    for (const tick of ticks(short, long, 6)) {
      svg.append(drawn("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
        drawn("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, seconds(tick)));
    }
    svg.append(drawn("text", { x: width - RIGHT, y: HIGH - 8, "text-anchor": "end" }, `peak memory, ${unitName}`));
    const far = x(p.usable_bytes) > width / 2;
    if (p.usable_bytes <= high) {
      svg.append(drawn("line", { class: "limit", x1: x(p.usable_bytes), x2: x(p.usable_bytes), y1: TOP, y2: HIGH - BOTTOM }),
        drawn("text", { class: "limit", x: x(p.usable_bytes) + (far ? -6 : 6), y: TOP + 10, "text-anchor": far ? "end" : "start" }, "memory of a device"));
    }
    const steps = front.map((t) => `${x(t.peak_bytes).toFixed(1)} ${y(t.time_s).toFixed(1)}`);
    if (steps.length > 1) svg.append(drawn("path", { class: "line", d: `M${steps.join("L")}` }));
    // The plan and the best baselines have their names beside them, where there is room.
    const taken = shown.map((e) => [x(e.peak_bytes) - 6, x(e.peak_bytes) + 6, y(e.time_s) - 6, y(e.time_s) + 6]);
    for (const one of [plan, ...shown.filter((e) => e.kind === "baseline" && data.best.includes(e.name.split(", ")[0])).slice(0, 3)]) {
      const long = 6.6 * one.name.length, at = x(one.peak_bytes), h = y(one.time_s);
      const spots = [[at + 13, h + 4], [at - 13 - long, h + 4], [at - long / 2, h - 14], [at - long / 2, h + 22]];
      const free = spots.find(([l, b]) => l > LEFT && l + long < width - RIGHT && b < HIGH - BOTTOM && b > TOP + 10 &&
        taken.every(([from, to, top, low]) => l > to || l + long < from || b - 11 > low || b + 2 < top));
      if (!free) continue;
      taken.push([free[0], free[0] + long, free[1] - 11, free[1] + 2]);
      svg.append(drawn("text", { class: "name", x: free[0], y: free[1] }, one.name));
    }
    for (const one of shown) {
      const shape = one.kind === "plan" ? { d: "M0 -9L9 0L0 9L-9 0Z" } : one.kind === "found" ? { d: "M-4 -4H4V4H-4Z" } : { d: "M0 -4.5A4.5 4.5 0 1 1 0 4.5A4.5 4.5 0 1 1 0 -4.5Z" };
      const named = `${one.name}: ${seconds(one.time_s)}, ${binary(one.peak_bytes)}`;
      const point = drawn("path", { ...shape, class: `point ${one.kind}${one.fits ? "" : " over"}`, transform: `translate(${x(one.peak_bytes)} ${y(one.time_s)})`,
        tabindex: 0, role: "button", "aria-label": named }, drawn("title", {}, named));
      point.addEventListener("click", () => tell(one, point));
      point.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); tell(one, point); } });
      svg.append(point);
      if (one === plan) tell(one, point);
    }
    box.replaceChildren(svg);
    tell(plan, box.querySelector(".point.plan"));
  };
  whenShown("front", draw);
}
