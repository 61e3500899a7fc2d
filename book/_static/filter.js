// The list of all claims by verdict and by words. Without scripts the whole list is shown; nothing is loaded, nothing is kept.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("table.fc-filtered");
  if (!table) return;
  const rows = [...table.tBodies[0].rows], box = table.closest(".fc-box");
  const verdictsOf = (row) => [...row.classList].filter((name) => name.startsWith("fc-is-")).map((name) => name.slice("fc-is-".length));
  const words = ["holds", "does-not-hold", "within-noise", "one-run", "vacuous", "not-run"].filter((word) => rows.some((row) => verdictsOf(row).includes(word)));

  const form = document.createElement("form");
  form.className = "fc-filter";
  form.setAttribute("role", "search");
  form.setAttribute("aria-label", "Filter the claims");
  for (const word of words) {
    const label = form.appendChild(document.createElement("label")), input = document.createElement("input");
    Object.assign(input, { type: "checkbox", name: "verdict", value: word, checked: true });
    const chip = table.querySelector(`.fc-chip.${word}`).cloneNode(true);
    label.append(input, " ", chip);
  }
  const label = form.appendChild(document.createElement("label")), field = document.createElement("input");
  Object.assign(field, { type: "search", name: "words", placeholder: "method, table, task …" });
  label.append("Words ", field);
  const told = form.appendChild(document.createElement("output"));
  box.before(form);

  const asked = new URLSearchParams(location.search); // scoreboard.html?verdict=does-not-hold&words=surgery
  if (asked.has("verdict"))
    for (const input of form.querySelectorAll("[name=verdict]")) input.checked = asked.getAll("verdict").includes(input.value);
  field.value = asked.get("words") || "";

  const apply = () => {
    const wanted = [...form.querySelectorAll("[name=verdict]:checked")].map((input) => input.value);
    const parts = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !verdictsOf(row).some((word) => wanted.includes(word)) || !parts.every((part) => text.includes(part));
    }
    told.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims shown`;
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();
});
