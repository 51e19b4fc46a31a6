// The numbers of a chart's lines nearest to the pointer.
"use strict";
// A page that --live writes is read again every few seconds, not while somebody reads numbers or plays a video.
const live = Number(document.body.dataset.live);
if (live) {
  const busy = () => document.querySelector(".readout") || [...document.querySelectorAll("video")].some((v) => !v.paused);
  setInterval(() => busy() || location.reload(), 1000 * live);
}
for (const svg of document.querySelectorAll("svg[data-x]")) {
  const width = svg.viewBox.baseVal.width;
  const lines = [...svg.querySelectorAll("polyline[data-y]")].map((line) => ({
    name: line.dataset.name,
    x: line.getAttribute("points").split(" ").map(parseFloat),
    at: line.dataset.at.split("|"),
    y: line.dataset.y.split("|"),
  }));
  const mark = svg.querySelector(".axis").cloneNode();
  mark.setAttribute("class", "mark");
  mark.setAttribute("y1", 0);
  const box = document.createElement("div");
  box.className = "readout";
  const read = (event) => {
    const frame = svg.getBoundingClientRect();
    const x = ((event.clientX - frame.left) / frame.width) * width;
    const rows = lines.map((line) => {
      const i = line.x.reduce((best, at, i) => (Math.abs(at - x) < Math.abs(line.x[best] - x) ? i : best), 0);
      return { x: line.x[i], text: `${line.name}: ${line.y[i]} at ${line.at[i]}` };
    });
    const nearest = rows.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a));
    mark.setAttribute("x1", nearest.x);
    mark.setAttribute("x2", nearest.x);
    svg.append(mark);
    box.textContent = rows.map((row) => row.text).join("\n");
    box.style[x < width / 2 ? "right" : "left"] = "10px";
    box.style[x < width / 2 ? "left" : "right"] = "auto";
    svg.parentNode.append(box);
  };
  svg.addEventListener("pointerdown", read);
  svg.addEventListener("pointermove", read);
  svg.addEventListener("pointerleave", () => {
    mark.remove();
    box.remove();
  });
}

// Conversations of training: only those of some iterations and rewards.
for (const box of document.querySelectorAll(".samples")) {
  const inputs = [...box.querySelectorAll("input[type=number]")];
  const fits = (shown, input) => {
    const { least, most } = input.dataset;
    const number = parseFloat(shown.dataset[least || most]);
    return input.value === "" || (least ? number >= parseFloat(input.value) : number <= parseFloat(input.value));
  };
  const filter = () => {
    for (const shown of box.querySelectorAll("details")) shown.hidden = !inputs.every((input) => fits(shown, input));
  };
  inputs.forEach((input) => input.addEventListener("input", filter));
}
