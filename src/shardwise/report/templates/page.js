const data = JSON.parse(document.getElementById("data").textContent);

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

{
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const open = (tab) => {
    for (const other of tabs) {
      const chosen = other === tab;
      other.setAttribute("aria-selected", chosen);
      other.tabIndex = chosen ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
    }
    // Not scrollIntoView: after it the Tab key would go on from there, past the tabs.
    const list = tab.parentElement, box = list.getBoundingClientRect(), own = tab.getBoundingClientRect();
    list.scrollLeft += Math.min(0, own.left - box.left) + Math.max(0, own.right - box.right);
  };
  const named = () => tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0];
  const go = (tab) => {
    history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
    open(tab);
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
  window.addEventListener("hashchange", () => open(named()));
  open(named());
}
