// The grid of blocks of the live map and the playground.

import { element, paint } from "./dom.js";

const MAX_BARS = 6; // in one cell

// Cells that are told what they show; arrows move between them, and the one that was chosen is handed to `onChoose`.
export class Grid {
  constructor(container, numColumns, blockSize, onChoose) {
    Object.assign(this, { container, numColumns, blockSize, onChoose, cells: [], blocks: [], chosen: 0 });
    container.tabIndex = 0;
    container.setAttribute("role", "listbox");
    container.setAttribute("aria-label", "blocks");
    container.addEventListener("click", (event) => {
      const index = this.cells.indexOf(event.target.closest(".cell"));
      if (index >= 0) this.choose(index);
    });
    container.addEventListener("keydown", (event) => this.move(event));
  }

  update(blocks) {
    if (blocks.length !== this.cells.length || blocks[0]?.block !== this.blocks[0]?.block) this.build(blocks);
    this.blocks = blocks;
    blocks.forEach((entry, index) => this.draw(this.cells[index], entry));
    this.choose(Math.min(this.chosen, blocks.length - 1));
  }

  build(blocks) {
    this.cells = blocks.map((entry) => element("div", { class: "cell", role: "option", id: `${entry.tier}-${entry.block}` }));
    const parts = [];
    this.cells.forEach((cell, index) => {
      if (index % this.numColumns === 0) {
        parts.push(element("span", { class: "row", "aria-hidden": "true", text: blocks[index].block }));
      }
      parts.push(cell);
    });
    this.container.replaceChildren(...parts);
  }

  draw(cell, entry) {
    const looks = JSON.stringify([entry.state, entry.ref_count, entry.owners]);
    if (cell.looks === looks) return;
    cell.looks = looks;
    cell.className = `cell ${entry.state}`;
    const name = `block ${entry.block}, ${entry.state}`;
    cell.setAttribute("aria-label", entry.ref_count ? `${name}, held by ${entry.ref_count}` : name);
    const bars = entry.owners.slice(0, MAX_BARS).map((owner) => {
      const bar = element("i", { hue: owner.holder });
      bar.style.height = `${(100 * owner.filled) / this.blockSize}%`;
      return bar;
    });
    if (entry.ref_count > 1) bars.push(element("b", { text: entry.ref_count }));
    cell.replaceChildren(...bars);
  }

  choose(index) {
    this.cells[this.chosen]?.removeAttribute("aria-selected");
    this.chosen = index;
    const cell = this.cells[index];
    if (!cell) return;
    cell.setAttribute("aria-selected", "true");
    this.container.setAttribute("aria-activedescendant", cell.id);
    this.onChoose(this.blocks[index]);
  }

  move(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.numColumns, ArrowDown: this.numColumns };
    const next = this.chosen + steps[event.key];
    if (!(next >= 0 && next < this.cells.length)) return;
    event.preventDefault();
    this.choose(next);
  }

  // Mark the blocks that a holder has; none without one.
  mark(holder) {
    this.container.classList.toggle("marking", holder !== undefined);
    this.blocks.forEach((entry, index) => {
      const isHeld = entry.owners.some((owner) => owner.holder === holder);
      this.cells[index].classList.toggle("marked", isHeld);
    });
  }
}
