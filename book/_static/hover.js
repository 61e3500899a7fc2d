// Figures that can be read by hovering: a figure's data, from the page itself, are drawn by plotly.js in the place of the static drawing.
// Without scripts, on paper, or if plotly.js cannot be read, the static drawing stays.
{
  const library = new URL("plotly.min.js", document.currentScript.src).href; // beside this file; 5 MB, so only where it is needed
  document.addEventListener("DOMContentLoaded", () => {
    const given = [...document.querySelectorAll("script.fc-hover")];
    if (!given.length) return;
    const draw = () => {
      for (const data of given) {
        const still = document.getElementById(data.dataset.for)?.querySelector("img");
        if (!still) continue;
        const box = document.createElement("div"), figure = JSON.parse(data.textContent);
        box.className = "fc-chart";
        box.setAttribute("role", "img");
        box.setAttribute("aria-label", still.alt);
        still.before(box);
        still.classList.add("fc-still");
        Plotly.newPlot(box, figure.data, figure.layout, {responsive: true, displayModeBar: false, showTips: false});
      }
    };
    document.head.append(Object.assign(document.createElement("script"), {src: library, onload: draw}));
  });
}
