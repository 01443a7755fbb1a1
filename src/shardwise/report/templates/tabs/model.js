if (data.diagram.length) {
  const names = data.mesh.names;
  const box = document.getElementById("diagram");
  const about = document.getElementById("about");
  const select = document.getElementById("part");
  const LANE = 12;
  let part = data.diagram[0];

  const over = (axes) => axes.map((axis) => names[axis]).join(" · ");
  const axesText = (axes) => element("span", { class: "axis", style: `--axis:${shade(axes)}` }, over(axes));

  // A tensor: a box with one cell for each dimension.
  const tensor = (array, label) => {
    const cells = array.shape.map((size, d) => {
      const axes = array.axes[d] ?? [];
      const color = array.colors[d] ?? -1;
      const name = data.colors[color]?.name ?? "";
      const local = `${array.local[d].toLocaleString("en")} on each device`;
      const why = axes.length ? ` (over ${over(axes)})` : "";
      const title = [name, `${local}${why}`, ...(data.colors[color]?.why ?? [])].filter(Boolean).join("\n");
      const cell = element("button", { type: "button", class: "dim", "data-color": color, title },
        size.toLocaleString("en"));
      if (axes.length) {
        cell.classList.add("cut");
        cell.style.setProperty("--axis", shade(axes));
        cell.append(element("span", { class: "hidden" }, ` over ${over(axes)}`));
      }
      cell.addEventListener("click", (event) => {
        event.stopPropagation();
        light(color, array, d, label);
      });
      return cell;
    });
    const made = element("span", { class: "tensor" });
    if (label) made.append(element("span", { class: "path" }, label));
    made.append(element("span", { class: "dims" }, ...(cells.length ? cells : [element("span", { class: "dim" }, "scalar")])));
    if (array.partial.length) made.append(element("span", { class: "quiet" }, `partial over ${over(array.partial)}`));
    return made;
  };

  const rows = [];
  const light = (color, array, d, label) => {
    for (const cell of box.querySelectorAll(".dim")) {
      cell.classList.toggle("lit", color >= 0 && Number(cell.dataset.color) === color);
    }
    box.classList.toggle("dark", color >= 0);
    for (const row of rows) row.classList.remove("chosen");
    const known = data.colors[color];
    const axes = array.axes[d] ?? [];
    about.replaceChildren(
      element("h4", {}, known?.name || "dimension of size one"),
      element("p", {}, `Dimension ${d} of ${label || "an inner array"}: ${array.shape[d].toLocaleString("en")}, ` +
        `${array.local[d].toLocaleString("en")} on each device.`),
      element("p", {}, axes.length ? axesText(axes) : "Not sharded here."),
      ...(known?.why.length ? known.why : axes.length ? ["It follows from its operands."] : []).map((text) => element("p", {}, text)),
    );
  };

  const choose = (number) => {
    light(-1, { axes: [], shape: [0], local: [0] }, 0, "");
    const row = part.rows[number];
    const within = part.what === "repeated block" ? "in this block" : "in a step";
    rows.forEach((other, k) => other.classList.toggle("chosen", k === number));
    const lines = [element("h4", {}, row.op), element("p", {}, element("code", {}, row.source), row.module ? ` in ${row.module}` : "")];
    if (row.text) lines.push(element("pre", {}, row.text));
    lines.push(element("p", {}, `${seconds(row.time_s)} of compute ${within}` + (row.with.length ? `, together with ${row.with.join(", ")}` : "") + "."));
    lines.push(element("p", {}, `Writes ${row.out.dtype}[${row.out.shape.join(", ")}], of which each device has [${row.out.local.join(", ")}].`));
    for (const move of row.moves) {
      lines.push(element("p", {}, `${move.kind} over `, axesText(move.axes), ` ${move.before ? "before" : "after"} it, of ${move.of}: ` +
        `${binary(move.nbytes)} and ${seconds(move.time_s)} ${within}` +
        (move.overlapped_s ? `, ${seconds(move.overlapped_s)} of it can overlap.` : ", none of it beside compute.")));
    }
    about.replaceChildren(...lines);
  };

  const collective = (move) => element("span", { class: "move", title: move.of },
    element("b", {}, move.kind), " ", axesText(move.axes), ` ${binary(move.nbytes)}, ${seconds(move.time_s)}`);

  const draw = () => {
    rows.length = 0;
    const list = element("ol", {});
    part.rows.forEach((row, number) => {
      const before = row.moves.filter((move) => move.before), after = row.moves.filter((move) => !move.before);
      const title = `${row.source} ${row.text}\nwrites ${row.out.dtype}[${row.out.shape}], [${row.out.local}] on each device`;
      const head = element("button", { type: "button", class: "op", title }, element("b", {}, row.op), " ",
        element("span", { class: "quiet" }, `${row.source} · ${seconds(row.time_s)}`));
      head.addEventListener("click", () => choose(number));
      if (row.text) head.append(element("code", { class: "source" }, row.text));
      const item = element("li", {});
      if (row.arguments.length) {
        const most = 4, shown = row.arguments.slice(0, most).map((a) => tensor(a, a.path));
        if (row.arguments.length > most) shown.push(element("span", { class: "quiet" }, `and ${row.arguments.length - most} more`));
        item.append(element("div", { class: "inputs" }, ...shown));
      }
      if (before.length) item.append(element("div", { class: "moves" }, ...before.map(collective)));
      item.append(head);
      if (after.length) item.append(element("div", { class: "moves" }, ...after.map(collective)));
      item.append(element("div", { class: "result" }, tensor(row.out, row.label)));
      rows.push(item);
      list.append(item);
    });
    const arcs = drawn("svg", { class: "arcs", "aria-hidden": "true" });
    const left = part.left_out ? [element("p", { class: "quiet" }, `${part.left_out} small kernels are left out.`)] : [];
    box.replaceChildren(element("div", { class: "flow" }, list, arcs), ...left);
    wire(arcs);
    choose(Math.max(0, part.rows.findIndex((row) => row.moves.length)));
  };

  // Arrays that are read further down go along the right side, each in a lane of its own as long as it lives.
  const wire = (arcs) => {
    const reach = new Map();
    part.rows.forEach((row, k) => { for (const from of row.from) if (from < k - 1) reach.set(from, [...(reach.get(from) ?? []), k]); });
    const lanes = [];
    const placed = [...reach].sort((a, b) => a[0] - b[0]).map(([from, to]) => {
      let lane = lanes.findIndex((end) => end <= from);
      if (lane < 0) lane = lanes.length;
      lanes[lane] = to.at(-1);
      return { from, to, lane };
    });
    const gutter = Math.max(1, lanes.length) * LANE + 14;
    box.style.setProperty("--gutter", `${gutter}px`);
    const { clientWidth: width, clientHeight: height } = arcs.parentElement;
    arcs.setAttribute("width", width);
    arcs.setAttribute("height", height);
    arcs.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const frame = arcs.parentElement.getBoundingClientRect();
    const edge = (shown) => {
      const own = shown.getBoundingClientRect();
      return [own.right - frame.left + 3, (own.top + own.bottom) / 2 - frame.top];
    };
    for (const { from, to, lane } of placed) {
      const x = width - gutter + 14 + lane * LANE, r = 6;
      const [left, start] = edge(rows[from].querySelector(".result .dims"));
      const ends = to.map((k) => edge(rows[k].querySelector(".op")));
      const path = [`M${left} ${start}H${x - r}Q${x} ${start} ${x} ${start + r}V${ends.at(-1)[1] - r}`];
      for (const [right, end] of ends) path.push(`M${x} ${end - r}Q${x} ${end} ${x - r} ${end}H${right + 4}`);
      const tips = ends.map(([right, end]) => drawn("path", { class: "tip", d: `M${right} ${end}l6 -4v8z` }));
      arcs.append(drawn("path", { class: "arc", d: path.join("") }), ...tips);
    }
    part.rows.forEach((row, k) => rows[k].classList.toggle("next", row.from.includes(k - 1)));
  };

  data.diagram.forEach((one, k) => {
    const way = one.what === "whole program" ? "" : one.backward ? ", backward" : one.times > 1 ? ", forward" : "";
    const times = one.times > 1 ? `, ${one.times} times` : "";
    const what = one.what[0].toUpperCase() + one.what.slice(1);
    select.append(element("option", { value: k }, `${what}${way}${times}: ${seconds(one.time_s)} per step`));
  });
  select.addEventListener("change", () => {
    part = data.diagram[select.value];
    draw();
  });
  whenShown("diagram", draw);
}
