{
  const style = document.getElementById("style");
  const shown = document.getElementById("pasted");
  const copied = document.getElementById("copied");
  style.addEventListener("change", () => {
    shown.textContent = data.code[style.value];
    copied.textContent = "";
  });
  document.getElementById("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(shown.textContent);
      copied.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(shown);
      copied.textContent = "Selected: copy it with the keyboard.";
    }
  });
}
