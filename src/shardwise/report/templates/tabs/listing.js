if (data.program) {
  const rows = data.program.lines.map((line) => element("span", { class: line.kind }, `${line.text}\n`));
  document.getElementById("listing").append(...rows);
}
