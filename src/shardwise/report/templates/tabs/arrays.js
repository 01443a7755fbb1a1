{
  const FIRST = 200;
  const body = document.querySelector("#arrays tbody");
  const buttons = [...document.querySelectorAll("#arrays thead button")];
  const more = document.getElementById("more");
  const find = document.getElementById("find");
  const rows = data.arrays.map((a, k) => ({ ...a, k, words: `${a.path} ${a.role} ${a.text}`.toLowerCase() }));
  let key = null, sign = 1, most = FIRST;

  const compare = (a, b) => (a > b) - (a < b);

  const draw = () => {
    const wanted = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = rows.filter((row) => wanted.every((word) => row.words.includes(word)));
    if (key) shown.sort((a, b) => sign * compare(a[key], b[key]) || a.k - b.k);
    body.replaceChildren(...shown.slice(0, most).map((row) =>
      element("tr", {},
        element("th", { scope: "row" }, element("code", {}, row.path)),
        element("td", {}, row.role),
        element("td", {}, element("code", {}, row.text)),
        element("td", { class: "n" }, String(row.shards)),
        element("td", { class: "n" }, row.device_bytes_text))));
    const count = shown.length.toLocaleString("en");
    document.getElementById("found").textContent =
      `${count} of ${rows.length.toLocaleString("en")} arrays` + (shown.length > most ? `, the first ${most} shown` : "");
    more.hidden = shown.length <= most;
    more.textContent = `Show all ${count}`;
  };

  for (const button of buttons) {
    button.addEventListener("click", () => {
      // Figures start with the largest, words with the first.
      const figure = typeof rows[0]?.[button.dataset.key] === "number";
      sign = key === button.dataset.key ? -sign : figure ? -1 : 1;
      key = button.dataset.key;
      for (const other of buttons) {
        const order = other === button ? (sign > 0 ? "ascending" : "descending") : "none";
        other.closest("th").setAttribute("aria-sort", order);
      }
      draw();
    });
  }
  find.addEventListener("input", () => { most = FIRST; draw(); });
  more.addEventListener("click", () => { most = Infinity; draw(); });
  draw();
}
