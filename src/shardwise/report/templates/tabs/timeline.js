if (data.timeline) {
  const { names, sources, axes, events } = data.timeline;
  const canvas = document.getElementById("steps");
  const note = document.getElementById("event");
  const total = Math.max(1e-9, ...[events.reduce((end, e) => Math.max(end, e[3] + e[4]), 0)]);
  const LANES = ["kernels", "collectives"];
  const TOP = 26, HIGH = 58, GAP = 20;
  const context = canvas.getContext("2d");
  let from = 0, to = total, width = 0, chosen = null;
  const laneY = (lane) => TOP + 14 + lane * (HIGH + GAP);
  const height = laneY(1) + HIGH + 8;

  const tones = () => {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    return { text: get("--text"), quiet: get("--quiet"), rule: get("--rule"), area: get("--accent"), other: get("--area"),
      axes: data.mesh.names.map((_, k) => get(`--axis-${k % 8}`)) };
  };
  const products = new Set(data.device?.products);
  const kinds = [["accent", "matrix products"], ["area", "other kernels"], ...data.mesh.names.map((name, k) => [`axis-${k % 8}`, `collectives over ${name}`])];
  document.getElementById("lanes").append(...kinds.map(([color, text]) => element("span", {}, element("i", { style: `background:var(--${color})` }), text)));

  const draw = () => {
    const scale = devicePixelRatio || 1, tone = tones();
    width = canvas.parentElement.clientWidth;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    const x = (at) => ((at - from) / (to - from)) * width;
    context.fillStyle = tone.quiet;
    for (const at of ticks(from, to, Math.max(3, width / 110))) {
      context.fillStyle = tone.rule;
      context.fillRect(Math.round(x(at)), TOP - 6, 1, height);
      context.fillStyle = tone.quiet;
      const text = seconds(at * 1e-6);
      if (x(at) + context.measureText(text).width < width) context.fillText(text, x(at) + 4, 10);
    }
    LANES.forEach((lane, k) => { context.fillStyle = tone.quiet; context.fillText(lane, 4, laneY(k) - 9); });
    for (const event of events) {
      const [lane, name, , start, long, , on] = event;
      if (start + long < from || start > to) continue;
      const left = Math.max(-1, x(start)), right = Math.min(width + 1, x(start + long));
      const wide = Math.max(right - left - (right - left > 3 ? 1 : 0), 0.6);
      const colors = axes[on].map((axis) => tone.axes[data.mesh.names.indexOf(axis)]);
      context.globalAlpha = lane ? 0.85 : 1;
      context.fillStyle = lane ? colors[0] ?? tone.quiet : products.has(names[name]) ? tone.area : tone.other;
      context.fillRect(left, laneY(lane), wide, HIGH);
      colors.slice(1).forEach((color, k) => {
        context.fillStyle = color;
        const part = HIGH / colors.length;
        context.fillRect(left, laneY(lane) + (k + 1) * part, wide, part);
      });
      context.globalAlpha = 1;
      if (event === chosen) {
        context.strokeStyle = tone.text;
        context.lineWidth = 2;
        context.strokeRect(left, laneY(lane), wide, HIGH);
      }
      const text = wide > 150 ? `${names[name]} · ${sources[event[2]]}` : names[name];
      if (wide > 46 && context.measureText(text).width < wide - 8) {
        context.fillStyle = lane || !products.has(names[name]) ? "#16191c" : getComputedStyle(document.documentElement).getPropertyValue("--on-accent");
        context.fillText(text, left + 4, laneY(lane) + HIGH / 2);
      }
    }
  };
  const move = (start, end) => {
    const span = Math.min(total, Math.max(end - start, total * 1e-6));
    from = Math.min(Math.max(0, start), total - span);
    to = from + span;
    draw();
  };
  const zoom = (factor, at = (from + to) / 2) => move(at - (at - from) * factor, at + (to - at) * factor);
  const say = (event) => {
    if (event === chosen) return;
    chosen = event;
    if (event) {
      const [, name, source, , long, bytes, on] = event;
      const where = axes[on].length ? ` over ${axes[on].join(" · ")}` : "";
      note.textContent = `${names[name]}${where} at ${sources[source]}: ${seconds(long * 1e-6)}` + (bytes ? `, ${binary(bytes)}` : "");
    }
    draw();
  };
  const at = (pointer) => {
    const box = canvas.getBoundingClientRect();
    const time = from + ((pointer.clientX - box.left) / width) * (to - from), y = pointer.clientY - box.top;
    const lane = y >= laneY(1) - GAP / 2 ? 1 : 0, near = ((to - from) / width) * 2;
    return { time, event: events.findLast((e) => e[0] === lane && e[3] - near <= time && time <= e[3] + e[4] + near) ?? null };
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(from + (event.deltaX / width) * (to - from), to + (event.deltaX / width) * (to - from));
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event).time);
  }, { passive: false });
  let grabbed = null;
  canvas.addEventListener("pointerdown", (event) => { grabbed = event.clientX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { grabbed = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (grabbed === null) return say(at(event).event);
    const by = ((grabbed - event.clientX) / width) * (to - from);
    grabbed = event.clientX;
    move(from + by, to + by);
  });
  canvas.addEventListener("keydown", (event) => {
    const span = (to - from) / 5;
    const keys = { ArrowRight: () => move(from + span, to + span), ArrowLeft: () => move(from - span, to - span),
      "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), Home: () => move(0, total) };
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  document.getElementById("zoom-in").addEventListener("click", () => zoom(0.6));
  document.getElementById("zoom-out").addEventListener("click", () => zoom(1.7));
  document.getElementById("zoom-all").addEventListener("click", () => move(0, total));
  document.getElementById("perfetto").addEventListener("click", () => {
    const traceEvents = LANES.map((name, tid) => ({ name: "thread_name", ph: "M", pid: 0, tid, args: { name } }));
    for (const [tid, name, source, ts, dur, bytes, on] of events) {
      traceEvents.push({ name: names[name], ph: "X", pid: 0, tid, ts, dur, args: { source: sources[source], bytes, axes: axes[on].join(" ") } });
    }
    const file = new Blob([JSON.stringify({ traceEvents, displayTimeUnit: "ms" })], { type: "application/json" });
    const link = element("a", { href: URL.createObjectURL(file), download: "step.json" });
    link.click();
    URL.revokeObjectURL(link.href);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  whenShown("steps", draw);
}
