"use strict";

const whys = JSON.parse(document.getElementById("whys").textContent);
const grid = document.querySelector(".grid");
const panel = document.querySelector(".why");
const columns = [...grid.querySelectorAll("thead tr:last-child th")];
let pinned = null;

// The reason behind a cell: shown on hover, kept by a click until the next one or Escape.

function show(cell) {
  grid.querySelector(".is-shown")?.classList.remove("is-shown");
  panel.hidden = cell === null;
  if (cell === null) return;
  cell.classList.add("is-shown");
  const row = cell.parentElement;
  const backend = row.parentElement.dataset.backend;
  const place = columns[cell.cellIndex - 1].dataset.place;
  const title = document.createElement("strong");
  title.textContent = `${backend} · ${row.cells[0].dataset.label} · ${place}`;
  panel.replaceChildren(title, whys[cell.dataset.why] || cell.textContent);
}

const cellOf = (event) => event.target.closest("[data-why]");

grid.addEventListener("mouseover", (event) => {
  const cell = cellOf(event);
  if (cell && !pinned) show(cell);
});
grid.addEventListener("mouseleave", () => show(pinned));
grid.addEventListener("click", (event) => {
  const cell = cellOf(event);
  pinned = cell === pinned ? null : cell;
  show(pinned);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") show((pinned = null));
});

// One backend, one feature, some vendors.

const chosen = { backend: "", axis: "" };

function filter() {
  grid.classList.toggle("one-axis", chosen.axis !== "");
  for (const body of grid.querySelectorAll("tbody")) {
    body.hidden = chosen.backend !== "" && body.dataset.backend !== chosen.backend;
    for (const row of body.querySelectorAll("[data-axis]")) {
      row.hidden = chosen.axis !== "" && row.dataset.axis !== chosen.axis;
    }
  }
}

for (const select of document.querySelectorAll("[data-filter]")) {
  select.addEventListener("change", () => {
    chosen[select.dataset.filter] = select.value;
    filter();
  });
}
for (const box of document.querySelectorAll("[data-vendor]")) {
  box.addEventListener("change", () => {
    for (const cell of grid.querySelectorAll(`.v-${box.dataset.vendor}`)) {
      cell.hidden = !box.checked;
    }
  });
}
document.querySelector(".controls").hidden = false;
