// The live map: asks for a window of the pool again and again, and draws what has changed.

import { Grid, ask, byId, element, show, tell } from "./blocks.js";

const NUM_COLUMNS = 32;
const NUM_BLOCKS = 1024; // in a window
const PAUSE_MS = 1000;

let first = 0;
let total = 0;
let isPaused = false;
let marked; // the holder under the pointer
let holders = new Map();
let grid;
let timer;

function holderName(holder) {
  if (holder?.kind !== "sequence") return holder ? `${holder.kind} ${holder.request_id}` : "?";
  return `request ${holder.request_id} · branch ${holder.branch}`;
}

function showDetail(entry) {
  show("chosen", String(entry.block));
  const words = { free: "Free: holds nothing.", cached: "Cached: no owner, content can be found.", used: "" }[entry.state];
  const owners = entry.owners.map((owner) =>
    element("li", {},
      element("span", { class: "swatch", hue: owner.holder }),
      element("span", { text: holderName(holders.get(owner.holder)) }),
      element("span", { class: "figure", text: `logical ${owner.index} · ${owner.filled}/${grid.blockSize}` })));
  const numMore = entry.ref_count - entry.owners.length;
  if (numMore > 0) owners.push(element("li", { text: `and ${numMore} more` }));
  const state = words || `Used, held ${entry.ref_count === 1 ? "once" : `${entry.ref_count} times`}.`;
  byId("detail").replaceChildren(element("p", { text: state }), element("ul", { class: "holders" }, ...owners));
}

function showHolders(list) {
  const rows = list.map((holder) => {
    const row = element("li", {},
      element("span", { class: "swatch", hue: holder.holder }),
      element("span", { text: holderName(holder) }),
      element("span", { class: "figure", text: `${holder.num_tokens} tokens` }));
    if (holder.owner) row.append(element("span", { class: "label", text: holder.owner }));
    row.addEventListener("pointerenter", () => mark(holder.holder));
    row.addEventListener("pointerleave", () => mark(undefined));
    return row;
  });
  byId("holders").replaceChildren(...(rows.length ? rows : [element("li", { class: "hint", text: "Nobody, just now." })]));
}

function mark(holder) {
  marked = holder;
  grid.mark(holder);
}

function showFigures(stats) {
  show("block-size", stats.block_size);
  show("used", stats.used_blocks);
  show("cached", stats.cached_blocks);
  show("free", stats.free_blocks);
  show("shared", stats.shared_blocks);
  show("sequences", stats.num_sequences);
  show("waste", stats.tail_waste_slots);
  show("copies", stats.copied_blocks);
  show("evicted", stats.evicted_blocks);
  const share = stats.prefix_hits_tokens / stats.prefix_queries_tokens;
  show("hits", Number.isNaN(share) ? "–" : `${(100 * share).toFixed(0)} %`);
  for (const state of ["used", "cached", "free"]) {
    const part = document.querySelector(`#pool .${state}`);
    part.style.flexGrow = stats[`${state}_blocks`];
  }
  const owners = Object.entries(stats.blocks_by_owner ?? {}).sort((one, other) => other[1] - one[1]);
  byId("owners-card").hidden = owners.length === 0;
  byId("owners").replaceChildren(...owners.flatMap(([owner, num]) => [
    element("dt", { text: owner }), element("dd", { class: "figure", text: num.toLocaleString("en-US") }),
  ]));
}

function showMap(map) {
  total = map.stats.total_blocks;
  const last = map.first + map.blocks.length - 1;
  show("range", `${map.first.toLocaleString("en-US")} to ${last.toLocaleString("en-US")} of ${total.toLocaleString("en-US")}`);
  byId("previous").disabled = map.first === 0;
  byId("next").disabled = last + 1 >= total;
  holders = new Map(map.holders.map((holder) => [holder.holder, holder]));
  grid ??= new Grid(byId("grid"), NUM_COLUMNS, map.stats.block_size, showDetail);
  grid.update(map.blocks);
  grid.mark(marked);
  showFigures(map.stats);
  showHolders(map.holders);
}

async function refresh() {
  clearTimeout(timer);
  const asked = first;
  try {
    const map = await ask(`kv?first=${asked}&count=${NUM_BLOCKS}`);
    if (asked !== first) return; // another window is on its way
    showMap(map);
    tell(isPaused ? "paused" : "live");
  } catch (error) {
    tell(error.message, true);
  }
  if (!isPaused) timer = setTimeout(refresh, PAUSE_MS);
}

function turn(pages) {
  first = Math.max(0, Math.min(first + pages * NUM_BLOCKS, total - 1));
  first -= first % NUM_BLOCKS;
  refresh();
}

function setPaused(paused) {
  isPaused = paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  show("pause", paused ? "Go on" : "Pause");
  if (paused) {
    clearTimeout(timer);
    tell("paused");
  } else refresh();
}

byId("previous").addEventListener("click", () => turn(-1));
byId("next").addEventListener("click", () => turn(1));
byId("pause").addEventListener("click", () => setPaused(!isPaused));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else if (!isPaused) refresh();
});
refresh();
