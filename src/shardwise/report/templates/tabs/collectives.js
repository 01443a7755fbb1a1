{
  const box = document.getElementById("moving");
  const buttons = [...document.querySelectorAll("#collectives button")];
  const MOST = 4, WIDE = 72, GAP = 14, HIGH = 15, TOP = 22, DOWN = 116;
  const words = {
    "all-gather": "Every device has one part of the array and gets the others.",
    "all-reduce": "Every device has partial sums of the whole array. They are added up, and every device gets the result.",
    "reduce-scatter": "Every device has partial sums of the whole array. They are added up, and every device keeps one part of the result.",
    "all-to-all": "Every device sends another part to every other: another dimension is sharded afterwards.",
    "collective-permute": "Every device sends its part to one other, as in a ring.",
    "host-transfer": "Every device exchanges arrays with the memory of its host.",
  };
  const show = (button) => {
    for (const other of buttons) other.setAttribute("aria-pressed", other === button);
    const kind = button.textContent, axes = button.dataset.axes.split(" ").filter(Boolean);
    const size = axes.reduce((product, axis) => product * data.mesh.sizes[data.mesh.names.indexOf(axis)], 1);
    const n = Math.min(size, MOST), each = [...Array(n).keys()];
    const partial = kind === "all-reduce" || kind === "reduce-scatter";
    // From one device and place to another, by the part that moves.
    const moves = each.flatMap((d) => ({
      "all-gather": () => each.map((e) => [d, d, e, d, d]),
      "all-reduce": () => each.flatMap((part) => each.map((e) => [d, part, e, part, part])),
      "reduce-scatter": () => each.map((part) => [d, part, part, part, part]),
      "all-to-all": () => each.map((e) => [d, e, e, d, d]),
      "collective-permute": () => [[d, d, (d + 1) % n, d, d]],
    })[kind]?.() ?? []);
    const x = (d) => d * (WIDE + GAP) + 1, y = (row, part) => TOP + row * DOWN + 5 + part * (HIGH + 2);
    const width = n * (WIDE + GAP) - GAP + 2, tall = n * (HIGH + 2) + 8;
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${TOP + DOWN + tall + 2}`, role: "img", "aria-label": `${kind}: before and after` });
    ["before", "after"].forEach((text, row) => {
      svg.append(drawn("text", { x: 1, y: TOP + row * DOWN - 7 }, text));
      for (const d of each) svg.append(drawn("rect", { class: "device", x: x(d), y: TOP + row * DOWN, width: WIDE, height: tall, rx: 4 }));
    });
    const block = ([d, place, , , part], more) => drawn("rect", { x: x(d) + 5, y: y(0, place), width: WIDE - 10, height: HIGH, rx: 2,
      fill: `hsl(${((360 * part) / n + 210) % 360} 55% 62%)`, "fill-opacity": partial ? 0.4 : 1, ...more });
    const first = moves.filter((move, k) => k === moves.findIndex((other) => other[0] === move[0] && other[1] === move[1]));
    svg.append(...first.map((move) => block(move, {})));
    for (const move of moves) {
      const [d, place, to, then] = move;
      svg.append(block(move, { class: "fly", style: `--x:${x(to) - x(d)}px;--y:${y(1, then) - y(0, place)}px` }));
    }
    box.replaceChildren(element("h4", {}, kind), element("p", {}, words[kind] ?? ""), ...(moves.length && n > 1 ? [svg] : []),
      element("figcaption", { class: "quiet" }, size > n ? `${n} of ${size} devices of ${axes.join(" · ")}.` : `The ${size} devices of ${axes.join(" · ")}.`));
  };
  for (const button of buttons) button.addEventListener("click", () => show(button));
  if (buttons.length) show(buttons[0]);
}
