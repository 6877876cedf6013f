// The live map: asks for a window of each tier, and for the latest steps, again and again, and draws what has changed.

import { Grid } from "./blocks.js";
import { Charts } from "./charts.js";
import { ask, byId, element, paint, show, tell } from "./dom.js";

const NUM_COLUMNS = 32;
const NUM_BLOCKS = 1024; // in a window
const PAUSE_MS = 1000;
const MOST_CHARS = 1 << 25; // past maps that this page keeps, as JSON
const ENGINE = encodeURIComponent(new URLSearchParams(location.search).get("engine") ?? "0"); // of several
const charts = new Charts(ENGINE);

let isPaused = false;
let isFollowing = true; // the window turns to where blocks are in use
let marked; // the holder under the pointer
let pinned; // the holder that was pressed
let answeredAt = "";
let holders = new Map();
let numRefreshes = 0;
let timer;

// A tier of the cache: the window of it that is shown, and the buttons that turn to others.
class Tier {
  constructor(name, prefix) {
    Object.assign(this, { name, prefix, first: 0, total: 0 });
    byId(`${prefix}previous`).addEventListener("click", () => this.turn(-1));
    byId(`${prefix}next`).addEventListener("click", () => this.turn(1));
    byId(`${prefix}grid`).addEventListener("focus", () => activate(this));
  }

  ask() {
    return ask(`debug/kv?engine=${ENGINE}&tier=${this.name}&first=${this.first}&count=${NUM_BLOCKS}`);
  }

  show({ first, blocks, stats }, total) {
    this.total = total;
    const numbers = [first, first + blocks.length - 1, total].map((number) => number.toLocaleString("en-US"));
    show(`${this.prefix}range`, `${numbers[0]} to ${numbers[1]} of ${numbers[2]}`);
    byId(`${this.prefix}previous`).disabled = first === 0;
    byId(`${this.prefix}next`).disabled = first + blocks.length >= total;
    this.grid ??= new Grid(byId(`${this.prefix}grid`), NUM_COLUMNS, stats.block_size, (entry) => {
      if (this === active) showDetail(entry, stats.block_size);
    });
    this.grid.update(blocks);
    this.grid.mark(marked);
  }

  turn(pages) {
    this.open(this.first + pages * NUM_BLOCKS);
  }

  // Show the window with a block, as it is now: of the past there is no other window.
  open(block) {
    if (charts.chosen) charts.choose(undefined);
    const inside = Math.max(0, Math.min(block, this.total - 1));
    this.first = inside - (inside % NUM_BLOCKS);
    if (this === kv) setFollowing(false);
    refresh();
  }
}

// All blocks of the cache at a glance: an element for each span, in the colour of the holder of most of its blocks.
class Overview {
  constructor(strip, slider) {
    Object.assign(this, { strip, slider, spans: [] });
    strip.addEventListener("click", (event) => {
      const place = this.spans.indexOf(event.target);
      if (place >= 0) kv.open(place * this.blocksPerSpan);
    });
    slider.addEventListener("input", () => kv.open(Number(slider.value) * NUM_BLOCKS));
  }

  show({ blocks_per_span: blocksPerSpan, used, cached, holders }, total) {
    this.blocksPerSpan = blocksPerSpan;
    if (this.spans.length !== used.length) {
      this.spans = used.map(() => element("i"));
      this.strip.replaceChildren(...this.spans);
      this.slider.max = Math.ceil(total / NUM_BLOCKS) - 1;
      this.slider.hidden = this.strip.hidden = total <= NUM_BLOCKS;
    }
    this.spans.forEach((span, place) => {
      const state = used[place] ? "used" : cached[place] ? "cached" : "free";
      const looks = `${state} ${holders[place]}`;
      if (span.looks !== looks) {
        span.looks = looks;
        span.className = state;
        if (state === "used") paint(span, holders[place]);
      }
      const isShown = Math.floor((place * blocksPerSpan) / NUM_BLOCKS) === kv.first / NUM_BLOCKS;
      span.classList.toggle("shown", isShown);
    });
    this.slider.value = kv.first / NUM_BLOCKS;
    this.slider.setAttribute("aria-valuetext", `blocks ${kv.first} to ${Math.min(kv.first + NUM_BLOCKS, total) - 1} of ${total}`);
  }

  // Return the first block of the window with the most blocks in use; undefined if the one that is shown has some.
  busiest({ blocks_per_span: blocksPerSpan, used }) {
    const byWindow = [];
    used.forEach((number, place) => {
      const place0 = Math.floor((place * blocksPerSpan) / NUM_BLOCKS);
      byWindow[place0] = (byWindow[place0] ?? 0) + number;
    });
    const most = Math.max(...byWindow);
    return most === 0 || byWindow[kv.first / NUM_BLOCKS] > 0 ? undefined : byWindow.indexOf(most) * NUM_BLOCKS;
  }
}

// Maps of the past, oldest first, each as text with the time at which it came, by the server's clock.
class PastMaps {
  constructor() {
    Object.assign(this, { maps: [], numChars: 0 });
  }

  add(time, maps) {
    const text = JSON.stringify(maps);
    this.maps.push({ time, text });
    for (this.numChars += text.length; this.numChars > MOST_CHARS; this.maps.shift()) {
      this.numChars -= this.maps[0].text.length;
    }
  }

  // Return the last one up to a time; undefined if this page was not open then.
  at(time) {
    return this.maps.findLast((map) => map.time <= time);
  }
}

const kv = new Tier("kv", "");
const swap = new Tier("swap", "swap-");
const overview = new Overview(byId("overview"), byId("window"));
const past = new PastMaps();
let isPast = false; // a map of the past is shown
let active = kv; // whose chosen block is told of

function activate(tier) {
  active = tier;
  for (const each of [kv, swap]) byId(`${each.prefix}grid`).classList.toggle("resting", each !== tier);
  tier.grid?.choose(tier.grid.chosen);
}

function holderName(holder) {
  if (holder?.kind !== "sequence") return holder ? `${holder.kind} ${holder.request_id}` : "?";
  return `request ${holder.request_id} · branch ${holder.branch}`;
}

function showDetail(entry, blockSize) {
  show("chosen", entry.tier === "kv" ? String(entry.block) : `${entry.block} of the swap space`);
  const words = { free: "Free: holds nothing.", cached: "Cached: no owner, content can be found.", used: "" }[entry.state];
  const owners = entry.owners.map((owner) =>
    element("li", {},
      element("span", { class: "swatch", hue: owner.holder }),
      element("span", { text: holderName(holders.get(owner.holder)) }),
      element("span", { class: "figure", text: `logical ${owner.index} · ${owner.filled}/${blockSize}` })));
  const numMore = entry.ref_count - entry.owners.length;
  if (numMore > 0) owners.push(element("li", { text: `and ${numMore} more` }));
  const state = words || `Used, held ${entry.ref_count === 1 ? "once" : `${entry.ref_count} times`}.`;
  byId("detail").replaceChildren(element("p", { text: state }), element("ul", { class: "holders" }, ...owners));
}

function showHolders(list) {
  const rows = list.map((holder) => {
    const row = element("button", { type: "button", "aria-pressed": String(holder.holder === pinned) },
      element("span", { class: "swatch", hue: holder.holder }),
      element("span", { text: holderName(holder) }),
      element("span", { class: "figure", text: `${holder.num_tokens} tokens${holder.isAway ? ", swapped out" : ""}` }));
    if (holder.owner) row.append(element("span", { class: "label", text: holder.owner }));
    row.addEventListener("pointerenter", () => mark(holder.holder));
    row.addEventListener("pointerleave", () => mark(pinned));
    row.addEventListener("click", () => pin(holder.holder, list));
    return element("li", { "data-holder": holder.holder }, row);
  });
  show("num-holders", list.length || "");
  const focused = document.activeElement.closest?.("[data-holder]")?.dataset.holder;
  byId("holders").replaceChildren(...(rows.length ? rows : [element("li", { class: "hint", text: "None, just now." })]));
  if (focused !== undefined) document.querySelector(`[data-holder="${focused}"] button`)?.focus();
}

// Keep a holder marked until it is pressed again.
function pin(holder, list) {
  pinned = holder === pinned ? undefined : holder;
  mark(pinned);
  showHolders(list);
}

function mark(holder) {
  marked = holder;
  for (const tier of [kv, swap]) tier.grid?.mark(holder);
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
  show("swap-used", stats.swap_used_blocks);
  show("swapped-out", stats.swapped_out_blocks);
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

// The two maps are of different steps: who has moved meanwhile may be in both, or in none.
function showMaps(map, away) {
  if (pinned !== undefined && !map.holders.some((holder) => holder.holder === pinned)) mark((pinned = undefined));
  const list = [...map.holders, ...(away?.holders ?? []).map((holder) => ({ ...holder, isAway: true }))];
  holders = new Map(list.map((holder) => [holder.holder, holder]));
  kv.show(map, map.stats.total_blocks);
  overview.show(map.overview, map.stats.total_blocks);
  document.querySelectorAll(".swap").forEach((part) => { part.hidden = !away; });
  if (away) swap.show(away, away.stats.swap_total_blocks);
  showFigures(map.stats);
  showHolders([...holders.values()]);
}

// Show the map of a step that was chosen, the last one that came before its end; of undefined that of now.
function showMoment(step) {
  const found = step && past.at(step.end);
  isPast = Boolean(found);
  if (isPast) {
    const [map, away] = JSON.parse(found.text);
    kv.first = map.first;
    showMaps(map, away);
  } else refresh();
  const kept = `This page keeps maps while it is open, one a second: ${past.maps.length.toLocaleString("en-US")}`;
  const which = isPast ? `As it was ${charts.clock(found.time)}.` : "No map of that moment: this is the map of now.";
  show("map-hint", step ? `${which} ${kept} by now.` : "");
}

charts.onChoose = showMoment;

async function refresh() {
  clearTimeout(timer);
  const number = ++numRefreshes;
  try {
    let map = await kv.ask();
    const busiest = isFollowing ? overview.busiest(map.overview) : undefined;
    if (busiest !== undefined) {
      kv.first = busiest;
      map = await kv.ask();
    }
    const away = map.stats.swap_total_blocks > 0 ? await swap.ask() : undefined;
    if (number !== numRefreshes) return; // another window is on its way
    isPast &&= Boolean(charts.chosen); // not of a server that was started again
    if (!isPast) showMaps(map, away);
    await charts.refresh();
    if (!charts.isRefused) past.add(charts.now, [map, away]); // it came just before
    answeredAt = new Date().toLocaleTimeString();
    document.body.classList.remove("stale");
    tell(isPaused ? "paused" : "live");
  } catch (error) {
    document.body.classList.add("stale");
    tell(error.status ? error.message : `the server does not answer${answeredAt && ` since ${answeredAt}`}; trying again`, true);
  }
  if (!isPaused) timer = setTimeout(refresh, PAUSE_MS);
}

function setPaused(paused) {
  isPaused = paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  show("pause", paused ? "Go on" : "Pause");
  if (paused) {
    clearTimeout(timer);
    numRefreshes++; // the map under way is not shown
    tell("paused");
  } else refresh();
}

function setFollowing(following) {
  isFollowing = following;
  byId("follow").setAttribute("aria-pressed", String(following));
}

byId("follow").addEventListener("click", () => {
  setFollowing(!isFollowing);
  refresh();
});
byId("pause").addEventListener("click", () => setPaused(!isPaused));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else if (!isPaused) refresh();
});
refresh();
