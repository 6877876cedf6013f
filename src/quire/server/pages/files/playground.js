// The playground: buttons make a list of operations, and the server replays it on a fresh cache. No state but the list.

import { Grid } from "./blocks.js";
import { ask, byId, element, paint, show, tell } from "./dom.js";

const NUM_COLUMNS = 16;
const BLOCK_SIZE = 16;

const on = (op, sequence, count) => (count === undefined ? { op, sequence } : { op, sequence, count });
const times = (number, make) => Array.from({ length: number }, (_, index) => make(index));
const EXAMPLES = [
  ["Four branches of one prompt", "64 tokens, forked three times, 10 more each: 8 blocks instead of 20, and no copy.",
    [{ op: "new" }, on("append", 0, 64), ...times(3, () => on("fork", 0)), ...times(4, (own) => on("append", own, 10))]],
  ["Copy on write", "A prompt that ends inside a block. The first branch to write gets a copy, the last one left does not.",
    [{ op: "new" }, on("append", 0, 40), on("fork", 0), on("write", 0), on("write", 1)]],
  ["Holes are no problem", "One of three ends; the next takes its blocks first, and its table is out of order.",
    [...times(3, () => ({ op: "new" })), ...times(3, (own) => on("append", own, 160)), on("free", 1), { op: "new" },
      on("append", 3, 320)]],
  ["A full pool", "The second sequence does not fit: it gets nothing, and loses nothing.",
    [{ op: "new" }, on("append", 0, 800), { op: "new" }, on("append", 1, 300)]],
];

let operations = [];
let target = 0; // the sequence that the buttons work on
let turn = Promise.resolve(); // of the last press
const grid = new Grid(byId("grid"), NUM_COLUMNS, BLOCK_SIZE, showDetail);

function nameOf(sequence) {
  const round = Math.floor(sequence / 26);
  return String.fromCharCode(65 + (sequence % 26)) + (round || "");
}

function describe(operation) {
  const name = nameOf(operation.sequence ?? 0);
  return {
    new: "new sequence",
    append: `${name}: append ${operation.count}`,
    fork: `fork ${name}`,
    write: `${name}: write to last`,
    free: `free ${name}`,
  }[operation.op];
}

function showDetail(entry) {
  const owners = entry.owners.map((owner) => `${nameOf(owner.holder)}'s logical block ${owner.index}`);
  const filled = entry.owners.length ? `, ${entry.owners[0].filled} of ${BLOCK_SIZE} slots filled` : "";
  const numMore = entry.ref_count - owners.length;
  const more = numMore > 0 ? [`${numMore} more`] : [];
  const text = owners.length ? `${[...owners, ...more].join(", ")}${filled}` : "free";
  show("detail", `Block ${entry.block}: ${text}.`);
}

function tableRow([sequence, numTokens, table], counts) {
  const isTarget = sequence === target;
  const boxes = table.map((block, index) =>
    element("span", { class: counts[block] > 1 ? "box shared" : "box", title: `logical block ${index}` },
      element("span", { text: block }), element("small", { text: `×${counts[block]}` })));
  const row = element("button", {
    type: "button", role: "radio", class: "table", "aria-checked": String(isTarget), tabindex: isTarget ? "0" : "-1",
    "data-sequence": sequence, "data-table": table.join(","), "data-counts": table.map((block) => counts[block]).join(","),
  },
    element("span", { class: "swatch", hue: sequence }),
    element("span", { class: "name", text: nameOf(sequence) }),
    element("span", { class: "figure", text: `${numTokens} tokens` }),
    element("span", { class: "boxes" }, ...boxes));
  row.addEventListener("click", () => choose(sequence));
  return row;
}

let latest;
function choose(sequence) {
  target = sequence;
  draw(latest);
  document.querySelector('#tables [aria-checked="true"]')?.focus();
}

function moveChoice(event) {
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const alive = latest.sequences.map(([sequence]) => sequence);
  const next = alive[alive.indexOf(target) + step];
  if (next === undefined) return;
  event.preventDefault();
  choose(next);
}

function draw(state) {
  latest = state;
  const alive = state.sequences.map(([sequence]) => sequence);
  if (!alive.includes(target)) target = alive.at(-1) ?? 0;
  const counts = state.blocks.map((entry) => entry.ref_count);
  const stats = state.stats;
  show("free", stats.free_blocks);
  show("used", stats.used_blocks);
  show("shared", stats.shared_blocks);
  show("sequences", stats.num_sequences);
  show("copies", stats.copied_blocks);
  show("waste", stats.tail_waste_slots);
  show("unshared", state.sequences.reduce((sum, [, , table]) => sum + table.length, 0));
  grid.update(state.blocks);
  const rows = state.sequences.map((sequence) => tableRow(sequence, counts));
  byId("tables").replaceChildren(...(rows.length ? rows : [element("p", { class: "hint", text: "No sequence yet." })]));
  byId("log").replaceChildren(...state.outcomes.map((outcome, index) =>
    element("li", { value: index + 1 }, element("b", { text: describe(operations[index]) }), element("span", { text: outcome }),
    )).reverse());
  byId("on-sequence").disabled = alive.length === 0;
  show("target", alive.length ? nameOf(target) : "–");
  paint(byId("target"), target);
  byId("undo").disabled = byId("reset").disabled = operations.length === 0;
}

// Replay a list, and keep it if the server took it.
async function replay(wanted, nextTarget = target) {
  try {
    const state = await ask("debug/blocks/replay", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ operations: wanted }),
    });
    operations = wanted;
    target = nextTarget;
    draw(state);
    tell("");
  } catch (error) {
    tell(error.message, true);
  }
}

// Do one press after the other, each on what the one before it has left.
function press(button, work) {
  byId(button).addEventListener("click", () => (turn = turn.then(work)));
}

const numBegun = () => operations.filter((operation) => ["new", "fork"].includes(operation.op)).length;
const act = (operation, nextTarget) => replay([...operations, operation], nextTarget);

press("new", () => act({ op: "new" }, numBegun()));
press("fork", () => act(on("fork", target)));
press("write", () => act(on("write", target)));
press("free-sequence", () => act(on("free", target)));
press("undo", () => replay(operations.slice(0, -1)));
press("reset", () => replay([]));
byId("actions").addEventListener("submit", (event) => {
  event.preventDefault();
  const count = byId("count").valueAsNumber;
  turn = turn.then(() => act(on("append", target, count)));
});
byId("tables").addEventListener("keydown", moveChoice);
byId("examples").replaceChildren(...EXAMPLES.map(([title, text, steps]) => {
  const button = element("button", { type: "button", text: title });
  button.addEventListener("click", () => (turn = turn.then(() => replay(steps, 0))));
  return element("li", {}, button, element("span", { text }));
}));
turn = replay([]);
