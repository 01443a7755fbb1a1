{
  const MOST = 1024;
  const COLUMNS = 8;
  const { names, sizes, device_order: order } = data.mesh;
  const select = document.getElementById("array");
  const table = document.getElementById("devices");
  const name = names.at(-1);
  const last = sizes.at(-1) ?? 1;
  // A long axis takes several rows.
  const columns = Math.min(last, COLUMNS);
  const count = Math.min(order.length, MOST);

  // The device's place on each axis, the last axis changing fastest.
  const place = (device) => {
    const found = [];
    for (let k = sizes.length - 1; k >= 0; k--) {
      found.unshift(device % sizes[k]);
      device = Math.floor(device / sizes[k]);
    }
    return found;
  };

  const block = (array, at) => array.shape.map((_, d) =>
    (array.spec[d] ?? []).reduce((index, axis) => {
      const k = names.indexOf(axis);
      return index * sizes[k] + at[k];
    }, 0));

  const pieces = (array) => array.shape.map((_, d) =>
    (array.spec[d] ?? []).reduce((product, axis) => product * sizes[names.indexOf(axis)], 1));

  const cell = (array, device) => {
    const index = block(array, place(device));
    const parts = pieces(array);
    const number = index.reduce((n, i, d) => n * parts[d] + i, 0);
    const td = element("td", {}, element("b", {}, `device ${order[device]}`), element("span", {}, `[${index.join(", ")}]`));
    td.style.setProperty("--hue", Math.round((360 * number) / array.shards + 210) % 360);
    return td;
  };

  const label = (first, from) => {
    const at = place(first);
    const words = names.slice(0, -1).map((axis, k) => `${axis} ${at[k]}`);
    if (columns < last) words.push(`${name} ${from}–${Math.min(from + columns, last) - 1}`);
    return words.join(", ");
  };

  const draw = () => {
    const array = data.arrays[select.value];
    const size = array.shape.map((s, d) => s / pieces(array)[d]);
    const copies = order.length / array.shards;
    const each = copies === 1 ? "on one device each" : `on ${copies} devices each`;
    const cut = array.shards === 1 ? `replicated on ${copies === 1 ? "the device" : "every device"}`
      : `${array.shards} shards of [${size.join(", ")}], ${each}`;
    document.getElementById("shards").textContent = `${array.text}: ${cut}, ` +
      `${array.device_bytes_text} per device.` + (order.length > count ? ` The first ${count} devices are shown.` : "");
    const body = element("tbody", {});
    for (let first = 0; first < count; first += last) {
      for (let from = 0; from < last && first + from < count; from += columns) {
        const words = label(first, from);
        const row = element("tr", {}, words ? element("th", { scope: "row" }, words) : element("td", { class: "none" }));
        const to = Math.min(from + columns, last);
        for (let c = from; c < to; c++) row.append(cell(array, first + c));
        body.append(row);
      }
    }
    const head = element("tr", {}, element("td", {}));
    if (columns === last) for (let c = 0; c < last; c++) head.append(element("th", { scope: "col" }, name ? `${name} ${c}` : ""));
    const caption = element("caption", {}, "Devices, and the part of the array that each holds: its number along each dimension");
    table.replaceChildren(caption, element("thead", {}, head), body);
  };

  data.arrays.forEach((array, k) => select.append(element("option", { value: k }, array.path)));
  if (data.arrays.length) {
    const split = data.arrays.findIndex((array) => array.shards > 1);
    select.value = Math.max(split, 0);
    select.addEventListener("change", draw);
    draw();
  }
}
